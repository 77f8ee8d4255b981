"""The power fails at any moment of a save, a flush or a cool-down, and unsynced bytes and names are lost or not.

A FUSE keeps a journal of what reaches the file system, in the order in which it does. Every beginning of the journal is
played onto a disk of which only what was synced is certain, and every state that the disk may then be in is loaded.
"""

from __future__ import annotations

import functools
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.representation.catalog_file import decode
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.tiers.cooldown import cool, plan_cooldown
from tests.faults import power_loss
from tests.faults.coded import load_step, states
from tests.faults.power_loss import Disk, Tree, mark
from tests.faults.ranks import save_all, succeeded
from tests.servers.faultfs import FaultFs
from tests.servers.process import folder_of

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


class Recorded:
    """A file system with a journal; after the program, the folder in which the states of the disk are rebuilt."""

    def __init__(self, folder: Path) -> None:
        self._fs = FaultFs(folder, folder_of("mfusepy"))
        self.mount = self._fs.mount
        self._journal = self._fs.record()

    def stop(self) -> None:
        self._fs.stop()

    def after_losses(self) -> Iterator[tuple[str, list[str]]]:
        """Yield every state once for each list of marks: where the journal ended, and the marks.

        States count as equal if they differ only in files that no load reads: neither catalogs nor named by one.
        """
        seen = power_loss.read(self._fs.back)
        self.stop()
        for name in os.listdir(self.mount):
            shutil.rmtree(self.mount / name)
        lines = self._journal.read_text().splitlines()
        disk, done, possible = Disk(), set(), 0
        for number, line in enumerate(lines):
            disk.do(line)
            for tree in disk.after_loss():
                possible += 1
                state = power_loss.digest(seen_by_loads(tree)), len(disk.marks)
                if state in done:
                    continue
                done.add(state)
                power_loss.write(tree, self.mount)
                yield f"after change {number} of {len(lines)}, {line[:120]}, with {sorted(tree)}", disk.marks
                for name in os.listdir(self.mount):
                    shutil.rmtree(self.mount / name)
        assert disk.now() == seen, "the journal tells all that was done"
        assert possible > 1000, "states were tried"


@functools.lru_cache
def named_by(catalog: bytes) -> frozenset[str]:
    """The names of the files of a checkpoint, without their folders."""
    try:
        return frozenset(os.path.basename(file.name) for file in decode(catalog).files)
    except bytecheckpoint.CorruptCheckpointError:
        return frozenset()


def seen_by_loads(tree: Tree) -> Tree:
    """Return the files that a load may read."""
    names = {CATALOG_NAME}.union(*(named_by(data) for path, data in tree.items() if data and is_catalog(path)))
    return {path: data for path, data in tree.items() if os.path.basename(path) in names}


def is_catalog(path: str) -> bool:
    return os.path.basename(path) == CATALOG_NAME


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("NOT TESTED HERE: needs root and FUSE (/dev/fuse)")
    found = Recorded(tmp_path / "recorded")
    yield found
    found.stop()


def found_at(path: Path | str) -> int:
    """Return the step at `path`, 0 for none; fail on anything but a whole step."""
    try:
        return load_step(path, prepare_save=False)
    except bytecheckpoint.CheckpointNotFoundError:
        return 0


def check_steps(recorded: Recorded, path: Path) -> None:
    """Whenever the power failed, the checkpoint is the last committed step or the one that was being saved."""
    found = set()
    for where, marks in recorded.after_losses():
        committed = len(marks)
        step = found_at(path)
        assert committed <= step <= committed + 1, f"step {step} after {marks}: {where}"
        found.add((committed, step))
    assert {(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)} <= found


def saved(path: Path, step: int, **options: Any) -> None:
    got = save_all(ThreadWorld(2), path, step, **options)
    succeeded(got)


def test_during_saves(recorded: Recorded) -> None:
    path = recorded.mount / "new" / "run" / "s"
    for step, writer, options in (
        (1, "thread", {}),
        (2, "process", {"async_checkpoint": True}),
        (3, "thread", {"async_checkpoint": True, "staging": "background"}),
    ):
        bytecheckpoint.configure(writer=writer)
        saved(path, step, **options)
        mark(recorded.mount, f"committed-{step}")
    check_steps(recorded, path)


@pytest.mark.parametrize("unsynced", ["files", "folders"])
def test_a_save_that_syncs_too_little_is_found_out(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, unsynced: str
) -> None:
    """A save without these syncs fails the checks of this file."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) != (unsynced == "folders"):
            real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    for step in (1, 2, 3):
        saved(recorded.mount / "s", step)
        mark(recorded.mount, f"committed-{step}")
    with pytest.raises((AssertionError, bytecheckpoint.CorruptCheckpointError), match="/s"):
        check_steps(recorded, recorded.mount / "s")


def test_during_saves_into_folders_that_the_program_made(recorded: Recorded) -> None:
    path = recorded.mount / "new" / "run" / "s"
    path.mkdir(parents=True)
    for step in (1, 2, 3):
        saved(path, step)
        mark(recorded.mount, f"committed-{step}")
    check_steps(recorded, path)


def test_during_flushes(recorded: Recorded, tmp_path: Path) -> None:
    bytecheckpoint.configure(tier_hot=str(tmp_path / "hot"))
    path = recorded.mount / "run" / "s"
    for step in (1, 2, 3):
        bytecheckpoint.save(f"tier+file://{path}", states(step=step)).result(60)
        mark(recorded.mount, f"committed-{step}")
    check_steps(recorded, path)


def test_during_a_cooldown(recorded: Recorded) -> None:
    """The step is at its path all the time."""
    run, cold = recorded.mount / "run", recorded.mount / "cold"
    for step in (1, 2):
        bytecheckpoint.save(run / str(step), states(step=step))
    mark(recorded.mount, "saved")
    (plan, _) = plan_cooldown(str(run), str(cold), older_than=0)
    assert cool(plan).done
    states_seen = 0
    for where, marks in recorded.after_losses():
        if "saved" in marks:
            assert [found_at(run / str(step)) for step in (1, 2)] == [1, 2], where
            states_seen += 1
    assert states_seen > 10
