"""Checkpoints of other programs, adopted: like any checkpoint, in files that stay where they are."""

from __future__ import annotations

import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import bytecheckpoint
from bytecheckpoint.cli.main import run
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UsageError,
)
from bytecheckpoint.formats.files import RangedFile
from bytecheckpoint.manager import CheckpointManager, Retention
from bytecheckpoint.representation.catalog_file import decode, encode
from bytecheckpoint.tiers.cooldown import plan_cooldown
from bytecheckpoint.tools import adopt, collect_garbage, compare, copy, remove, verify
from bytecheckpoint.tuning import tuned
from tests.cli.test_foreign import listing
from tests.support.damage import flip_bit
from tests.support.settings import using
from tests.tools.test_verify_foreign import at

MEGATRON = Path(__file__).parents[1] / "formats/golden/megatron-0.19.2/fully_reshardable"
STATE = {"a": torch.arange(3000.0), "b": torch.ones(50, 7).t()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    torch.save(STATE, tmp_path / "source/a.pt")
    return tmp_path / "source"


def larger(folder: Path, kind: str) -> Path:
    """Strided, tied and overlapping tensors of several blocks, at any byte."""
    torch.manual_seed(1)
    weight = torch.randn(700, 500)
    model = {
        "turned": weight.t(), "conv": torch.randn(9, 8, 7, 5).to(memory_format=torch.channels_last), "weight": weight,
        "rows": weight[::3, 5:300:7], "one": torch.ones(3, dtype=torch.uint8),
    }  # fmt: skip
    value = {"model": model, "step": 3, "lrs": [0.5, (1, 2)]}
    if kind == "dcp":
        model["rows"] = model["rows"].contiguous()
        dcp.save(value, checkpoint_id=folder / kind)
        return folder / kind
    torch.save(value, folder / f"{kind}.pt", _use_new_zipfile_serialization=kind == "new")
    return folder / f"{kind}.pt"


@pytest.mark.parametrize("hash", [True, False])
@pytest.mark.parametrize("kind", ["new", "old", "dcp"])
def test_an_adopted_checkpoint_is_like_any_other(tmp_path: Path, kind: str, hash: bool) -> None:
    path, adopted = larger(tmp_path, kind), tmp_path / "run/step_1"
    report = adopt(path, str(adopted), hash=hash)
    assert report.files == 1 and (report.nbytes > 0) == hash
    assert compare(path, adopted).equal and verify(adopted).ok
    whole = torch.load(path)["model"] if kind != "dcp" else None
    module = nn.Module()
    module.register_buffer("turned", torch.zeros(500, 700))
    module.register_buffer("rows", torch.zeros(234, 43))
    bytecheckpoint.load(adopted, {"model": module}, strict=False)
    assert whole is None or (torch.equal(module.turned, whole["turned"]) and torch.equal(module.rows, whole["rows"]))
    with using(chunk_bytes=1 << 20), bytecheckpoint.open(adopted) as found:
        assert found["lrs/1"] == (1, 2) if "lrs/1" in found else found["extra_states/step"] == 3
        assert torch.equal(found["model/conv"][2:4, ::3], module_of(path)["conv"][2:4, ::3])


def module_of(path: Path) -> Any:
    with bytecheckpoint.open(path) as found:
        return {name.partition("/")[2]: found[name][...] for name in found.tensors}


def test_a_large_catalog_and_several_ranks(tmp_path: Path) -> None:
    path, adopted = larger(tmp_path, "new"), tmp_path / "adopted"
    with tuned(catalog_group_bytes=1):
        adopt(path, str(adopted))
        assert compare(path, adopted).equal and verify(adopted).ok and run(["ls", str(adopted)]) == 0

        def load(collective: Collective) -> Any:
            state = {"turned": torch.zeros(500, 700), "rows": torch.zeros(234, 43)}
            bytecheckpoint.load(adopted, {"model": state}, strict=False, timeout=20)
            return state

        whole = torch.load(path)["model"]
        for found in ThreadWorld(2).run(load):
            assert torch.equal(found["turned"], whole["turned"]) and torch.equal(found["rows"], whole["rows"])


def test_a_cache_of_hugging_face(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots/main").mkdir(parents=True)
    save_file({"a": STATE["a"]}, tmp_path / "blobs/x")
    (tmp_path / "snapshots/main/model.safetensors").symlink_to("../../blobs/x")
    adopt(tmp_path / "snapshots/main", str(tmp_path / "adopted"))
    assert compare(tmp_path / "snapshots/main", tmp_path / "adopted").equal and verify(tmp_path / "adopted").ok


def test_a_changed_byte_is_named(source: Path, tmp_path: Path) -> None:
    adopt(source, str(tmp_path / "adopted"))
    flip_bit(source / "a.pt", at(source / "a.pt", "a"))
    (found,) = verify(tmp_path / "adopted").findings
    assert found.kind == "block" and found.file == f"file://{source}/a.pt" and "model/a" in found.tensors
    with pytest.raises(CorruptCheckpointError, match=r"a\.pt.*model/a"):
        bytecheckpoint.load(tmp_path / "adopted", {"model": dict(STATE)})
    assert run(["verify", str(tmp_path / "adopted")]) == 1


def test_a_replaced_file_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    adopt(source, str(tmp_path / "adopted"), hash=False)
    adopt(source, str(tmp_path / "hashed"))
    os.utime(source / "a.pt", (1e9, 1e9))
    assert compare(tmp_path / "hashed", source).equal
    with pytest.raises(CorruptCheckpointError, match=r"a\.pt was replaced or written to since it was adopted"):
        bytecheckpoint.load(tmp_path / "adopted", {"model": dict(STATE)})
    assert [found.kind for found in verify(tmp_path / "adopted").findings] == ["header"]
    torch.save({**STATE, "c": torch.ones(3)}, source / "a.pt")
    with pytest.raises(CorruptCheckpointError, match=r"a\.pt has .* bytes, the catalog says"):
        compare(tmp_path / "hashed", source)
    source.rename(tmp_path / "moved")
    for name in ("adopted", "hashed"):
        assert [found.kind for found in verify(tmp_path / name).findings] == ["missing"]
        with pytest.raises(CorruptCheckpointError, match=r"a\.pt is missing"):
            compare(tmp_path / name, tmp_path / "moved")


def test_targets_that_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes").touch()
    (tmp_path / "link").symlink_to(source)
    for target in (source / "inside", tmp_path / "link/inside", source, tmp_path, tmp_path / "full", source / "a.pt"):
        with pytest.raises(UsageError, match="choose a"):
            adopt(source, str(target))
    adopt(source, str(tmp_path / "adopted"))
    for again in (source, source / "a.pt"):
        with pytest.raises(UsageError, match="is not empty"):
            adopt(again, str(tmp_path / "adopted"))
    with pytest.raises(UsageError, match="is a checkpoint of this package"):
        adopt(tmp_path / "adopted", str(tmp_path / "again"))
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of a known format"):
        adopt(tmp_path / "full", str(tmp_path / "again"))
    adopt(source / "a.pt", str(source / "beside"))
    assert verify(source / "beside").ok


def test_the_folder_that_a_moved_checkpoint_leads_to_is_not_trusted(source: Path, tmp_path: Path) -> None:
    adopt(source, str(tmp_path / "run/adopted"))
    shutil.copytree(tmp_path / "run/adopted", tmp_path / "elsewhere/adopted")
    with pytest.raises(IncompatibleCheckpointError, match="trusted_folders"):
        compare(tmp_path / "elsewhere/adopted", source)
    with using(trusted_folders=str(source)):
        assert compare(tmp_path / "elsewhere/adopted", source).equal


def test_a_file_is_trusted_alone(source: Path, tmp_path: Path) -> None:
    torch.save(STATE, source / "b.pt")
    adopt(source / "a.pt", str(tmp_path / "run/adopted"))
    path = tmp_path / "run/adopted/metadata.parquet"
    catalog = decode(path.read_bytes())
    files = [replace(file, name=file.name.replace("/a.pt", "/b.pt")) for file in catalog.files]
    path.write_bytes(encode(catalog.with_files(files, catalog.file_sums)))
    with pytest.raises(IncompatibleCheckpointError, match="trusted_folders"):
        compare(tmp_path / "run/adopted", source / "b.pt")


def test_an_adoption_that_was_killed_leaves_no_checkpoint(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("bytecheckpoint.tools.adoption.note_folder", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            adopt(source, str(tmp_path / "adopted"))
    with pytest.raises(CheckpointNotFoundError):
        bytecheckpoint.open(tmp_path / "adopted")
    adopt(source, str(tmp_path / "adopted"))
    assert verify(tmp_path / "adopted").ok
    assert sum(found.files for found in collect_garbage(tmp_path / "adopted", older_than=-5)) == 1
    assert verify(tmp_path / "adopted").ok


def test_tools_leave_the_files_alone(source: Path, tmp_path: Path) -> None:
    before = listing(source)
    adopt(source, str(tmp_path / "run/step_1"))
    with pytest.raises(UsageError, match="adopt them there"):
        copy(tmp_path / "run/step_1", str(tmp_path / "copy"))
    (step,) = plan_cooldown(tmp_path / "run", tmp_path / "cold", older_than=0)
    assert (step.action, step.reason) == ("keep", "it names files of another program")
    assert run(["ls", str(tmp_path / "run")]) == run(["gc", str(tmp_path / "run")]) == 0
    remove(tmp_path / "run/step_1", cold=True)
    assert not (tmp_path / "run/step_1/metadata.parquet").exists() and listing(source) == before


def test_retention_removes_the_step_and_no_file_of_the_other_program(source: Path, tmp_path: Path) -> None:
    before = listing(source)
    adopt(source, str(tmp_path / "run/step_00000001"))
    model = {name: torch.zeros_like(value) for name, value in STATE.items()}
    with CheckpointManager(tmp_path / "run", {"model": model}, every=1, keep=Retention(1, grace=0)) as manager:
        restored = manager.restore_latest()
        assert restored is not None and restored.step == 1 and torch.equal(model["b"], STATE["b"])
        for step in (2, 3):
            manager.maybe_save(step)
            manager.wait()
    assert not (tmp_path / "run/step_00000001/metadata.parquet").exists() and listing(source) == before


def test_headers_alone_are_read_of_a_terabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    for number in range(1, 3):
        name, size = f"model-0000{number}-of-00002.safetensors", 1 << 39
        text = f'{{"t{number}":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'.encode()
        with open(tmp_path / "source" / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + size)
    total, read = 0, RangedFile.read

    def counted(self: RangedFile, offset: int, length: int) -> bytes:
        nonlocal total
        total += length
        return read(self, offset, length)

    monkeypatch.setattr(RangedFile, "read", counted)
    report = adopt(tmp_path / "source", str(tmp_path / "adopted"), hash=False)
    assert report.files == 2 and report.nbytes == 0 and total < 1 << 20
    with bytecheckpoint.open(tmp_path / "adopted") as found:
        assert found["model/t2"][(1 << 39) - 3 :].tolist() == [0, 0, 0]
    assert (tmp_path / "adopted/metadata.parquet").stat().st_size < 10_000


def test_a_folder_of_megatron(tmp_path: Path) -> None:
    """Its reader makes a file of numbers that are no plain values."""
    adopt(MEGATRON, str(tmp_path / "adopted"))
    assert compare(MEGATRON, tmp_path / "adopted").equal and verify(tmp_path / "adopted").ok


def test_a_folder_of_hugging_face(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"a": STATE["a"]}, tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/config.json").write_text('{"model_type": "x"}')
    assert run(["adopt", str(tmp_path / "hf"), str(tmp_path / "adopted"), "--json"]) == 0
    with bytecheckpoint.open(tmp_path / "adopted") as found:
        assert found.info["config"] == {"model_type": "x"} and torch.equal(found["model/a"][...], STATE["a"])
