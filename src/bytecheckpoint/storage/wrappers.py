"""Storages around other storages: they measure, try again, slow down or break what goes through.

storage = MeteredStorage(resolve("s3://bucket/step_1"))
...
storage.meter.bytes("read_into"), storage.meter.seconds("read_into")
"""

from __future__ import annotations

import copy
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import StorageError
from .base import FileReader, FileStat, FileWriter, NewFile, Storage
from .retrying import retry

__all__ = [
    "Call",
    "DelayedStorage",
    "Fault",
    "FaultyStorage",
    "Meter",
    "MeteredStorage",
    "RetryingStorage",
    "WrappedStorage",
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a storage, a writer or a reader.

    Attributes:
        operation: the method's name; "write" and "read_into" are those of writers and readers.
        name: the file, several of them separated by spaces, or "".
        nbytes: bytes that the caller gives or asks for; 0 for "read", which is told by its answer.
        tear: of a write: writes the first half of the first buffer, for faults that leave that behind.
    """

    operation: str
    name: str = ""
    nbytes: int = 0
    tear: Callable[[], None] | None = None


class WrappedStorage(Storage):
    """Passes every call on to `inner`, through `around`.

    Args:
        inner: the storage that does the work.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities

    def around(self, call: Call, do: Callable[[], _T]) -> _T:
        """Carry out one call; `do` does it. Runs on the caller's thread, several at once."""
        return do()

    def ending(self, do: Callable[[], None]) -> None:
        """Give up a writer, or close a reader."""
        do()

    @property
    def reads(self) -> int:  # type: ignore[override]
        """As of the inner storage."""
        return self.inner.reads

    @property
    def timeout(self) -> float | None:
        """As of the inner storage, which is what waits."""
        return self.inner.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self.inner.timeout = seconds

    def limit(self, nbytes: int = 0) -> float:
        return self.inner.limit(nbytes)

    def nearby(self) -> Storage:
        return self._again_around(self.inner.nearby())

    def elsewhere(self, other: Storage) -> Storage:
        return self._again_around(self.inner.elsewhere(other))

    def _again_around(self, inner: Storage) -> Storage:
        """The same wrapper around another storage."""
        new = copy.copy(self)
        new.inner, new.url, new.capabilities = inner, inner.url, inner.capabilities
        return new

    def create(self, request: NewFile) -> FileWriter:
        call = Call("create", request.name, request.size)
        return self.around(call, lambda: _WrappedWriter(self, self.inner.create(request), request.name))

    def open(self, name: str) -> FileReader:
        return self.around(Call("open", name), lambda: _WrappedReader(self, self.inner.open(name), name))

    def read(self, name: str) -> bytes:
        return self.around(Call("read", name), lambda: self.inner.read(name))

    def stat(self, name: str) -> FileStat:
        return self.around(Call("stat", name), lambda: self.inner.stat(name))

    def version(self, name: str) -> str:
        return self.around(Call("version", name), lambda: self.inner.version(name))

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        self.around(Call("publish", name, len(data)), lambda: self.inner.publish(name, data, expected=expected))

    def folders(self) -> list[str]:
        return self.around(Call("folders"), self.inner.folders)

    def list(self) -> list[tuple[str, int]]:
        return self.around(Call("list"), self.inner.list)

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        self.around(Call("delete", " ".join(names)), lambda: self.inner.delete(names))

    def sync(self, names: Iterable[str]) -> None:
        names = list(names)
        self.around(Call("sync", " ".join(names)), lambda: self.inner.sync(names))

    def probe(self, name: str, expected: str) -> None:
        self.around(Call("probe", name), lambda: self.inner.probe(name, expected))


class _WrappedWriter(FileWriter):
    def __init__(self, storage: WrappedStorage, inner: FileWriter, name: str) -> None:
        self._storage, self._inner, self._name = storage, inner, name
        self.direct, self.step_bytes = inner.direct, inner.step_bytes

    def write_at(self, offset: int, buffers: Sequence[memoryview]) -> None:
        def tear() -> None:
            self._inner.write_at(offset, [buffers[0][: len(buffers[0]) // 2]])

        call = Call("write", self._name, sum(map(len, buffers)), tear)
        self._storage.around(call, lambda: self._inner.write_at(offset, buffers))

    def finish(self, size: int) -> None:
        self._storage.around(Call("finish", self._name, size), lambda: self._inner.finish(size))

    def interrupt(self) -> None:
        self._inner.interrupt()

    def abort(self) -> None:
        self._storage.ending(self._inner.abort)


class _WrappedReader(FileReader):
    def __init__(self, storage: WrappedStorage, inner: FileReader, name: str) -> None:
        self._storage, self._inner, self._name = storage, inner, name
        self.size, self.step_bytes = inner.size, inner.step_bytes

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        call = Call("read_into", self._name, sum(map(len, buffers)))
        return self._storage.around(call, lambda: self._inner.read_into(offset, buffers))

    def fits(self, size: int) -> bool:
        fits = self._inner.fits(size)
        self.size, self.step_bytes = self._inner.size, self._inner.step_bytes
        return fits

    def others(self) -> Iterator[FileReader]:
        return (_WrappedReader(self._storage, other, self._name) for other in self._inner.others())

    def close(self) -> None:
        self._storage.ending(self._inner.close)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Meter:
    """Counts of what went through, by operation ("write", "read_into", ...). Several threads may add to it."""

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
        """How often it was called."""
        return self._get(operation, 0)

    def failures(self, operation: str) -> int:
        """How many of these calls raised."""
        return self._get(operation, 1)

    def bytes(self, operation: str) -> int:
        """Bytes that calls which succeeded have moved."""
        return self._get(operation, 2)

    def seconds(self, operation: str) -> float:
        """Time spent in the calls, those of all threads added up."""
        with self._lock:
            return self._table[operation][3] if operation in self._table else 0.0

    def _get(self, operation: str, column: int) -> int:
        with self._lock:
            return int(self._table[operation][column]) if operation in self._table else 0


def _moved(call: Call, result: object) -> int:
    """The bytes that a call which succeeded has moved: a read may have met the file's end."""
    if isinstance(result, bytes):
        return len(result)
    return result if call.operation == "read_into" and isinstance(result, int) else call.nbytes


class MeteredStorage(WrappedStorage):
    """Counts calls, bytes and seconds in `meter`: `storage.meter.bytes("read_into")`."""

    def __init__(self, inner: Storage, meter: Meter | None = None) -> None:
        super().__init__(inner)
        self.meter = meter or Meter()

    def around(self, call: Call, do: Callable[[], _T]) -> _T:
        begun = time.perf_counter()
        done, nbytes = False, 0
        try:
            result = do()
            done, nbytes = True, _moved(call, result)
        finally:
            self.meter.add(call.operation, nbytes, time.perf_counter() - begun, not done)
        return result


# --- trying again -----------------------------------------------------------------------------------------------------

#: What can be repeated without harm. A file that was created or published may be there, although the answer got lost.
_REPEATABLE = {"open", "read", "read_into", "stat", "version", "list", "folders", "delete", "sync", "write"}


class RetryingStorage(WrappedStorage):
    """Tries again what failed with `StorageUnavailableError` and can be repeated, until `seconds` are over."""

    def __init__(self, inner: Storage, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def around(self, call: Call, do: Callable[[], _T]) -> _T:
        return retry(do, self._seconds) if call.operation in _REPEATABLE else do()


# --- slowing down, breaking -------------------------------------------------------------------------------------------


class DelayedStorage(WrappedStorage):
    """A storage that is far away and slow.

    Args:
        inner: the storage that does the work.
        latency: seconds that each call takes longer.
        bandwidth: bytes per second of each call that moves some; 0.0: as fast as it goes.
    """

    def __init__(self, inner: Storage, latency: float, bandwidth: float = 0.0) -> None:
        super().__init__(inner)
        self._latency = latency
        self._bandwidth = bandwidth

    def around(self, call: Call, do: Callable[[], _T]) -> _T:
        time.sleep(self._latency)
        result = do()
        # Announced by "create" and "finish", moved by "write".
        moved = 0 if call.operation in ("create", "finish") else _moved(call, result)
        time.sleep(moved / self._bandwidth if self._bandwidth else 0.0)
        return result


@dataclass
class Fault:
    """What happens at some calls.

    Attributes:
        operation: the calls that it hits, as in `Call`.
        error: what they raise; None: nothing, they only wait.
        name: part of the file's name; "" fits all.
        skip: how many calls that fit go through first.
        times: how many calls are then hit; -1: all.
        delay: seconds before a hit call does anything.
        hold: an event that a hit call waits for.
        partial: of "write": some bytes reach the file before the error.
        done: the call takes effect before the error, as when an answer gets lost.
        hits: how many calls were hit.
    """

    operation: str
    error: BaseException | None = None
    name: str = ""
    skip: int = 0
    times: int = 1
    delay: float = 0.0
    hold: threading.Event | None = None
    partial: bool = False
    done: bool = False
    hits: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def meets(self, operation: str, name: str) -> bool:
        """Whether it hits this call, which it counts."""
        if operation != self.operation or self.name not in name:
            return False
        with self._lock:
            if self.skip > 0:
                self.skip -= 1
                return False
            if not self.times:
                return False
            self.times -= 1
            self.hits += 1
            return True


class FaultyStorage(WrappedStorage):
    """Fails as told. Files of asynchronous saves are written by the helper process, unless settings.writer="thread"."""

    def __init__(self, inner: Storage, faults: Sequence[Fault]) -> None:
        super().__init__(inner)
        self._faults = faults

    def around(self, call: Call, do: Callable[[], _T]) -> _T:
        for fault in [f for f in self._faults if f.meets(call.operation, call.name)]:
            if fault.hold is not None and not fault.hold.wait(60):
                raise StorageError("nobody released the held call")
            if fault.delay:
                time.sleep(fault.delay)
            if fault.error is None:
                continue
            if fault.partial and call.tear is not None:
                call.tear()
            if fault.done:
                do()
            raise fault.error
        return do()
