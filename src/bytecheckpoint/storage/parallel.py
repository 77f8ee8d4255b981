"""Requests at the same time, or with a time limit, also while the interpreter ends and makes no threads any more."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from typing import ClassVar, TypeVar

from ..errors import StorageUnavailableError

__all__ = ["at_the_same_time", "within"]

_A = TypeVar("_A")
_R = TypeVar("_R")
_IDLE_SECONDS = 5.0


def at_the_same_time(function: Callable[[_A], _R], items: Iterable[_A], threads: int, name: str) -> list[_R]:
    """`function` of every item, in the items' order.

    The calling thread takes part. An executor would not do: it refuses work once the interpreter ends, which is when a
    save in flight must be finished.

    Args:
        function: called from several threads.
        items: one call each.
        threads: calls at the same time.
        name: first part of the threads' names.

    Raises:
        BaseException: the first that a call raised, when all calls that were begun have ended; others do not begin.
    """
    calls = list(items)
    results: dict[int, _R] = {}
    errors: list[BaseException] = []
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(calls)):
        waiting.put(number)

    def work() -> None:
        while not errors:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results[number] = function(calls[number])
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)

    helpers: list[threading.Thread] = []
    for number in range(min(threads, len(calls)) - 1):
        helper = threading.Thread(target=work, name=f"{name}_{number}", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # the interpreter ends: the calling thread does it alone
            break
        helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(calls))]


class _Asker:
    """A thread that makes one call after the other for `within`, and ends when nobody has wanted it for a while.

    A thread of its own for every call costs 100 us, and most calls take less.
    """

    idle: ClassVar[list[_Asker]] = []

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="bytecheckpoint-ask", daemon=True).start()

    @classmethod
    def free(cls) -> _Asker:
        """One that waits for a call. Raises RuntimeError where no thread can be had: the interpreter ends."""
        try:
            return cls.idle.pop()
        except IndexError:
            return cls()

    def _run(self) -> None:
        while True:
            try:
                self.calls.get(timeout=_IDLE_SECONDS)()
            except queue.Empty:
                with contextlib.suppress(ValueError):  # somebody has just taken it: its call is on the way
                    self.idle.remove(self)
                    return


os.register_at_fork(after_in_child=_Asker.idle.clear)


def within(seconds: float, function: Callable[[], _R], what: str = "", *, undecided: bool = False) -> _R:
    """`function()`, unless it takes longer than so many seconds; then it goes on, and nobody hears of it.

    Args:
        seconds: how long to wait.
        function: called on another thread.
        what: what cannot be done then, for the message.
        undecided: of the error.

    Raises:
        StorageUnavailableError: it takes longer.
    """
    results: list[_R] = []
    errors: list[BaseException] = []
    over = threading.Lock()
    over.acquire()

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)
        _Asker.idle.append(asker)
        over.release()

    if sys.is_finalizing():  # threads that are there do not run any more
        return function()
    try:
        asker = _Asker.free()
    except RuntimeError:  # the interpreter ends
        return function()
    asker.calls.put(work)
    over.acquire(timeout=seconds)
    if errors:
        raise errors[0]
    if not results:
        silent = f"no answer within {round(seconds, 2):g} s"
        raise StorageUnavailableError(
            f"{what}: {silent}; check the device or mount" if what else silent, undecided=undecided
        )
    return results[0]
