"""Retries after transient errors, until a deadline, with growing random pauses (decision 0049)."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from bytecheckpoint.errors import StorageUnavailableError
from bytecheckpoint.tracing.operation import count_retries, pause

__all__ = ["RetryBudget", "retry", "retry_classified"]

_T = TypeVar("_T")
_log = logging.getLogger("bytecheckpoint")
#: Number of failed attempts after which a warning says that an operation is retried.
_WARN_AFTER = 3
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 3.0
_DICE = random.SystemRandom()  # the global generator is the program's


class RetryBudget:
    """Time for the attempts at one operation.

    Args:
        seconds: time from now to the deadline.

    Attributes:
        exhausted: flag that `pause` has refused another attempt.
    """

    def __init__(self, seconds: float) -> None:
        self.exhausted = False
        self._begun = time.monotonic()
        self._deadline = self._begun + seconds
        self._pause = _FIRST_PAUSE

    def pause(self) -> bool:
        """Wait before the next attempt, the last one at the deadline. Return False after the deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            self.exhausted = True
            return False
        pause(min(left, self._pause * _DICE.uniform(0.5, 1.0)))
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        return True

    def describe(self, attempts: int) -> str:
        """Return the number of attempts and the time that they took, for a message."""
        return f"{attempts} attempt{'s' if attempts != 1 else ''} in {time.monotonic() - self._begun:.1f} s"


def retry(
    call: Callable[[], _T], seconds: float, may_pass: Callable[[StorageUnavailableError], bool] = lambda _: True
) -> _T:
    """Return `call()`, and call it again while it raises `StorageUnavailableError` and `seconds` are not over.

    Args:
        call: one attempt.
        seconds: time from now to the deadline.
        may_pass: predicate of errors after which another attempt may succeed.

    Raises:
        StorageUnavailableError: the last error, with the number of attempts in its message if there may be another.
    """
    budget = RetryBudget(seconds)

    def classify(error: BaseException, count: int) -> tuple[Exception, RetryBudget]:
        if not isinstance(error, StorageUnavailableError) or not may_pass(error):
            raise error
        last = StorageUnavailableError(f"{error} ({budget.describe(count)})", undecided=error.undecided)
        last.__cause__ = error
        if count == _WARN_AFTER:
            _log.warning("%s; trying again for up to %g s", last, seconds)
        return last, budget

    return retry_classified(call, classify)


def retry_classified(
    call: Callable[[], _T],
    classify: Callable[[BaseException, int], tuple[Exception, RetryBudget | None]],
    *,
    at_least: int = 1,
) -> _T:
    """Return `call()`, and call it again after errors for which there is a budget.

    Args:
        call: one attempt.
        classify: function of an error and the number of attempts. It returns the error to raise in its place and the budget
            of its kind, None for a permanent error. It raises an error that is not to be retried at all.
        at_least: number of attempts that are made even past the deadline.
    """
    count = 0
    while True:
        count += 1
        try:
            return call()
        except BaseException as error:  # noqa: BLE001  `classify` raises errors of other origin
            typed, budget = classify(error, count)
            if budget is None:
                raise typed from typed.__cause__
            if not budget.pause():
                if count >= at_least:
                    raise typed from typed.__cause__
                count_retries()
