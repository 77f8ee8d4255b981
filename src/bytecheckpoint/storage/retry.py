"""Retries after transient errors, until a deadline, with growing random pauses."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from bytecheckpoint.errors import StorageUnavailableError
from bytecheckpoint.tracing.operation import pause

__all__ = ["Attempts", "retry"]

_T = TypeVar("_T")
_log = logging.getLogger("bytecheckpoint")
#: After so many failed attempts a warning says that an operation is retried.
_WARN_AFTER = 3
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 3.0


class Attempts:
    """The attempts at one operation and the time until its deadline.

    Args:
        seconds: time from now to the deadline.

    Attributes:
        count: attempts so far.
        exhausted: `pause` has refused another attempt.
    """

    def __init__(self, seconds: float) -> None:
        self.count = 0
        self.exhausted = False
        self._begun = time.monotonic()
        self._deadline = self._begun + seconds
        self._pause = _FIRST_PAUSE

    def pause(self) -> bool:
        """Wait before the next attempt, the last one at the deadline, and count it. Returns False after the deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            self.exhausted = True
            return False
        pause(min(left, self._pause * random.uniform(0.5, 1.0)))
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        return True

    def __str__(self) -> str:
        return f"{self.count} attempt{'s' if self.count != 1 else ''} in {time.monotonic() - self._begun:.1f} s"


def retry(
    call: Callable[[], _T], seconds: float, may_pass: Callable[[StorageUnavailableError], bool] = lambda _: True
) -> _T:
    """Return `call()`, and call it again while it raises `StorageUnavailableError` and `seconds` are not over.

    Args:
        call: one attempt.
        seconds: time from now to the deadline.
        may_pass: tells whether another attempt may succeed after an error.

    Raises:
        StorageUnavailableError: the last error, with the number of attempts in its message if there may be another.
    """
    attempts = Attempts(seconds)
    while True:
        attempts.count += 1
        try:
            return call()
        except StorageUnavailableError as error:
            if not may_pass(error):
                raise
            if not attempts.pause():
                raise StorageUnavailableError(f"{error} ({attempts})", undecided=error.undecided) from error
            if attempts.count == _WARN_AFTER:
                _log.warning("%s (%s); trying again for up to %g s", error, attempts, seconds)
