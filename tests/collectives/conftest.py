"""Fixtures of the tests of collectives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collectives.data_world import DataWorld


@pytest.fixture
def world() -> Iterator[DataWorld]:
    """Three ranks in this process that exchange data."""
    made = DataWorld(3)
    yield made
    made.close()
