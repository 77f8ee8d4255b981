"""Clocks that differ by hours: no machine removes the files of another one because of its own clock."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import time
from pathlib import Path

import pytest

from bytecheckpoint.collectives import ThreadWorld
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.posix.publish import publish
from bytecheckpoint.tools import verify
from bytecheckpoint.tools.removal import collect_garbage
from tests.support.coded import load_step
from tests.support.memory import hot_tier
from tests.support.modes import MODES
from tests.support.ranks import load_all, save_all, succeeded

HOURS = 5 * 3600
ROWS = 2000


@pytest.fixture
def wrong_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look at the clock be hours early or late, as if each had been on another machine."""
    real, draw = time.time, random.Random(1)
    monkeypatch.setattr(time, "time", lambda: real() + draw.choice([-HOURS, 0, HOURS]))


@pytest.mark.usefixtures("wrong_clock")
@pytest.mark.parametrize(("mode", "tiered"), [("sync", False), ("async", True), ("background", False)])
def test_saves_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, tiered: bool) -> None:
    world = ThreadWorld(3)
    folder = tmp_path / "run" / "s"
    path = f"tier+file://{folder}" if tiered else str(folder)
    with hot_tier(monkeypatch):
        for step in (1, 2, 3):
            succeeded(save_all(world, path, step, rows=ROWS, **MODES[mode]))
            collect_garbage(str(folder.parent), older_than=HOURS / 2)
            assert load_all(world, path, rows=ROWS) == [step] * 3
    assert load_step(folder, rows=ROWS) == 3  # all is flushed
    assert not verify(resolve(str(folder))).findings


def test_a_publisher_at_work_is_not_taken_for_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The age by the file system's clock decides where files cannot be locked."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    at_work, killed = tmp_path / f".publishing-{1:016x}", tmp_path / f".publishing-{2:016x}"
    for path in (at_work, killed):
        path.write_bytes(b"")
    long_ago = time.time() - HOURS
    os.utime(killed, (long_ago, long_ago))
    monkeypatch.setattr(fcntl, "flock", refuse)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + HOURS)
    publish(str(tmp_path / "metadata.parquet"), "label", b"data", "")
    assert at_work.exists() and not killed.exists()
