"""Run jobs on a background thread."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable

from bytecheckpoint.liveness import not_counted_as_progress
from bytecheckpoint.threads import try_start

__all__ = ["Background"]

_log = logging.getLogger("bytecheckpoint")
#: Seconds after which an idle thread checks whether its `Background` still exists.
_IDLE_SECONDS = 5.0


class Background:
    """Runs jobs one after the other on a thread. Any thread may call its methods.

    The thread lives as long as this object, even without jobs: the last save of a training ends while the interpreter
    ends, and Python starts no thread then.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: list[tuple[float, int, Callable[[], object]]] = []  # a heap by the time at which they are due
        self._numbers = itertools.count()
        self._running = False
        self._busy = False
        self._ended = False
        self._changed = threading.Condition()

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` soon."""
        self.later(0.0, job)

    def later(self, seconds: float, job: Callable[[], object]) -> None:
        """Run `job` after some seconds."""
        with self._changed:
            heapq.heappush(self._jobs, (time.monotonic() + seconds, next(self._numbers), job))
            self._ended = False
            self._changed.notify_all()
            if not self._running:
                thread = threading.Thread(target=_serve, args=(weakref.ref(self),), name=self._name, daemon=True)
                self._running = try_start(thread)  # else see `flush`

    def waiting(self) -> int:
        """Return the number of jobs in the queue."""
        with self._changed:
            return len(self._jobs)

    def due(self) -> int:
        """Return the number of jobs in the queue whose time has come."""
        with self._changed:
            return sum(when <= time.monotonic() for when, _, _ in self._jobs)

    def hurry(self) -> None:
        """Make all jobs in the queue due now, in their order."""
        with self._changed:
            now = time.monotonic()
            # A sorted list is a heap.
            self._jobs = [
                (min(when, now), number, job) for when, number, job in sorted(self._jobs, key=lambda j: j[:2])
            ]
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until no due job is left, or run them if there is no thread. Return False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                if self._running:
                    remaining = deadline - time.monotonic()
                    return self._changed.wait_for(lambda: not self._busy and not self._due(), remaining)
                if not self._due() or time.monotonic() > deadline:
                    return not self._due()
                job = heapq.heappop(self._jobs)[2]
            _run(job)

    def end(self) -> None:
        """End the thread after the jobs in the queue. A later job starts another thread."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _due(self) -> bool:
        return bool(self._jobs) and self._jobs[0][0] <= time.monotonic()

    def _step(self) -> bool:
        """Run one job, or wait some seconds for one. Return False if the thread has to end."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            idle_since = time.monotonic()
            while not self._due():
                if self._ended and not self._jobs:
                    self._running = False
                    return False
                until = self._jobs[0][0] if self._jobs else idle_since + _IDLE_SECONDS
                wait = min(max(until - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
                if not self._changed.wait(wait) and not self._jobs:
                    return True
            job = heapq.heappop(self._jobs)[2]
            self._busy = True
        _run(job)
        return True


def _run(job: Callable[[], object]) -> None:
    try:
        # Progress reports of a hanging save would otherwise make this rank look alive, and the others would wait forever.
        with not_counted_as_progress():
            job()
    except (Exception, SystemExit):  # noqa: BLE001  an error in one job must not end the others
        _log.exception("monitoring failed")


def _serve(reference: weakref.ref[Background]) -> None:
    while True:
        background = reference()
        if background is None or not background._step():
            return
        del background  # the last reference may be gone
