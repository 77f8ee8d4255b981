"""The ranks of a process group write one export together: each its share, rank 0 the index last."""

from __future__ import annotations

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


@pytest.mark.parametrize("format_", ["dcp", "megatron"])
def test_each_rank_reads_its_share(own: Path, tmp_path: Path, format_: Any) -> None:
    faults, target = Faults(), tmp_path / "together"
    tools.export(own, tmp_path / "alone", format=format_)

    def run(_: object) -> Any:
        return tools.export(faults.at(own), target, format=format_, process_group=THREADS)

    first, *others = outcomes(ThreadWorld(RANKS), run)
    assert others == [first] * (RANKS - 1)
    assert set(first.files) == {file.name for file in target.iterdir()}
    assert {f"__{rank}_0.distcp" for rank in range(RANKS)} < set(first.files)
    assert (first.tensors, first.nbytes) == (12, 12 << 20)
    assert max(faults.bytes_read.values()) <= 1.1 * first.nbytes / RANKS
    with bytecheckpoint.open(tmp_path / "alone") as alone, bytecheckpoint.open(target) as together:
        assert together.tensors.keys() == alone.tensors.keys()
        assert all(torch.equal(together.tensors[key][...], entry[...]) for key, entry in alone.tensors.items())


def test_the_failure_of_one_rank_is_that_of_all(own: Path, tmp_path: Path) -> None:
    world = ThreadWorld(RANKS)

    def run(_: object) -> Any:
        return tools.export(own, tmp_path / "out", format="dcp", process_group=THREADS)

    damage(storage_file(own, "model"))  # of one block
    assert [type(error) for error in outcomes(world, run)] == [CorruptCheckpointError] * RANKS
    assert not list((tmp_path / "out").iterdir())
    (tmp_path / "out" / "other").touch()
    assert [type(error) for error in outcomes(world, run)] == [UsageError] * RANKS
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["other"]


def test_one_process_writes_the_other_formats(own: Path, tmp_path: Path) -> None:
    for format_ in ("torch", "deepspeed-universal"):
        with pytest.raises(UsageError, match="is written by one process"):
            tools.export(own, tmp_path / "x", format=format_, process_group=THREADS)  # type: ignore[arg-type]
