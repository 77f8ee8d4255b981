"""Fixtures of the tests of tiers: a hot tier, and a durable folder, of each test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faulty_storage import Faults
from tests.support.memory import folder_in_memory, hot_tier


@pytest.fixture(autouse=True)
def hot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the hot tier; settings are as they were and nothing is in flight afterwards."""
    with hot_tier(monkeypatch) as url:
        yield folder_in_memory(url)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """The URL of a training run: a folder of steps behind a tier."""
    return f"tier+file://{tmp_path}/durable/run"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Faults of the durable folders, which are on the local disk."""
    return Faults().install_in_folders(monkeypatch)
