"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import bytecheckpoint
from tests.support.faulty_storage import Faults
from tests.support.settings import undisturbed


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """Every test begins with the defaults, and with no failure of an earlier one waiting to be raised."""
    with undisturbed():
        yield


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """A storage that fails on demand, for all saves and loads of the test."""
    bytecheckpoint.configure(writer="thread", timeout=20.0)
    return Faults().install(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test saves a checkpoint."""
    return tmp_path / "s"
