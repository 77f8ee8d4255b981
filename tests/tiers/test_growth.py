"""The memory that a long job takes: as much after many saves as after a few."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld, current
from bytecheckpoint.world import world_of
from tests.support.coded import load_step, states
from tests.support.variants import quick


def folders_and_files(root: Path) -> tuple[int, int, int]:
    """Return the numbers of folders and files below a folder, and the bytes in the files."""
    found = [(folder, name) for folder, _, names in os.walk(root) for name in names]
    return sum(1 for _ in os.walk(root)), len(found), sum(os.stat(os.path.join(*file)).st_size for file in found)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("saves", quick([40, 200], every=2))
def test_many_saves(saves: int, run: str, hot: Path) -> None:
    """In turn to a path of its own and over one and the same path."""
    seen = {}
    for step in range(1, saves + 1):
        path = f"{run}/{step}" if step % 2 else f"{run}/latest"
        bytecheckpoint.save(path, states(step=step), async_checkpoint=bool(step % 3)).result(60)
        if step in (20, saves):  # the first saves start threads and clients
            world_of(current()).flusher.drain()
            seen[step] = (*folders_and_files(hot), threading.active_count(), descriptors())
    early, late = seen[20], seen[saves]
    assert late[:2] == early[:2], "folders and files in memory"
    assert abs(late[2] - early[2]) < 10_000, "bytes in memory: the digits of step numbers, and no more"
    assert late[3] <= early[3] + 2 and late[4] <= early[4] + 4, "threads and descriptors"
    assert load_step(f"{run}/latest") == saves and load_step(f"{run}/{saves - 1}") == saves - 1
    assert len(os.listdir(run.removeprefix("tier+file://"))) == saves // 2 + 1


def test_a_path_is_saved_again_while_older_steps_are_evicted(run: str) -> None:
    """Eviction in the background removes no file that a save is writing, on any rank."""

    def save(collective: Collective) -> None:
        for step in range(1, 31):
            path = f"{run}/{'abc'[step % 3]}"
            handle = bytecheckpoint.save(path, states(collective.rank, 3, step), async_checkpoint=bool(step % 2))
            if step % 5 == 0:
                handle.result(60)
        handle.result(60)

    bytecheckpoint.configure(tier_keep=0)
    ThreadWorld(3).run(save, timeout=110)
    for step in (28, 29, 30):
        assert load_step(f"{run}/{'abc'[step % 3]}") == step
