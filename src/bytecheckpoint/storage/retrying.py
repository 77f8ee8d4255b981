"""Trying an operation again after transient errors, until a deadline, with growing random pauses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from ..errors import StorageUnavailableError

__all__ = ["Attempts", "retry"]

_T = TypeVar("_T")
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 3.0


class Attempts:
    """How often an operation was tried and how long it may still be tried.

    Args:
        seconds: from now until nothing is tried again.

    Attributes:
        count: tries so far, those that a client library made by itself included.
    """

    def __init__(self, seconds: float) -> None:
        self.count = 0
        self._begun = time.monotonic()
        self._seconds = seconds
        self._pause = _FIRST_PAUSE

    @property
    def left(self) -> float:
        """Seconds until the deadline, 0.0 when it is over."""
        return max(self._begun + self._seconds - time.monotonic(), 0.0)

    def pause(self) -> bool:
        """Wait before the next try; False, at once, when the deadline comes first."""
        seconds = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        if seconds >= self.left:
            return False
        time.sleep(seconds)
        return True

    def __str__(self) -> str:
        return f"{self.count} attempt{'s' if self.count != 1 else ''} in {time.monotonic() - self._begun:.1f} s"


def retry(call: Callable[[], _T], seconds: float) -> _T:
    """What `call` returns, tried again while it raises `StorageUnavailableError` and `seconds` are not over.

    Raises:
        StorageUnavailableError: the last one, with the number of attempts added.
    """
    attempts = Attempts(seconds)
    while True:
        attempts.count += 1
        try:
            return call()
        except StorageUnavailableError as error:
            if not attempts.pause():
                raise StorageUnavailableError(f"{error} ({attempts})", undecided=error.undecided) from error
