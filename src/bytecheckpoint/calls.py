"""Refuse public calls from inside of another public call of the same thread.

A signal handler runs in the main thread, between two steps of any call there. Hooks of the caller's modules run inside
`save`, and done-callbacks run in the thread that ends a save. A call that they make there could wait for locks that the
thread itself holds, or for the thread itself. So such a call fails at once, and takes no part in the numbers of calls.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from bytecheckpoint.errors import UsageError

__all__ = ["SharedLock", "one_at_a_time", "refuse_calls", "running_call"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _ThreadCalls(threading.local):
    """The calls of one thread.

    Attributes:
        running: name of the call that the thread runs, None outside of calls.
        shared_locks: number of `SharedLock` that the thread holds or waits for.
    """

    def __init__(self) -> None:
        self.running: str | None = None
        self.shared_locks = 0


_calls = _ThreadCalls()


class SharedLock:
    """A re-entrant lock of an object that the storages of a process share, such as a client.

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


def running_call() -> str | None:
    """Return the name of the public call, or of the done-callback, that this thread runs; None outside of them."""
    return _calls.running


def one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refuse calls of `function` from inside another such call of the same thread."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        calls = _calls
        running = calls.running or ("a read of a storage" if calls.shared_locks else None)
        if running is not None:
            raise UsageError(
                f"{name} was called inside of {running}, by a signal handler, a done-callback, or a hook of an object that "
                f"is saved or loaded: for signals use bytecheckpoint.manager.Preemption, otherwise set a flag and call "
                f"{name} after {running} has returned, on all ranks"
            )
        with refuse_calls(name):
            return function(*args, **kwargs)

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
        calls.running = None
