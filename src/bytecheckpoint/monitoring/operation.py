"""One save or load of one rank, as its threads and storages know it: what had to be tried again, and how long that took.

The running operation is a context variable, so that two of them, such as an asynchronous save and a load, do not mix. A new
thread does not have it: whatever hands work to another thread wraps the function by `carried`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

__all__ = ["Operation", "carried", "count_retries", "pause", "retries_so_far"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_log = logging.getLogger("bytecheckpoint")


class Operation:
    """One save or load on one rank. Several threads may use it.

    Args:
        kind: "save" or "load".
        path: of the checkpoint, for messages.

    Attributes:
        retries: attempts after the first one, of all requests together.
        retry_seconds: seconds waited before them, summed over threads.
    """

    def __init__(self, kind: str, path: str) -> None:
        self.kind = kind
        self.path = path
        self.retries = 0
        self.retry_seconds = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[Operation]:
        """Let this thread, and those that get work from it, belong to the operation inside the `with` block."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def count(self, retries: int, seconds: float) -> None:
        """Count retries, and the seconds waited before them."""
        with self._lock:
            self.retries += retries
            self.retry_seconds += seconds

    def take_counts(self) -> tuple[int, float]:
        """Return the retries and seconds counted since the last call, and count from zero."""
        with self._lock:
            counts = self.retries, self.retry_seconds
            self.retries, self.retry_seconds = 0, 0.0
        return counts

    def end(self) -> None:
        """Log what had to be tried again."""
        if self.retries:
            _log.info(
                "the %s %s %s repeated %d requests, and waited %.1f s before them",
                self.kind, "to" if self.kind == "save" else "from", self.path, self.retries, self.retry_seconds,
            )  # fmt: skip


_current: ContextVar[Operation | None] = ContextVar("bytecheckpoint_operation", default=None)


def carried(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `function` for another thread, where it then belongs to the operation of this one."""
    operation = _current.get()
    if operation is None:
        return function

    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        token = _current.set(operation)
        try:
            return function(*args, **kwargs)
        finally:
            _current.reset(token)

    return run


def retries_so_far() -> dict[str, Any]:
    """Return the counts of this thread's operation, by the names of its attributes: fields of a report."""
    operation = _current.get()
    return {} if operation is None else {"retries": operation.retries, "retry_seconds": operation.retry_seconds}


def count_retries(retries: int = 1, seconds: float = 0.0) -> None:
    """Count further attempts at something, and the seconds waited before them, in the operation of this thread."""
    operation = _current.get()
    if operation is not None:
        operation.count(retries, seconds)


def pause(seconds: float) -> None:
    """Sleep before another attempt at something, and count it."""
    begun = time.monotonic()
    time.sleep(seconds)
    count_retries(1, time.monotonic() - begun)
