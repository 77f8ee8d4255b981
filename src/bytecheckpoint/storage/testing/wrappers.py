"""Wrappers around storages for tests and benchmarks: they measure, retry, delay or break calls.

storage = MeteredStorage(resolve("s3://bucket/step_1"))
...
storage.meter.bytes("read_into"), storage.meter.seconds("read_into")
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bytecheckpoint.retries import retry
from bytecheckpoint.storage.base import Storage
from bytecheckpoint.storage.testing.fault_rule import FaultRule
from bytecheckpoint.storage.wrappers import Call, WrappedStorage

__all__ = [
    "DelayedStorage",
    "FaultRule",
    "FaultyStorage",
    "Meter",
    "MeteredStorage",
    "RetryingStorage",
]

_T = TypeVar("_T")


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Meter:
    """Counts of calls by operation ("write", "read_into", ...). Several threads may add to them."""

    _table: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0, 0.0]))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, operation: str, nbytes: int, seconds: float, failed: bool) -> None:
        """Count one call."""
        with self._lock:
            row = self._table[operation]
            row[0] += 1
            row[1] += failed
            row[2] += nbytes
            row[3] += seconds

    def calls(self, operation: str) -> int:
        """Return the number of calls."""
        return self._get(operation, 0)

    def failures(self, operation: str) -> int:
        """Return the number of calls that raised."""
        return self._get(operation, 1)

    def bytes(self, operation: str) -> int:
        """Return the bytes that successful calls have moved."""
        return self._get(operation, 2)

    def seconds(self, operation: str) -> float:
        """Return the seconds spent in the calls, summed over threads."""
        with self._lock:
            return self._table[operation][3] if operation in self._table else 0.0

    def _get(self, operation: str, column: int) -> int:
        with self._lock:
            return int(self._table[operation][column]) if operation in self._table else 0


def _moved(call: Call, result: object) -> int:
    """Return the bytes that a successful call has moved; a read may end at the file's end."""
    if isinstance(result, bytes):
        return len(result)
    return result if call.operation == "read_into" and isinstance(result, int) else call.nbytes


class MeteredStorage(WrappedStorage):
    """Counts calls, bytes and seconds in `meter`: `storage.meter.bytes("read_into")`."""

    def __init__(self, inner: Storage, meter: Meter | None = None) -> None:
        super().__init__(inner)
        self.meter = meter or Meter()

    def around(self, call: Call, function: Callable[[], _T]) -> _T:
        begun = time.perf_counter()
        done, nbytes = False, 0
        try:
            result = function()
            done, nbytes = True, _moved(call, result)
        finally:
            self.meter.add(call.operation, nbytes, time.perf_counter() - begun, not done)
        return result


# --- retries -----------------------------------------------------------------------------------------------------------

#: Operations that can be repeated safely. A created or published file may exist although the answer was lost.
_REPEATABLE = {"open", "read", "read_into", "stat", "version", "list", "folders", "delete", "sync", "write"}


class RetryingStorage(WrappedStorage):
    """Retries repeatable operations after `StorageUnavailableError`, until `seconds` are over."""

    def __init__(self, inner: Storage, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def around(self, call: Call, function: Callable[[], _T]) -> _T:
        return retry(function, self._seconds) if call.operation in _REPEATABLE else function()


# --- slowing down, breaking -------------------------------------------------------------------------------------------


class DelayedStorage(WrappedStorage):
    """Simulates a distant, slow storage.

    Args:
        inner: the wrapped storage.
        latency: seconds added to each call.
        bandwidth: bytes per second of each call that moves some; 0.0: unlimited.
    """

    def __init__(self, inner: Storage, latency: float, bandwidth: float = 0.0) -> None:
        super().__init__(inner)
        self._latency = latency
        self._bandwidth = bandwidth

    def around(self, call: Call, function: Callable[[], _T]) -> _T:
        time.sleep(self._latency)
        result = function()
        # "create" and "finish" announce bytes, "write" moves them.
        moved = 0 if call.operation in ("create", "finish") else _moved(call, result)
        time.sleep(moved / self._bandwidth if self._bandwidth else 0.0)
        return result


class FaultyStorage(WrappedStorage):
    """Fails by rules, each call by all that match it.

    The helper process writes the files of asynchronous saves, out of reach of the rules, unless `writer` is "thread".

    Args:
        inner: the storage that does the work.
        rules: rules of the calls that fail; more may be added later.
        rank: the rank whose calls these are.
    """

    def __init__(self, inner: Storage, rules: Sequence[FaultRule], rank: int | None = None) -> None:
        super().__init__(inner)
        self._rules, self._rank = rules, rank

    def around(self, call: Call, function: Callable[[], _T]) -> _T:
        for rule in [r for r in self._rules if r.hit(call.operation, call.name, self._rank)]:
            rule.wait()
            if rule.error is None:
                continue
            if rule.partial and call.tear is not None:
                call.tear()
            if rule.lose:
                function()
            raise rule.error
        return function()
