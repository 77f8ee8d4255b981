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
def faults() -> Faults:
    """Faults of the storages that a test makes by `faults.at`."""
    bytecheckpoint.configure(writer="thread", timeout=20.0)
    return Faults()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a checkpoint."""
    return tmp_path / "s"
