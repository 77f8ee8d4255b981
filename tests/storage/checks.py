"""Checks for tests of storages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import bytecheckpoint
from bytecheckpoint import StorageUnavailableError
from bytecheckpoint.cli.main import run
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.testing import read_all, write_file
from tests.support.coded import ROWS, load_step, states
from tests.support.modes import MODES
from tests.support.ranks import succeeded
from tests.support.saves import check_folder, load, save
from tests.support.settings import using

__all__ = ["check_file", "check_outage", "check_save", "within"]


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


def check_outage(path: str, mode: str, restart: Callable[[], object]) -> None:
    """Save over step 1 while the server goes away; fail unless both ranks say so, and nothing is lost after a restart."""
    with using(storage_timeout=3.0), within(60):
        got = save(path, 2, world=2, **MODES[mode])
    for raised in got:
        assert type(raised) is StorageUnavailableError, got
        assert "/".join(path.split("/")[:3]) in str(raised) and "attempt" in str(raised)
    restart()
    assert load(path, 3) == {1}
    assert run(["verify", path]) == 0
    succeeded(save(path, 3, world=2))
    assert load(path, 1) == {3}
    check_folder(path)
