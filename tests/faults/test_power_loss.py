"""Losses of power at any moment of a save, a flush or a cooldown.

A FUSE file system keeps a journal of all changes in their order. The tests apply the journal line by line to a model of
a disk, and after each line they load the checkpoint from every state in which a loss of power may leave the disk.
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
from bytecheckpoint.storage.posix import mounts
from bytecheckpoint.tiers.cooldown import cool, plan_cooldown
from tests.faults import power_loss
from tests.faults.power_loss import Disk, Tree, mark
from tests.servers.faultfs import FaultFs
from tests.servers.process import folder_of
from tests.support.coded import found_step, save_steps, states
from tests.support.ranks import save_all, succeeded

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


class Recorded:
    """A mounted file system with a journal. Its mount point later holds the states of the disk, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._fs = FaultFs(folder, folder_of("mfusepy"))
        self.mount = self._fs.mount
        self._journal = self._fs.record()

    def stop(self) -> None:
        """Unmount the file system, and forget that the folder was a mount of it: it holds local files from now on."""
        self._fs.stop()
        mounts._used.clear()
        mounts._recent_mounts.cache_clear()

    def _clear(self) -> None:
        for name in os.listdir(self.mount):
            shutil.rmtree(self.mount / name)

    def after_losses(self) -> Iterator[tuple[str, list[str]]]:
        """Put every possible state of the disk below the mount point; yield the place in the journal and the marks.

        Of states that differ only in files that no load reads, neither catalogs nor named by one, only the first is
        tried for each list of marks.
        """
        seen = power_loss.read(self._fs.back)
        self.stop()
        self._clear()
        lines = self._journal.read_text().splitlines()
        disk, done, possible = Disk(), set(), 0
        for number, line in enumerate(lines):
            disk.apply(line)
            for tree in disk.after_loss():
                possible += 1
                state = power_loss.digest(read_by_loads(tree)), len(disk.marks)
                if state in done:
                    continue
                done.add(state)
                power_loss.write(tree, self.mount)
                yield f"after change {number} of {len(lines)}, {line[:120]}, with {sorted(tree)}", disk.marks
                self._clear()
        assert disk.now() == seen, "the journal holds all changes"
        assert possible > 1000, "many states were tried"


@functools.lru_cache
def named_by(catalog: bytes) -> frozenset[str]:
    """The names of the files of a checkpoint, without their folders."""
    try:
        return frozenset(os.path.basename(file.name) for file in decode(catalog).files)
    except bytecheckpoint.CorruptCheckpointError:
        return frozenset()


def read_by_loads(tree: Tree) -> Tree:
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


def check_steps(recorded: Recorded, path: Path) -> None:
    """Fail unless each state of the disk holds the last committed step or the one that was being saved."""
    found = set()
    for where, marks in recorded.after_losses():
        committed = len(marks)
        step = found_step(path)
        assert committed <= step <= committed + 1, f"step {step} after {marks}: {where}"
        found.add((committed, step))
    assert {(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)} <= found


def save_and_mark(recorded: Recorded, path: Path, step: int, **options: Any) -> None:
    """Save a step from two ranks, and mark the commit in the journal."""
    succeeded(save_all(ThreadWorld(2), path, step, **options))
    mark(recorded.mount, f"committed-{step}")


def test_during_saves(recorded: Recorded) -> None:
    path = recorded.mount / "new" / "run" / "s"
    for step, writer, options in (
        (1, "thread", {}),
        (2, "process", {"async_checkpoint": True}),
        (3, "thread", {"async_checkpoint": True, "staging": "background"}),
    ):
        bytecheckpoint.configure(writer=writer)
        save_and_mark(recorded, path, step, **options)
    check_steps(recorded, path)


@pytest.mark.parametrize("unsynced", ["files", "folders"])
def test_a_save_that_syncs_too_little_is_found_out(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, unsynced: str
) -> None:
    """`check_steps` fails for a save that does not sync its files or its folders."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) != (unsynced == "folders"):
            real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    for step in (1, 2, 3):
        save_and_mark(recorded, recorded.mount / "s", step)
    with pytest.raises((AssertionError, bytecheckpoint.CorruptCheckpointError), match="/s"):
        check_steps(recorded, recorded.mount / "s")


def test_during_saves_into_folders_that_the_program_made(recorded: Recorded) -> None:
    path = recorded.mount / "new" / "run" / "s"
    path.mkdir(parents=True)
    for step in (1, 2, 3):
        save_and_mark(recorded, path, step)
    check_steps(recorded, path)


def test_during_flushes(recorded: Recorded, tmp_path: Path) -> None:
    bytecheckpoint.configure(tier_hot=str(tmp_path / "hot"))
    path = recorded.mount / "run" / "s"
    for step in (1, 2, 3):
        bytecheckpoint.save(f"tier+file://{path}", states(step=step)).result(60)
        mark(recorded.mount, f"committed-{step}")
    check_steps(recorded, path)


def test_during_a_cooldown(recorded: Recorded) -> None:
    """The step can be loaded from its path at any time."""
    run, cold = recorded.mount / "run", recorded.mount / "cold"
    save_steps(run, 1, 2)
    mark(recorded.mount, "saved")
    (plan, _) = plan_cooldown(str(run), str(cold), older_than=0)
    assert cool(plan).done
    tried = 0
    for where, marks in recorded.after_losses():
        if "saved" in marks:
            assert [found_step(run / str(step)) for step in (1, 2)] == [1, 2], where
            tried += 1
    assert tried > 10
