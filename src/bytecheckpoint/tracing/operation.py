"""One save or load of one rank, which its threads and storages share: its phases, its spans and its counts.

The running operation is a context variable, so that two of them, such as an asynchronous save and a load, do not mix. A new
thread does not have it: code that hands work to another thread wraps the function by `bind_operation`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from bytecheckpoint.liveness import counts_as_progress, not_counted_as_progress, note_activity
from bytecheckpoint.tuning import tuning

__all__ = [
    "Operation",
    "Span",
    "Total",
    "bind_operation",
    "count",
    "count_retries",
    "in_operation",
    "merge_measurements",
    "pause",
    "retries_so_far",
    "span",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_log = logging.getLogger("bytecheckpoint")
#: Name under which `count_retries` counts.
_RETRY = "retry"
_SECONDS = operator.itemgetter(2)


class Span(NamedTuple):
    """One piece of work on one rank.

    Attributes:
        name: name of the work, as "write".
        begin: beginning by `time.perf_counter`, which all processes of a machine share.
        seconds: duration.
        nbytes: bytes that it moved.
        subject: file that it worked on, or "".
        failed: outcome, True if it raised.
    """

    name: str
    begin: float
    seconds: float
    nbytes: int
    subject: str
    failed: bool


class Total(NamedTuple):
    """The sum of all spans of one name, or of the counts under a name without a span.

    Attributes:
        times: number of spans or events.
        seconds: duration, summed over threads.
        nbytes: bytes that were moved.
    """

    times: int
    seconds: float
    nbytes: int


#: The values of a `Span`. A chunk must cost next to nothing, and a plain tuple is made in a third of the time.
_Values = tuple[str, float, float, int, str, bool]


class Operation:
    """One save or load on one rank. Several threads may use it; one at a time calls `mark`.

    Args:
        kind: "save", "load" or "prepare".
        path: path of the checkpoint, "" where the caller has given no valid one.

    Attributes:
        kind: "save", "load" or "prepare".
        path: path of the checkpoint.
        began: time of the beginning, in seconds since 1970.
        begin: time of the beginning by `time.perf_counter`.
        number: number of the operation among those of its kind, equal on all ranks; 0 until it has one.
        step: training step; None where the caller does not give it.
        attempt: number of the attempt, from 1; a load starts again when another job replaced the checkpoint.
        phase: name of the present phase, for failure messages.
        planned_bytes: bytes that this rank has to move; 0 until that is known.
        phases: phases that have ended, in order.
    """

    def __init__(self, kind: str, path: str) -> None:
        self.kind = kind
        self.path = path
        self.began = time.time()
        self.begin = self._last = time.perf_counter()
        self.number = 0
        self.step: int | None = None
        self.attempt = 1
        self.phase = "call"
        self.planned_bytes = 0
        self.phases: list[Span] = []
        self._new: deque[_Values] = deque()  # spans that are in no total yet
        self._most_new = 2 * tuning().spans_per_rank
        self._totals: dict[str, Total] = {}
        self._longest: list[_Values] = []
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[Operation]:
        """Let this thread, and those that get work from it, belong to the operation inside the `with` block."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    # --- phases ---

    def mark(self, name: str) -> None:
        """End phase `name`, which began when the one before ended."""
        note_activity()
        now = time.perf_counter()
        self.phases.append(Span(name, self._last, now - self._last, 0, "", failed=False))
        self._last = now

    def seconds_by_phase(self) -> dict[str, float]:
        """Return the seconds of each phase, summed over its parts."""
        seconds: dict[str, float] = {}
        for part in self.phases:
            seconds[part.name] = seconds.get(part.name, 0.0) + part.seconds
        return seconds

    def seconds(self) -> float:
        """Return the seconds since the operation began."""
        return time.perf_counter() - self.begin

    # --- spans and counters ---

    def add(self, name: str, begin: float, nbytes: int = 0, subject: str = "", failed: bool = False) -> None:
        """Add a span that ends now.

        Args:
            name: name of the work, as "write".
            begin: beginning by `time.perf_counter`.
            nbytes: that it moved.
            subject: the file that it worked on.
            failed: it raised.
        """
        new = self._new
        new.append((name, begin, time.perf_counter() - begin, nbytes, subject, failed))  # a single step: no lock
        if len(new) >= self._most_new:
            self._sum_up()

    def count(self, name: str, count: int = 1, seconds: float = 0.0, nbytes: int = 0) -> None:
        """Add to the total of `name` without a span."""
        with self._lock:
            self._add_total(name, Total(count, seconds, nbytes))

    def total(self, name: str) -> Total:
        """Return the total of all spans and counts of one name so far."""
        return self.totals().get(name, Total(0, 0.0, 0))

    def totals(self) -> dict[str, Total]:
        """Return the totals so far, by name."""
        self._sum_up()
        with self._lock:
            return dict(self._totals)

    def longest_spans(self) -> list[Span]:
        """Return the `tuning().spans_per_rank` longest spans so far, in order of their beginning."""
        self._sum_up()
        with self._lock:
            return sorted(map(Span._make, self._longest), key=lambda span: span.begin)

    def take(self) -> dict[str, Any]:
        """Return the totals and the longest spans since the last call as plain values, and forget them."""
        self._sum_up()
        with self._lock:
            totals, self._totals = self._totals, {}
            spans, self._longest = self._longest, []
        return {"totals": totals, "spans": spans}

    def merge_measurements(self, taken: Mapping[str, Any]) -> None:
        """Add what another process of this machine has measured for the operation: what its `take` has returned."""
        with self._lock:
            for name, total in taken["totals"].items():
                self._add_total(name, Total(*total))
            self._keep_longest(map(tuple, taken["spans"]))

    def _add_total(self, name: str, more: Total) -> None:
        sums = self._totals.get(name, Total(0, 0.0, 0))
        self._totals[name] = Total(sums.times + more.times, sums.seconds + more.seconds, sums.nbytes + more.nbytes)

    def _keep_longest(self, spans: Iterable[_Values]) -> None:
        self._longest += spans
        limit = self._most_new // 2
        if len(self._longest) > limit:
            self._longest.sort(key=_SECONDS, reverse=True)
            del self._longest[limit:]

    def _sum_up(self) -> None:
        """Add the new spans to the totals and to the longest ones."""
        with self._lock:
            new: list[_Values] = []
            with contextlib.suppress(IndexError):  # no more
                while True:
                    new.append(self._new.popleft())
            sums: dict[str, list[float]] = {}
            for name, _, seconds, nbytes, _, _ in new:
                sums_of_name = sums.setdefault(name, [0, 0.0, 0])
                sums_of_name[0] += 1
                sums_of_name[1] += seconds
                sums_of_name[2] += nbytes
            for name, (times, total_seconds, total_bytes) in sums.items():
                self._add_total(name, Total(int(times), total_seconds, int(total_bytes)))
            self._keep_longest(new)

    # --- retries ---

    @property
    def retries(self) -> int:
        """Attempts after the first one, of all requests together."""
        return self.total(_RETRY).times

    @property
    def retry_seconds(self) -> float:
        """Seconds waited before them, summed over threads."""
        return self.total(_RETRY).seconds

    def end(self) -> None:
        """Log the number of repeated requests."""
        if self.retries:
            _log.info(
                "the %s %s %s repeated %d requests, and waited %.1f s before them",
                self.kind, "to" if self.kind == "save" else "from", self.path, self.retries, self.retry_seconds,
            )  # fmt: skip


_current: ContextVar[Operation | None] = ContextVar("bytecheckpoint_operation", default=None)


def in_operation() -> bool:
    """Return whether this thread works for an operation."""
    return _current.get() is not None


class span:
    """Measure what runs inside a `with` block, or each call of a function, as a span of this thread's operation.

    It costs about a microsecond, and nothing is measured where no operation runs.

    Args:
        name: name of the work, as "write".
        nbytes: bytes that it moves.
        subject: file that it works on.
    """

    __slots__ = ("_begin", "_name", "_nbytes", "_subject")

    def __init__(self, name: str, nbytes: int = 0, subject: str = "") -> None:
        self._name = name
        self._nbytes = nbytes
        self._subject = subject

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, error: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        operation = _current.get()
        if operation is not None:
            operation.add(self._name, self._begin, self._nbytes, self._subject, error is not None)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Return a function that measures each of its calls."""

        @functools.wraps(function)
        def measured(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with span(self._name, self._nbytes, self._subject):
                return function(*args, **kwargs)

        return measured


def bind_operation(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that runs `function` on another thread as part of this thread's operation, and counts alike."""
    operation, counts = _current.get(), counts_as_progress()
    if operation is None and counts:
        return function

    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        token = _current.set(operation)
        try:
            with contextlib.nullcontext() if counts else not_counted_as_progress():
                return function(*args, **kwargs)
        finally:
            _current.reset(token)

    return run


def count(name: str, count: int = 1, seconds: float = 0.0, nbytes: int = 0) -> None:
    """Add to the total of `name` in the operation of this thread, if there is one."""
    operation = _current.get()
    if operation is not None:
        operation.count(name, count, seconds, nbytes)


def merge_measurements(taken: Mapping[str, Any]) -> None:
    """Add the spans that `Operation.take` has returned in another process to the operation of this thread."""
    operation = _current.get()
    if operation is not None:
        operation.merge_measurements(taken)


def retries_so_far() -> dict[str, Any]:
    """Return the retries of this thread's operation, by the names of their attributes: fields of a report."""
    operation = _current.get()
    return {} if operation is None else {"retries": operation.retries, "retry_seconds": operation.retry_seconds}


def count_retries(retries: int = 1, seconds: float = 0.0) -> None:
    """Count further attempts at something, and the seconds waited before them, in the operation of this thread."""
    count(_RETRY, retries, seconds)


def pause(seconds: float) -> None:
    """Sleep before another attempt at something, and count it."""
    begun = time.monotonic()
    time.sleep(seconds)
    count_retries(1, time.monotonic() - begun)
