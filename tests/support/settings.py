"""Settings of the package for the time of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.settings import flat_settings
from bytecheckpoint.world import world_of


@contextlib.contextmanager
def using(**changes: Any) -> Iterator[None]:
    """Change settings inside the block, and restore them after it, also if the block configures others."""
    before = bytecheckpoint.settings()
    bytecheckpoint.configure(**changes)
    try:
        yield
    finally:
        if bytecheckpoint.settings() != before:
            bytecheckpoint.configure(**flat_settings(before))


@pytest.fixture(autouse=True)
def writer_threads() -> Iterator[None]:
    """Write by threads of this process in all tests of a folder whose conftest imports this: no helper has to start."""
    with using(writer="thread"):
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the settings after the block, and forget a failed save, whose error the next save would raise."""
    with using():
        yield
    forget_failure()


def forget_failure() -> None:
    """Wait for the saves of this process, and forget a failed one, whose error the next save would raise."""
    world = world_of(current())
    world.drain()
    with contextlib.suppress(bytecheckpoint.CheckpointError):
        world.saves.raise_failure()
