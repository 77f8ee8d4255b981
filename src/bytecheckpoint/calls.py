"""The public calls that talk to other ranks: one at a time in each thread.

A signal handler runs in the main thread, between two steps of whatever runs there, hooks of the caller's modules run
inside `save`, and done-callbacks run in the thread that ends a save. A call that they make there could wait for locks that
the thread itself holds, or for the thread itself. So such a call fails at once. The other ranks may make the same call, and
it has a number there: when the outer call has ended, the inner one is therefore made once more, in order to fail on all
ranks. It takes its number and tells them, and waits for nobody (docs/architecture.md, "Waiting").
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import ParamSpec, TypeVar

from bytecheckpoint.errors import CheckpointError, UsageError

__all__ = ["SharedLock", "one_at_a_time", "refusal", "refuse_calls"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _ThreadCalls(threading.local):
    """The calls of one thread.

    Attributes:
        running: name of the call that the thread is inside of.
        refused: inner calls to be made again, with the error that each has raised.
        refusal: the error of the inner call that is being made again.
        shared_locks: number of `SharedLock` that the thread holds or waits for.
    """

    def __init__(self) -> None:
        self.running: str | None = None
        self.refused: deque[tuple[Callable[[], object], UsageError]] = deque()
        self.refusal: UsageError | None = None
        self.shared_locks = 0

    def inside_of(self) -> str | None:
        """Return what the thread is inside of, so that it cannot begin a call."""
        if self.running is None and self.shared_locks:
            return "a read of a storage"
        return self.running


_calls = _ThreadCalls()


class SharedLock:
    """A re-entrant lock of what the storages of a process share, such as a client.

    A thread that reads through `open` may hold it while a signal handler runs. Threads of a save that the handler makes
    would wait for it as long as the handler waits for them, so `one_at_a_time` refuses that save.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        calls = _calls
        calls.shared_locks += 1  # first, as a signal may come between the two
        try:
            self._lock.acquire()
        except BaseException:
            calls.shared_locks -= 1
            raise

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        _calls.shared_locks -= 1


def refusal() -> UsageError | None:
    """Return the error that the running call must raise once it has its number, because it is an inner call."""
    return _calls.refusal


def one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refuse calls of `function` from inside another such call of the same thread."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        calls = _calls
        if (running := calls.inside_of()) is not None:
            error = UsageError(
                f"{name} was called inside of {running}, by a signal handler, a done-callback, or a hook of an object "
                f"that is saved or loaded: let it set a flag, and call {name} after {running} has returned"
            )
            again = functools.partial(copy_context().run, function, *args, **kwargs)
            calls.refused.append((again, error))
            raise error
        _fail_refused(calls)
        calls.running = name
        try:
            return function(*args, **kwargs)
        finally:
            _fail_refused(calls)

    return call


@contextlib.contextmanager
def refuse_calls(name: str) -> Iterator[None]:
    """Refuse the public calls of this thread in a `with` block, in which code of the caller may run."""
    calls = _calls
    if calls.running is not None:
        yield
        return
    calls.running = name
    try:
        yield
    finally:
        _fail_refused(calls)


def _fail_refused(calls: _ThreadCalls) -> None:
    """Fail the inner calls on all ranks, and end the outer one."""
    while True:
        calls.running = calls.running or "a call that has ended"  # handlers of signals wait
        try:
            while calls.refused:
                again, calls.refusal = calls.refused.popleft()
                with contextlib.suppress(CheckpointError):
                    again()
        finally:
            calls.refusal = calls.running = None
        if not calls.refused:  # a signal may have come after the inner loop
            return
