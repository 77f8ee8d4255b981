"""The lock on the flush of a step, and the durable version that the flush may replace."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from bytecheckpoint.errors import StorageConflictError
from bytecheckpoint.tiers.hot_folder import UNKNOWN, StepRecord
from bytecheckpoint.tiers.names import LOCK
from bytecheckpoint.tiers.storage import TierStorage

__all__ = ["expected_version", "flush_lock"]


@contextlib.contextmanager
def flush_lock(storage: TierStorage, *, exclusive: bool, timeout: float) -> Iterator[None]:
    """Hold this machine's lock on the flush of a step.

    Args:
        storage: the step.
        exclusive: True for a lock that nobody shares, as the command line takes it; the ranks of a job share theirs.
        timeout: seconds to wait for it.

    Raises:
        StorageConflictError: another process keeps the lock.
    """
    fd = storage.hot.open_lock(LOCK)
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
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
        storage.hot_folder.remove_if_empty()  # the lock may be the only file of a machine that has none of the step


def expected_version(record: StepRecord) -> str:
    """Return the version of the durable catalog that a flush of the step may replace, "" for none."""
    # When the durable storage did not answer at the save, the flush may create a catalog but replace none.
    return "" if record.replaces == UNKNOWN else record.replaces
