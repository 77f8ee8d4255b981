"""The ranks of a process group write one export together: each its share, rank 0 the index last."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CorruptCheckpointError, UsageError, tools
from bytecheckpoint.collectives.testing import ThreadWorld
from tests.support.damage import damage, storage_file
from tests.support.faulty_storage import Faults
from tests.support.ranks import outcomes

RANKS = 3
THREADS: Any = object()  # a group of ranks that are threads


@pytest.fixture
def own(tmp_path: Path) -> Path:
    names = ["embedding.weight", *(f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in range(11))]
    bytecheckpoint.save(tmp_path / "own", {"model": {name: torch.randn(256, 1024) for name in names}})
    return tmp_path / "own"


@pytest.mark.parametrize(
    ("format_", "file"),
    [("hf", "model-{:05d}-of-00003.safetensors"), ("dcp", "__{}_0.distcp"), ("megatron", "__{}_0.distcp")],
)
def test_each_rank_reads_its_share(own: Path, tmp_path: Path, format_: Any, file: str) -> None:
    faults, target = Faults(), tmp_path / "together"
    tools.export(own, tmp_path / "alone", format=format_)

    def run(_: object) -> Any:
        return tools.export(faults.at(own), target, format=format_, process_group=THREADS)

    first, *others = outcomes(ThreadWorld(RANKS), run)
    assert others == [first] * (RANKS - 1)
    assert set(first.files) == {file.name for file in target.iterdir()}
    assert {file.format(rank + (format_ == "hf")) for rank in range(RANKS)} < set(first.files)
    assert (first.tensors, first.nbytes) == (12, 12 << 20)
    assert max(faults.bytes_read.values()) <= 1.1 * first.nbytes / RANKS
    with bytecheckpoint.open(tmp_path / "alone") as alone, bytecheckpoint.open(target) as together:
        assert together.tensors.keys() == alone.tensors.keys()
        assert all(torch.equal(together.tensors[key][...], entry[...]) for key, entry in alone.tensors.items())


@pytest.mark.parametrize("format_", ["hf", "dcp"])
def test_the_failure_of_one_rank_is_that_of_all(own: Path, tmp_path: Path, format_: Any) -> None:
    world = ThreadWorld(RANKS)

    def run(_: object) -> Any:
        return tools.export(own, tmp_path / "out", format=format_, process_group=THREADS)

    damage(storage_file(own, "model"))  # of one block
    assert [type(error) for error in outcomes(world, run)] == [CorruptCheckpointError] * RANKS
    assert not list(tmp_path.glob("*out*/*"))
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "other").touch()
    assert [type(error) for error in outcomes(world, run)] == [UsageError] * RANKS
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["other"]


def test_one_process_writes_the_other_formats(own: Path, tmp_path: Path) -> None:
    for format_ in ("torch", "deepspeed-universal"):
        with pytest.raises(UsageError, match="is written by one process"):
            tools.export(own, tmp_path / "x", format=format_, process_group=THREADS)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["{}/out", "fsspec+memory://exported-{}/out"])
def test_weights_are_replaced_together(own: Path, tmp_path: Path, place: str) -> None:
    """And the names of tensors that overflow are those of all ranks."""
    with bytecheckpoint.open(own) as opened:
        names = [key.removeprefix("model/") for key in opened.tensors]
    bytecheckpoint.save(tmp_path / "large", {"model": {name: torch.full((64, 64), 1e30) for name in names}})
    target = place.format(tmp_path if place.startswith("{") else uuid.uuid4().hex)

    def run(_: object) -> Any:
        options = {"dtype": "float16", "force": True, "files_from": tmp_path / "base", "max_shard_bytes": 20_000}
        return tools.export(tmp_path / "large", target, process_group=THREADS, **options)  # type: ignore[arg-type]

    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    world = ThreadWorld(RANKS)
    for _ in range(2):
        first, *others = outcomes(world, run)
        assert others == [first] * (RANKS - 1) and sorted(first.overflowed) == sorted(names)
    assert len(first.files) == 7 and first.others == ()
    with bytecheckpoint.open(target) as found:
        assert len(found.tensors) == len(names)
