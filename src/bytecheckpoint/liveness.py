"""Progress of saves and loads in this process, so that ranks that wait for this one extend their time limits.

A rank that has waited for another one for its whole timeout asks that one (`Inbox`), and continues to wait for as long as
the other is busy: a slow storage must not look like a hung rank. Every wait in a busy block has a limit of its own, so a
rank that stays busy for ever does not exist.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["busy", "counts_as_progress", "not_counted_as_progress", "note_activity", "seconds_busy", "seconds_idle"]

_limits: dict[int, float] = {}
_numbers = itertools.count()
_active = time.monotonic()
_counts: ContextVar[bool] = ContextVar("bytecheckpoint_counts", default=True)
os.register_at_fork(after_in_child=_limits.clear)  # the threads of the parent


@contextlib.contextmanager
def busy(seconds: float) -> Iterator[None]:
    """Count this process as busy inside a `with` block, which ends within `seconds` of its own accord."""
    if not counts_as_progress():
        yield
        return
    number = next(_numbers)
    _limits[number] = time.monotonic() + seconds
    try:
        yield
    finally:
        del _limits[number]
        note_activity()


def note_activity() -> None:
    """Note that a save or load of this process has made progress just now."""
    global _active  # noqa: PLW0603  one value per process
    if counts_as_progress():
        _active = time.monotonic()


@contextlib.contextmanager
def not_counted_as_progress() -> Iterator[None]:
    """Count no work of this thread as progress inside a `with` block, because no save or load waits for it."""
    token = _counts.set(False)
    try:
        yield
    finally:
        _counts.reset(token)


def counts_as_progress() -> bool:
    """Return whether work of this thread counts: it is in no block of `not_counted_as_progress`, and works for none."""
    return _counts.get()


def seconds_busy() -> float:
    """Return for how much longer this process may be busy, -inf if it is not."""
    return max(list(_limits.values()), default=-math.inf) - time.monotonic()


def seconds_idle() -> float:
    """Return the seconds since this process was last active."""
    return time.monotonic() - _active
