"""Places in memory (`mem://`) that a test has to itself, and places that pass for a disk."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.tiers.flush.unflushed import UnflushedSteps
from bytecheckpoint.tiers.storage import TierStorage
from bytecheckpoint.world import world_of
from tests.support.settings import undisturbed

__all__ = [
    "as_of_a_new_job",
    "as_on_disk",
    "durable_folder",
    "folder_in_memory",
    "hot_folder",
    "hot_tier",
    "new_memory",
]


def as_on_disk(path: str | Path) -> Storage:
    """Return the storage of a path which counts as a slow disk: ranks exchange what they read from it."""
    storage = resolve(path)
    storage.capabilities = replace(storage.capabilities, in_memory=False)
    storage.is_cached = lambda name, offsets: False  # type: ignore[method-assign]
    return storage


def folder_in_memory(url: str = "") -> Path:
    """Return the folder of a `mem://` URL; without one, that of all places of this user."""
    return Path(f"/dev/shm/bytecheckpoint-{os.geteuid()}", url.removeprefix("mem://"))


def hot_folder(path: str) -> Path:
    """Return the folder of the hot copy of a step behind a tier."""
    storage = resolve(path)
    assert isinstance(storage, TierStorage)
    return Path(storage.hot.root)


def durable_folder(path: str) -> Path:
    """Return the folder behind a `tier+file://` URL."""
    return Path(path.removeprefix("tier+file://"))


@contextmanager
def new_memory() -> Iterator[str]:
    """Yield the URL of a new place in memory, and remove the place afterwards."""
    url = f"mem://test-{uuid.uuid4().hex}"
    try:
        yield url
    finally:
        shutil.rmtree(folder_in_memory(url), ignore_errors=True)


def as_of_a_new_job(monkeypatch: pytest.MonkeyPatch, *, ahead: float = 0.0) -> None:
    """Make flushes treat the steps in the hot tier as those of jobs that have ended.

    Args:
        monkeypatch: patch that ends with the test.
        ahead: seconds by which the job begins later than now.
    """
    monkeypatch.setattr(world_of(current()).flusher, "_unflushed", UnflushedSteps(time.time() + ahead))


@contextmanager
def hot_tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Use a new hot tier, in child processes too; afterwards restore the settings, and leave nothing in flight."""
    with new_memory() as url, undisturbed():
        monkeypatch.setenv("BYTECHECKPOINT_TIER_HOT", url)
        bytecheckpoint.configure(tier_hot=url)
        as_of_a_new_job(monkeypatch)  # a test with another clock may have been the first of this process
        yield url
        world = world_of(current())
        world.saves.drain()
        world.flusher.drain()
        world.resources.plans.clear()
