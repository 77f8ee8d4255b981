"""Verifying: it reads every byte and names what is wrong. test_corruption.py of tests/faults flips bits everywhere."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.collectives import current
from bytecheckpoint.storage import resolve
from bytecheckpoint.tiers.cooldown import cool, plan_cooldown
from bytecheckpoint.tools import verify
from bytecheckpoint.tools.removal import collect_hot_garbage
from bytecheckpoint.world import world_of
from tests.support.coded import save_steps, states
from tests.support.damage import flip_bit
from tests.support.memory import hot_tier


def storage_files(path: Path) -> list[Path]:
    return sorted(path.glob("*/*.safetensors"))


def test_a_sound_checkpoint(saved: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(resolve(saved), lambda done, total: seen.append((done, total)), threads=3)
    size = sum(file.stat().st_size for file in storage_files(saved))
    assert report.ok and not report.notes
    assert (report.files, report.bytes_read) == (len(storage_files(saved)), size)
    assert seen == sorted(seen) and seen[-1] == (size, size)


def test_damage_names_its_tensors(copied: Path) -> None:
    file = next(f for f in storage_files(copied) if f.parent.name == "model" and f.name.startswith("rank-00001"))
    flip_bit(file, -3)
    (finding,) = verify(resolve(copied)).findings
    assert (finding.kind, finding.block, finding.blocks) == ("block", 0, 1)
    assert set(finding.tensors) <= {"model/w", "model/n"} and finding.tensor_count == len(finding.tensors) > 0
    assert str(file.relative_to(copied)) in finding.message


def test_missing_cut_extended_and_swapped_files(copied: Path) -> None:
    first, second, third, fourth, fifth, *_ = storage_files(copied)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    third.write_bytes(third.read_bytes() + b"x")
    swap = fourth.read_bytes()
    fourth.write_bytes(fifth.read_bytes())
    fifth.write_bytes(swap)
    findings = verify(resolve(copied)).findings
    kinds: dict[Path, set[str]] = {file: set() for file in (first, second, third, fourth, fifth)}
    for finding in findings:
        kinds[copied / finding.file].add(finding.kind)
    assert kinds[first] == {"missing"} and "size" in kinds[second] and kinds[third] == {"size"}
    assert "header" in kinds[fourth] and "header" in kinds[fifth]


def test_neighbouring_blocks_are_one_finding(tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "s", {"model": {"a": torch.ones(1 << 17), "b": torch.zeros(1 << 17)}})
    (file,) = (tmp_path / "s/model").glob("rank-*")
    start = int.from_bytes(file.read_bytes()[:8], "little") + 8
    for block in (1, 2, 3, 6):  # blocks of 64 KiB
        flip_bit(file, start + block * (64 << 10))
    found = verify(resolve(tmp_path / "s")).findings
    assert [(f.block, f.blocks) for f in found] == [(1, 3), (6, 1)]


def test_strangers_are_noted(copied: Path) -> None:
    (copied / "README").write_text("hello")
    report = verify(resolve(copied))
    assert report.ok
    assert any("README" in note for note in report.notes)


@pytest.mark.parametrize("change", ["saved again", "moved", "evicted"])
def test_a_checkpoint_that_changes_while_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """What is missing then is no damage."""
    path = f"{tmp_path}/run/1"
    changes = {
        "saved again": lambda: bytecheckpoint.save(path, states(step=2)),
        "moved": lambda: cool(plan_cooldown(f"{tmp_path}/run", f"{tmp_path}/cold", older_than=0)[0]),
        "evicted": lambda: collect_hot_garbage(older_than=0),
    }
    with hot_tier(monkeypatch):
        bytecheckpoint.configure(tier_keep=2)
        url = f"tier+file://{path}" if change == "evicted" else path
        save_steps(url.rpartition("/")[0], 1, 2)
        world_of(current()).flusher.drain()
        changed = []

        def work(*_: int) -> None:
            if not changed:
                changed.append(changes[change]())

        report = verify(resolve(url), work, threads=1)
    assert changed and report.ok, report.findings


def test_a_checkpoint_that_is_saved_all_the_time(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    steps = itertools.count(2)

    def work(*_: int) -> None:
        bytecheckpoint.save(tmp_path / "1", states(step=next(steps)))

    with pytest.raises(IncompatibleCheckpointError, match=r"replaced 3 times while it was being verified"):
        verify(resolve(tmp_path / "1"), work, threads=1)


def test_without_a_catalog_there_is_nothing_to_check(copied: Path) -> None:
    (copied / "metadata.parquet").write_bytes(b"PAR1" + b"x" * 100 + b"PAR1")
    with pytest.raises(CorruptCheckpointError):
        verify(resolve(copied))
    (copied / "metadata.parquet").unlink()
    with pytest.raises(CheckpointNotFoundError):
        verify(resolve(copied))
