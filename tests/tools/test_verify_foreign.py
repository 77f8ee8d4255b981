"""Checkpoints of other programs are verified by the sums of their own formats."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex

import bytecheckpoint
from bytecheckpoint.cli.main import run
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.tools import VerifyReport, verify
from tests.support.damage import flip_bit

STATE = {"a": torch.arange(3000.0), "b": torch.ones(50, 7).t()}


def at(path: Path, name: str) -> int:
    """A byte of a tensor's elements."""
    return path.read_bytes().index(STATE[name].numpy().tobytes("A")) + 12


def notes_of(report: VerifyReport, name: str) -> list[str]:
    return [note for note in report.notes if note.startswith(f"{name}: ")]


def test_torch_save(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    report = verify(tmp_path / "a.pt")
    assert report.ok and report.bytes_read == 12000 + 1400 and report.tensors == 2
    assert notes_of(report, "a.pt") == ["a.pt: the CRC32 of 2 of its parts was checked"]
    flip_bit(tmp_path / "a.pt", at(tmp_path / "a.pt", "b"))
    (found,) = verify(tmp_path).findings
    assert (found.kind, found.file, found.tensors) == ("sum", "a.pt", ("model/b",))
    flip_bit(tmp_path / "a.pt", (tmp_path / "a.pt").read_bytes().index(b"_rebuild"))
    assert run(["verify", str(tmp_path)]) == 1


def test_dcp_in_small_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({"model": STATE, "step": 3}, checkpoint_id=tmp_path)
    monkeypatch.setattr("bytecheckpoint.tools.verify_foreign._TASK_BYTES", 1000)
    monkeypatch.setattr("bytecheckpoint.tools.verify_foreign._CHUNK", 1 << 12)
    report = verify(tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    assert report.ok and report.bytes_read == file.stat().st_size
    assert notes_of(report, file.name) == [f"{file.name}: the CRC32 of 3 of its parts was checked"]
    flip_bit(file, at(file, "a"))
    assert [(f.kind, f.tensors) for f in verify(tmp_path).findings] == [("sum", ("model/a",))]


def test_parts_that_overlap(tmp_path: Path) -> None:
    """Sound sums do not make a tensor whole; a load refuses it, too."""
    dcp.save({"one": torch.zeros(4), "two": torch.ones(4)}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    described = metadata.state_dict_metadata.pop("one")
    metadata.state_dict_metadata["two"].size = torch.Size([8])
    metadata.state_dict_metadata["two"].chunks += described.chunks
    metadata.state_dict_metadata["two"].chunks[0] = replace(described.chunks[0], offsets=torch.Size([2]))
    places = [metadata.storage_data.pop(MetadataIndex(name, [0])) for name in ("one", "two")]
    for offset, place in zip((0, 2), places, strict=True):
        metadata.storage_data[MetadataIndex("two", [offset])] = place
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert [(found.kind, found.tensors) for found in verify(tmp_path).findings] == [("overlap", ("model/two",))]
    with pytest.raises(CheckpointError, match="overlap"):
        bytecheckpoint.load(tmp_path, {"model": {"two": torch.zeros(8)}})


def test_integrity_of_megatron(tmp_path: Path) -> None:
    dcp.save({"model": STATE}, checkpoint_id=tmp_path)
    (tmp_path / "metadata.json").write_text("{}")
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    (tmp_path / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": sums}))
    report = verify(tmp_path)
    assert report.ok and notes_of(report, "metadata.json") == [
        "metadata.json: its sha256 in integrity.json was checked"
    ]
    (file,) = tmp_path.glob("*.distcp")
    flip_bit(file, at(file, "a"))
    (tmp_path / "metadata.json").write_text("{} ")
    whole, part, other = verify(tmp_path).findings
    assert "differs from its sha256 in integrity.json" in whole.message
    assert (part.file, part.tensors) == (file.name, ("model/a",)) and (other.file, other.tensors) == (
        "metadata.json", (),
    )  # fmt: skip
    (tmp_path / "metadata.json").unlink()
    assert "missing" in [found.kind for found in verify(tmp_path).findings]


def test_blobs_of_hugging_face(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in STATE.items()}, blobs / "new")
    blob = (blobs / "new").rename(blobs / hashlib.sha256((blobs / "new").read_bytes()).hexdigest())
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")
    report = verify(snapshot)
    assert report.ok and report.bytes_read == blob.stat().st_size
    assert notes_of(report, "model.safetensors") == [
        "model.safetensors: its sha256 in the cache of Hugging Face was checked"
    ]
    flip_bit(blob, blob.stat().st_size - 5)
    (found,) = verify(snapshot / "model.safetensors").findings
    assert found.kind == "sum" and found.tensor_count == 2


def test_records_of_downloads(tmp_path: Path) -> None:
    file, record = tmp_path / "model.safetensors", tmp_path / ".cache/huggingface/download/model.safetensors.metadata"
    record.parent.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in STATE.items()}, file)
    written = file.stat().st_mtime
    record.write_text(f"{'a' * 40}\n{hashlib.sha256(file.read_bytes()).hexdigest()}\n{written + 2}\n")
    note = "model.safetensors: its sha256 in the record of its download was checked"
    assert verify(tmp_path).ok and notes_of(verify(tmp_path), "model.safetensors") == [note]
    flip_bit(file, file.stat().st_size - 5)
    os.utime(file, (written, written))
    (found,) = verify(tmp_path).findings
    assert found.kind == "sum" and found.file == "model.safetensors"
    os.utime(file, (written + 60, written + 60))  # trained on since
    assert verify(tmp_path).ok and verify(tmp_path).bytes_read == 0
    record.write_text("torn")
    assert verify(tmp_path).ok


def test_files_without_sums_are_named(tmp_path: Path) -> None:
    save_file({"a": STATE["a"]}, tmp_path / "model.safetensors")
    report = verify(tmp_path)
    assert report.ok and report.bytes_read == 0
    assert notes_of(report, "model.safetensors") == ["model.safetensors: no checksums; only its size was checked"]
