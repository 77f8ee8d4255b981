"""Fixtures of the storage tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.saving.saver import saver_of


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """Every test begins with the defaults, and with no failure of an earlier one waiting to be raised."""
    before = bytecheckpoint.settings()
    yield
    bytecheckpoint.configure(**dataclasses.asdict(before))
    saver = saver_of(current())
    saver.drain()
    saver._failed = None
