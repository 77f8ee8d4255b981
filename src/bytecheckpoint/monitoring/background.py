"""A thread for work that nobody waits for."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Background"]

_log = logging.getLogger("bytecheckpoint")
#: Seconds after which a thread without work ends.
_IDLE_SECONDS = 5.0


class Background:
    """Runs jobs one after the other on a thread, which ends when there is nothing to do. Any thread may call it.

    Args:
        name: of the thread.
        limit: jobs that may wait; `submit` refuses more. None: any number.
    """

    def __init__(self, name: str, limit: int | None = None) -> None:
        self._name = name
        self._limit = limit
        self._jobs: list[tuple[float, int, Callable[[], object]]] = []  # a heap by the time at which they are due
        self._numbers = itertools.count()
        self._running = False
        self._busy = False
        self._changed = threading.Condition()

    def submit(self, job: Callable[[], object]) -> bool:
        """Run `job` soon; return False if too many jobs are waiting, or the interpreter ends."""
        return self.later(0.0, job)

    def later(self, seconds: float, job: Callable[[], object]) -> bool:
        """Run `job` after some seconds. Returns as `submit`."""
        with self._changed:
            if self._limit is not None and len(self._jobs) >= self._limit:
                return False
            heapq.heappush(self._jobs, (time.monotonic() + seconds, next(self._numbers), job))
            self._changed.notify_all()
            if not self._running:
                try:
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
                except RuntimeError:  # no thread can be started, or the interpreter ends
                    self._jobs.clear()
                    return False
                self._running = True
        return True

    def waiting(self) -> int:
        """Return the number of jobs that wait."""
        with self._changed:
            return len(self._jobs)

    def flush(self, timeout: float) -> bool:
        """Wait until all jobs that are due have ended; return False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and not self._due(), timeout)

    def _due(self) -> bool:
        return bool(self._jobs) and self._jobs[0][0] <= time.monotonic()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                idle_since = time.monotonic()
                while not self._due():
                    until = self._jobs[0][0] if self._jobs else idle_since + _IDLE_SECONDS
                    if not self._changed.wait(max(until - time.monotonic(), 0.0)) and not self._jobs:
                        self._running = False
                        return
                job = heapq.heappop(self._jobs)[2]
                self._busy = True
            try:
                job()
            except Exception:  # noqa: BLE001  of one sink or alert must not end the others
                _log.exception("monitoring failed")
