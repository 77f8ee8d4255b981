"""What the flush of a job and that of the command line have in common: who may flush, and what it may replace."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from ..errors import StorageConflictError
from ..storage.tier import LOCK, UNKNOWN, Record, TierStorage

__all__ = ["expected_version", "held"]


@contextlib.contextmanager
def held(storage: TierStorage, *, alone: bool, patience: float) -> Iterator[None]:
    """Keep a job's flush and that of the command line apart on this machine: the ranks of a job hold it together."""
    fd = storage.hot.open_lock(LOCK)
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StorageConflictError(
                        f"{storage.url} is being flushed by another process of this machine; let that one finish"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)
        storage.tidy_up()  # a machine that has no files of the step takes part in its flush


def expected_version(record: Record) -> str:
    """The version of the durable catalog that the step may replace."""
    # Nobody could look when the save began: then it may create, but not replace.
    return "" if record.replaces == UNKNOWN else record.replaces
