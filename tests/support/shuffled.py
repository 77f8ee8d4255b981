"""Tests in an order of chance, files and the tests in each: what one leaves in the process that another needs shows so."""

from __future__ import annotations

import os
import random

import pytest

__all__ = ["pytest_collection_modifyitems"]


@pytest.hookimpl(trylast=True)  # after conftest.py has put long files first
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the tests."""
    chance = random.Random(os.environ["SHUFFLE_SEED"])
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.split("::", 1)[0], []).append(item)
    names = chance.sample(list(files), len(files))
    items[:] = [item for name in names for item in chance.sample(files[name], len(files[name]))]
