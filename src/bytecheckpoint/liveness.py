"""Whether this process is alive as the other ranks see it: at work within limits of its own, or active a moment ago.

A rank that has waited for another one for its whole timeout asks that one (`Inbox`), and goes on waiting for as long as the
other is busy: a slow storage must not look like a hung rank. Every wait in a busy block has a limit of its own, so a rank
that stays busy for ever does not exist.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["busy", "is_unnoticed", "note_activity", "seconds_busy", "seconds_idle", "unnoticed"]

_limits: dict[int, float] = {}
_numbers = itertools.count()
_active = time.monotonic()
_unnoticed: ContextVar[bool] = ContextVar("bytecheckpoint_unnoticed", default=False)
os.register_at_fork(after_in_child=_limits.clear)  # the threads of the parent


@contextlib.contextmanager
def busy(seconds: float) -> Iterator[None]:
    """Count this process as busy inside a `with` block, which ends within `seconds` of its own accord."""
    if is_unnoticed():
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
    """Note that something of a save or load went forward in this process just now."""
    global _active  # noqa: PLW0603  one value per process
    if not is_unnoticed():
        _active = time.monotonic()


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Let nothing that this thread does inside a `with` block count: no save or load waits for it."""
    token = _unnoticed.set(True)
    try:
        yield
    finally:
        _unnoticed.reset(token)


def is_unnoticed() -> bool:
    """Return whether this thread is in a block of `unnoticed`, or works for one that is."""
    return _unnoticed.get()


def seconds_busy() -> float:
    """Return for how much longer this process may be busy, -inf if it is not."""
    return max(list(_limits.values()), default=-math.inf) - time.monotonic()


def seconds_idle() -> float:
    """Return the seconds since this process was last active."""
    return time.monotonic() - _active
