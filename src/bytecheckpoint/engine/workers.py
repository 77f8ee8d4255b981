"""Writer threads that can finish their work while the interpreter ends."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["Workers"]

_Item = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Workers:
    """A few threads that run functions.

    ThreadPoolExecutor starts its threads at the first use and takes no work once the interpreter ends, which is just
    when a save in flight must be finished. Here all threads start at once; where even that is too late, the functions
    run in the thread that submits them.

    Args:
        count: number of threads.
        name: first part of their names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for number in range(count):
            # Daemons: whoever waits for the results keeps the interpreter alive, the threads alone must not.
            thread = threading.Thread(target=self._run, name=f"{name}_{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # "can't create new thread at interpreter shutdown"
                break
            self._threads.append(thread)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            _work(item)
            del item  # or the buffers of the last call stay alive while the thread waits

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `function(*args)` on a thread."""
        item: _Item = (Future(), function, args)
        if self._threads:
            self._queue.put(item)
        else:
            _work(item)
        return item[0]

    def shutdown(self, *, cancel: bool = False, seconds: float | None = None) -> bool:
        """Wait until all work is done and the threads have ended.

        Args:
            cancel: work that has not begun is dropped.
            seconds: how long to wait; None: until they have.

        Returns:
            Whether they have ended. Those that have not end with what they do now.
        """
        if cancel:
            try:
                while (item := self._queue.get_nowait()) is None or item[0].cancel():
                    pass
            except queue.Empty:
                pass
        for _ in self._threads:
            self._queue.put(None)
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(end - time.monotonic(), 0.0))
        ended = not any(thread.is_alive() for thread in self._threads)
        self._threads.clear()
        return ended


def _work(item: _Item) -> None:
    future, function, args = item
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*args))
    except BaseException as error:  # noqa: BLE001  it is the future's
        future.set_exception(error)
