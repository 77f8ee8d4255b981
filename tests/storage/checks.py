"""Checks that many tests of storages make."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import bytecheckpoint
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.testing import read_all, write_file
from tests.faults.coded import ROWS, load_step, states

__all__ = ["check_file", "check_save", "within"]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


def check_file(storage: Storage, name: str, data: np.ndarray[Any, Any], **options: Any) -> None:
    """Write a file, and fail unless it is read as it was written."""
    write_file(storage, name, data, **options)
    assert np.array_equal(read_all(storage, name), data)


def check_save(path: str | Path | Storage, *steps: int, rows: int = ROWS, **options: Any) -> None:
    """Save every step to one path, and fail unless each can be loaded before the next replaces it."""
    for step in steps:
        bytecheckpoint.save(path, states(step=step, rows=rows), **options).result(60)
        assert load_step(path, rows=rows) == step
