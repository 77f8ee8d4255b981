"""Threads that call a storage: they can finish while the interpreter ends, and are waited for with a time limit."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any, TypeVar

from bytecheckpoint.errors import StorageUnavailableError
from bytecheckpoint.liveness import busy
from bytecheckpoint.threads import try_start
from bytecheckpoint.tracing.operation import carried

__all__ = ["Workers", "call_until_stopped", "storage_result"]

_T = TypeVar("_T")
_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Workers:
    """A few threads that run functions.

    ThreadPoolExecutor starts its threads at the first use, and refuses work once the interpreter ends. But then a save
    in flight must still finish. Here all threads start in the constructor. Where none can be started, then or because of a
    limit, functions run in the thread that submits them. The threads end with this object, also if Ctrl-C keeps its owner
    from `shutdown`.

    Args:
        count: number of threads.
        name: first part of their names.

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
        task: _Task = (Future(), carried(function), args)
        if self._threads:
            self._queue.put(task)
        else:
            _run_task(task)
        return task[0]

    def shutdown(self, *, cancel: bool = False, seconds: float | None = None) -> bool:
        """Wait until all work is done and the threads have ended.

        Args:
            cancel: drop work that has not begun.
            seconds: longest wait; None: without limit.

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


def call_until_stopped(function: Callable[[], _T], seconds: float, what: str, stopped: Future[Any]) -> _T:
    """Call `function` on a thread of its own and wait for it as `storage_result`. After a time-out it goes on."""
    worker = Workers(1, "bytecheckpoint-call")
    try:
        result: _T = storage_result(worker.submit(function), seconds, what, stopped)
        return result
    finally:
        worker.shutdown(seconds=0.0)


def storage_result(future: Future[_T], seconds: float, what: str, stopped: Future[Any] | None = None) -> _T:
    """Wait for a call of a storage and return its result, or raise what the call raised.

    Args:
        future: of `Workers.submit`.
        seconds: longest wait.
        what: what the call does, for the message: "read /x".
        stopped: its exception ends the wait, and is raised.

    Raises:
        StorageUnavailableError: the call did not end in time. `future` is then not done.
    """
    try:
        with busy(seconds):
            if stopped is None or future.done():
                return future.result(seconds)
            wait([future, stopped], seconds, FIRST_COMPLETED)
            if stopped.done() and not future.done():
                stopped.result()
            return future.result(0)
    except TimeoutError:
        if future.done():  # raised by the call itself
            raise
        reason = f"no answer within {round(seconds, 1):g} s; check the device or mount"
        raise StorageUnavailableError(f"cannot {what}: {reason}") from None


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
