"""Fixtures of the fault tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.saving.saver import saver_of
from tests.support.faulty_storage import Faults


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """Every test begins with the defaults, and with no failure of an earlier one waiting to be raised."""
    before = bytecheckpoint.settings()
    yield
    bytecheckpoint.configure(**dataclasses.asdict(before))
    saver = saver_of(current())
    saver.drain()
    saver._failed = None


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """A storage that fails on demand, for all saves and loads of the test."""
    bytecheckpoint.configure(writer="thread", timeout=20.0)
    return Faults().install(monkeypatch)
