"""Verifying: every byte is looked at, and what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bytecheckpoint import CheckpointNotFoundError, CorruptCheckpointError
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools.verify import verify_checkpoint

Copied = Callable[..., Path]


def storage_files(path: Path) -> list[Path]:
    return sorted(path.glob("*/*.safetensors"))


def test_a_sound_checkpoint(saved: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify_checkpoint(resolve(saved), lambda done, total: seen.append((done, total)), threads=3)
    size = sum(file.stat().st_size for file in storage_files(saved))
    assert report.ok and not report.notes
    assert (report.files, report.bytes_read) == (len(storage_files(saved)), size)
    assert seen == sorted(seen) and seen[-1] == (size, size)


def test_a_flipped_bit_anywhere_is_found(copied: Copied) -> None:
    path = copied()
    found = 0
    for file in storage_files(path):
        good = file.read_bytes()
        for position in np.linspace(0, len(good) - 1, 9).astype(int).tolist():
            data = bytearray(good)
            data[position] ^= 4
            file.write_bytes(data)
            (finding,) = verify_checkpoint(resolve(path)).findings
            assert finding.file == str(file.relative_to(path))
            assert finding.kind in ("block", "header")
            assert (finding.kind == "block") == (position >= int.from_bytes(good[:8], "little") + 8)
            found += 1
        file.write_bytes(good)
    assert found > 50
    assert verify_checkpoint(resolve(path)).ok


def test_damage_names_its_tensors(copied: Copied) -> None:
    path = copied()
    file = next(f for f in storage_files(path) if f.parent.name == "model" and f.name.startswith("rank-00001"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    (finding,) = verify_checkpoint(resolve(path)).findings
    assert (finding.kind, finding.block, finding.blocks) == ("block", 0, 1)
    assert set(finding.tensors) <= {"model/w", "model/n"} and finding.tensor_count == len(finding.tensors) > 0
    assert str(file.relative_to(path)) in finding.message


def test_missing_cut_extended_and_swapped_files(copied: Copied) -> None:
    path = copied()
    first, second, third, fourth, fifth, *_ = storage_files(path)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    third.write_bytes(third.read_bytes() + b"x")
    swap = fourth.read_bytes()
    fourth.write_bytes(fifth.read_bytes())
    fifth.write_bytes(swap)
    findings = verify_checkpoint(resolve(path)).findings
    kinds = {str(file.relative_to(path)): set() for file in (first, second, third, fourth, fifth)}
    for finding in findings:
        kinds[finding.file].add(finding.kind)
    names = [str(f.relative_to(path)) for f in (first, second, third, fourth, fifth)]
    assert kinds[names[0]] == {"missing"}
    assert "size" in kinds[names[1]] and kinds[names[2]] == {"size"}
    assert "header" in kinds[names[3]] and "header" in kinds[names[4]]


def test_neighbouring_blocks_are_one_finding(tmp_path: Path) -> None:
    import torch

    import bytecheckpoint

    bytecheckpoint.save(tmp_path / "s", {"model": {"a": torch.ones(1 << 17), "b": torch.zeros(1 << 17)}})
    (file,) = (tmp_path / "s/model").glob("rank-*")
    data = bytearray(file.read_bytes())
    start = int.from_bytes(data[:8], "little") + 8
    for block in (1, 2, 3, 6):  # blocks of 64 KiB
        data[start + block * (64 << 10)] ^= 1
    file.write_bytes(data)
    found = verify_checkpoint(resolve(tmp_path / "s")).findings
    assert [(f.block, f.blocks) for f in found] == [(1, 3), (6, 1)]


def test_strangers_are_noted(copied: Copied) -> None:
    path = copied()
    (path / "README").write_text("hello")
    report = verify_checkpoint(resolve(path))
    assert report.ok
    assert any("README" in note for note in report.notes)


def test_without_a_catalog_there_is_nothing_to_check(copied: Copied) -> None:
    path = copied()
    (path / "metadata.parquet").write_bytes(b"PAR1" + b"x" * 100 + b"PAR1")
    with pytest.raises(CorruptCheckpointError):
        verify_checkpoint(resolve(path))
    (path / "metadata.parquet").unlink()
    with pytest.raises(CheckpointNotFoundError):
        verify_checkpoint(resolve(path))
