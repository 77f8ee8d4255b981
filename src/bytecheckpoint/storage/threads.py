"""Calls on other threads: several in parallel, or one with a timeout, even while the interpreter shuts down."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from typing import ClassVar, TypeVar

from bytecheckpoint.errors import StorageUnavailableError
from bytecheckpoint.liveness import busy
from bytecheckpoint.threads import try_start
from bytecheckpoint.tracing.operation import carried
from bytecheckpoint.tuning import tuning

__all__ = ["CallTimeoutError", "call_with_timeout", "parallel_map", "wait_for_call"]

_A = TypeVar("_A")
_R = TypeVar("_R")


class CallTimeoutError(Exception):
    """`wait_for_call` gave up. The call itself never raises this class."""


def parallel_map(function: Callable[[_A], _R], items: Iterable[_A], threads: int, name: str) -> list[_R]:
    """Call `function` with every item on several threads and return the results in the items' order.

    The calling thread takes part. An executor would not do: it refuses work while the interpreter shuts down, and a save in
    flight must be finished then.

    Args:
        function: called from several threads.
        items: one call each.
        threads: calls at the same time.
        name: prefix of the threads' names.

    Raises:
        BaseException: the first error of a call. No further call begins, and all calls in progress have ended.
    """
    arguments = list(items)
    results: dict[int, _R] = {}
    errors: list[BaseException] = []
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(arguments)):
        waiting.put(number)

    def work() -> None:
        while not errors:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results[number] = function(arguments[number])
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)

    helpers: list[threading.Thread] = []
    work_elsewhere = carried(work)
    for number in range(min(threads, len(arguments)) - 1):
        helper = threading.Thread(target=work_elsewhere, name=f"{name}_{number}", daemon=True)
        if not try_start(helper):  # the calling thread works alone
            break
        helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors.pop()  # not of a list that its traceback holds, which would keep all callers alive
    return [results[number] for number in range(len(arguments))]


class _CallThread:
    """A reusable thread for `wait_for_call`, which ends after some idle seconds.

    Starting a thread per call would cost 100 us, which is more than most calls take.
    """

    idle: ClassVar[list[_CallThread]] = []

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.runs = try_start(threading.Thread(target=self._run, name="bytecheckpoint-call", daemon=True))

    @classmethod
    def take(cls) -> _CallThread | None:
        """Take an idle thread or start one; None where none can be started."""
        try:
            return cls.idle.pop()
        except IndexError:
            return new if (new := cls()).runs else None

    def _run(self) -> None:
        while True:
            try:
                self.calls.get(timeout=tuning().idle_call_thread)()
            except queue.Empty:
                with contextlib.suppress(ValueError):  # just taken by a caller: its call is about to arrive
                    self.idle.remove(self)
                    return


os.register_at_fork(after_in_child=_CallThread.idle.clear)


def wait_for_call(function: Callable[[], _R], seconds: float) -> _R:
    """Call `function` on another thread and wait for its result.

    A call that takes too long cannot be stopped. It goes on, keeps its thread, and its result is dropped.

    Raises:
        CallTimeoutError: there is no result after `seconds`.
    """
    results: list[_R] = []
    errors: list[BaseException] = []
    done = threading.Lock()
    done.acquire()

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)
        assert thread is not None
        _CallThread.idle.append(thread)  # before the result is announced, so that the next call finds the thread
        done.release()

    if sys.is_finalizing():  # other threads do not run any more
        return function()
    if (thread := _CallThread.take()) is None:
        return function()
    thread.calls.put(carried(work))
    with busy(seconds):
        done.acquire(timeout=seconds)
    if errors:
        raise errors.pop()  # not of a list that its traceback holds, which would keep all callers alive
    if not results:
        raise CallTimeoutError
    return results[0]


def call_with_timeout(seconds: float, function: Callable[[], _R], what: str = "", *, undecided: bool = False) -> _R:
    """Return `function()`, or raise a storage error if that takes too long.

    Args:
        seconds: the timeout.
        function: called on another thread. After a timeout it goes on, and its result is dropped.
        what: beginning of the error message, "cannot read /path".
        undecided: value of that attribute of the error.

    Raises:
        StorageUnavailableError: there is no result after `seconds`.
    """
    try:
        return wait_for_call(function, seconds)
    except CallTimeoutError:
        reason = f"no answer within {round(seconds, 2):g} s"
        message = f"{what}: {reason}; check the device or mount" if what else reason
        raise StorageUnavailableError(message, undecided=undecided) from None
