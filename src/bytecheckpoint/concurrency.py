"""Work on other threads, with a time limit: one call, several calls in parallel, or a pool that takes calls one by one.

`concurrent.futures.ThreadPoolExecutor` refuses work once the interpreter ends, and waits at the exit for calls that a dead
storage never answers. A save in flight must still finish then, and the exit must not wait. So all threads here are daemons,
and a call runs in the calling thread where no other thread can be started.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import Any, ClassVar, TypeVar

from bytecheckpoint.errors import StorageUnavailableError
from bytecheckpoint.liveness import busy
from bytecheckpoint.threads import try_start, wait_for_any
from bytecheckpoint.tracing.operation import bind_operation
from bytecheckpoint.tuning import tuning

__all__ = ["CallTimeoutError", "Workers", "call_with_timeout", "parallel_map", "storage_result", "wait_for_call"]

_A = TypeVar("_A")
_R = TypeVar("_R")
_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class CallTimeoutError(Exception):
    """`wait_for_call` gave up. The call itself never raises this class."""


def call_with_timeout(
    seconds: float,
    function: Callable[[], _R],
    what: str = "",
    *,
    undecided: bool = False,
    stopped: Future[Any] | None = None,
) -> _R:
    """Return `function()`, or raise a storage error if that takes too long.

    Args:
        seconds: the timeout.
        function: call of a storage, made on another thread. After a timeout it continues, and its result is dropped.
        what: beginning of the error message, "cannot read /path".
        undecided: value of that attribute of the error.
        stopped: future whose failure ends the wait, as `Cancellation.future`.

    Raises:
        StorageUnavailableError: there is no result after `seconds`.
        CheckpointError: failure of `stopped`.
    """
    try:
        return wait_for_call(function, seconds, stopped=stopped)
    except CallTimeoutError:
        raise _no_answer(what, seconds, undecided=undecided) from None


def wait_for_call(function: Callable[[], _R], seconds: float, *, stopped: Future[Any] | None = None) -> _R:
    """Call `function` on another thread and wait for its result.

    A call that takes too long cannot be stopped. It continues, keeps its thread, and its result is dropped.

    Args:
        function: call that may hang.
        seconds: the timeout.
        stopped: future whose failure ends the wait, as `Cancellation.future`.

    Raises:
        CallTimeoutError: there is no result after `seconds`.
        CheckpointError: failure of `stopped`.
    """
    if sys.is_finalizing():  # other threads do not run any more
        return function()
    if (thread := _CallThread.take()) is None:
        return function()
    future: Future[_R] = Future()
    thread.calls.put((future, bind_operation(function)))
    try:
        return _result(future, seconds, stopped)
    finally:
        del future  # else a failure refers to itself by its traceback, and keeps the frames of all callers alive


def storage_result(future: Future[_R], seconds: float, what: str, stopped: Future[Any] | None = None) -> _R:
    """Wait for a call of a storage and return its result, or raise the error of the call.

    Args:
        future: future of `Workers.submit`.
        seconds: longest wait.
        what: action of the call, for the message: "read /x".
        stopped: future whose failure ends the wait, as `Cancellation.future`.

    Raises:
        StorageUnavailableError: the call did not end in time. `future` is then not done.
        CheckpointError: failure of `stopped`.
    """
    try:
        return _result(future, seconds, stopped)
    except CallTimeoutError:
        raise _no_answer(f"cannot {what}", seconds) from None
    finally:
        del future


def parallel_map(
    function: Callable[[_A], _R],
    items: Iterable[_A],
    threads: int,
    name: str,
    progress: Callable[[int, int], None] | None = None,
) -> list[_R]:
    """Call `function` with every item on several threads and return the results in the items' order.

    The calling thread takes part.

    Args:
        function: function that several threads call.
        items: arguments, one for each call.
        threads: number of calls at the same time.
        name: prefix of the threads' names.
        progress: function of (calls that have ended, calls in all), called by any of the threads.

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
                if progress is not None:
                    progress(len(results), len(arguments))
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)

    helpers: list[threading.Thread] = []
    work_elsewhere = bind_operation(work)
    for number in range(min(threads, len(arguments)) - 1):
        helper = threading.Thread(target=work_elsewhere, name=f"{name}_{number}", daemon=True)
        if not try_start(helper):  # the calling thread works alone
            break
        helpers.append(helper)
    work()
    for helper in helpers:
        try:
            helper.join()
        except BaseException as error:  # noqa: BLE001  Ctrl-C: raised below, when the calls in progress have ended
            errors.append(error)
            helper.join()
    if errors:
        del errors[1:]
        raise errors.pop()  # not of a list that its traceback holds, which would keep all callers alive
    return [results[number] for number in range(len(arguments))]


class Workers:
    """A pool of a few threads, which all start in the constructor.

    Functions run in the thread that submits them where no thread can be started, or after `shutdown`. The threads end with
    this object, also if Ctrl-C keeps its owner from `shutdown`.

    Args:
        count: number of threads.
        name: prefix of the threads' names.

    Attributes:
        count: number of threads that could be started.
    """

    def __init__(self, count: int, name: str) -> None:
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _end_threads, self._queue, count).atexit = False
        for number in range(count):
            # Daemons: a thread that waits for results keeps the interpreter alive; these threads alone must not.
            thread = threading.Thread(target=_run_tasks, args=(self._queue,), name=f"{name}_{number}", daemon=True)
            if not try_start(thread):
                break
            self._threads.append(thread)
        self.count = len(self._threads)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `function(*args)` on one of the threads."""
        task: _Task = (Future(), bind_operation(function), args)
        if self._threads:
            self._queue.put(task)
        else:
            _run_task(task)
        return task[0]

    def shutdown(self, *, cancel: bool = False, seconds: float | None = None) -> bool:
        """Wait until all work is done and the threads have ended.

        Args:
            cancel: flag to drop work that has not begun.
            seconds: longest wait, None for no limit.

        Returns:
            Whether all threads have ended. Others end after their present function.
        """
        if cancel:
            try:
                while (task := self._queue.get_nowait()) is None or task[0].cancel():
                    pass
            except queue.Empty:
                pass
        _end_threads(self._queue, len(self._threads))
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(end - time.monotonic(), 0.0))
        ended = not any(thread.is_alive() for thread in self._threads)
        self._threads.clear()
        return ended


class _CallThread:
    """A reusable thread for `wait_for_call`, which ends after some idle seconds.

    Starting a thread per call would cost 100 us, which is more than most calls take.
    """

    idle: ClassVar[list[_CallThread]] = []

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self.runs = try_start(threading.Thread(target=self._run, name="bytecheckpoint-call", daemon=True))

    @classmethod
    def take(cls) -> _CallThread | None:
        """Take an idle thread or start one; return None where none can be started."""
        try:
            return cls.idle.pop()
        except IndexError:
            return new if (new := cls()).runs else None

    def _run(self) -> None:
        while True:
            try:
                future, function = self.calls.get(timeout=tuning().idle_call_thread)
            except queue.Empty:
                with contextlib.suppress(ValueError):  # just taken by a caller: its call is about to arrive
                    self.idle.remove(self)
                    return
                continue
            self._call(future, function)
            del future, function  # else the buffers of the last call stay alive while the thread waits

    def _call(self, future: Future[Any], function: Callable[[], Any]) -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001  raised by `Future.result`
            self.idle.append(self)
            future.set_exception(error)
        else:
            self.idle.append(self)  # before the result is announced, so that the next call finds the thread
            future.set_result(result)
        finally:
            del future  # as in `wait_for_call`


os.register_at_fork(after_in_child=_CallThread.idle.clear)


def _result(future: Future[_R], seconds: float, stopped: Future[Any] | None) -> _R:
    """Return the result of a call, or raise its error, the failure of `stopped`, or `CallTimeoutError`."""
    try:
        with busy(seconds):
            wait_for_any([future] if stopped is None else [future, stopped], seconds)
        if future.done():
            return future.result()
        if stopped is not None and stopped.done():
            stopped.result()
        raise CallTimeoutError
    finally:
        del future


def _no_answer(what: str, seconds: float, *, undecided: bool = False) -> StorageUnavailableError:
    reason = f"no answer within {round(seconds, 2):g} s"
    message = f"{what}: {reason}; check the device or mount" if what else reason
    return StorageUnavailableError(message, undecided=undecided)


def _run_tasks(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        _run_task(task)
        del task  # else the buffers of the last call stay alive while the thread waits


def _end_threads(tasks: queue.SimpleQueue[_Task | None], count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def _run_task(task: _Task) -> None:
    future, function, args = task
    try:
        if future.done() or not future.set_running_or_notify_cancel():
            return
    except RuntimeError:  # ended between the two, by `FilesWriter.stop`
        return
    try:
        result = function(*args)
    except BaseException as error:  # noqa: BLE001  raised by `Future.result`
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)
    else:
        with contextlib.suppress(InvalidStateError):  # nobody waits any more: see `FilesWriter.stop`
            future.set_result(result)
