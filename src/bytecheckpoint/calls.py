"""The public calls that talk to other ranks: one at a time in each thread.

A signal handler runs in the main thread, between two steps of whatever runs there, and hooks of the caller's modules run
inside `save`. A call that they make while the thread is inside another call could wait for locks that the thread itself
holds. So such a call fails at once. The other ranks may make the same call, and it has a number there: when the outer
call has ended, the inner one is therefore made once more, in order to fail on all ranks (docs/architecture.md, "A save").
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from bytecheckpoint.errors import CheckpointError, UsageError

__all__ = ["one_at_a_time", "refusal"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _ThreadCalls(threading.local):
    """The calls of one thread.

    Attributes:
        running: name of the call that the thread is inside of.
        refused: inner calls to be made again, with the error that each has raised.
        refusal: the error of the inner call that is being made again.
    """

    def __init__(self) -> None:
        self.running: str | None = None
        self.refused: deque[tuple[Callable[[], object], UsageError]] = deque()
        self.refusal: UsageError | None = None


_calls = _ThreadCalls()


def refusal() -> UsageError | None:
    """Return the error that the running call must raise once it has its number, because it is an inner call."""
    return _calls.refusal


def one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refuse calls of `function` from inside another such call of the same thread."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        calls = _calls
        if calls.running is not None:
            error = UsageError(
                f"{name} was called inside of {calls.running}, by a signal handler or by a hook of an object that is "
                f"saved or loaded: let the handler set a flag, and call {name} after {calls.running} has returned"
            )
            calls.refused.append((functools.partial(function, *args, **kwargs), error))
            raise error
        _fail_refused(calls)
        calls.running = name
        try:
            return function(*args, **kwargs)
        finally:
            _fail_refused(calls)

    return call


def _fail_refused(calls: _ThreadCalls) -> None:
    """Fail the inner calls on all ranks, and end the outer one."""
    while True:
        try:
            while calls.refused:
                again, calls.refusal = calls.refused.popleft()
                with contextlib.suppress(CheckpointError):
                    again()
        finally:
            calls.refusal = calls.running = None
        if not calls.refused:  # a signal may have come after the inner loop
            return
        calls.running = "a call that has ended"
