"""Fixtures of the tests of tiers: a hot tier, and a durable folder, of each test's own."""

from __future__ import annotations

import dataclasses
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.world import world_of


@pytest.fixture(autouse=True)
def hot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the hot tier, of other processes too; settings as they were and nothing in flight afterwards."""
    before = bytecheckpoint.settings()
    name = f"test-{uuid.uuid4().hex}"
    monkeypatch.setenv("BYTECHECKPOINT_TIER_HOT", f"mem://{name}")
    bytecheckpoint.configure(tier_hot=f"mem://{name}")
    folder = Path(f"/dev/shm/bytecheckpoint-{os.geteuid()}/{name}")
    yield folder
    world = world_of(current())
    world.saves.drain()
    world.flusher.drain()
    world.saves.forget_failure()
    world.resources.plans.clear()
    bytecheckpoint.configure(**dataclasses.asdict(before))
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """The URL of a training run: a folder of steps behind a tier."""
    return f"tier+file://{tmp_path}/durable/run"
