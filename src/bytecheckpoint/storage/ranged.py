"""Long reads from remote storages as parallel requests, straight into the caller's buffers.

One connection to a remote store carries some tens of MB/s, however fast the network is, so parallel requests are several
times as fast. Each request costs processor time on both sides, so requests must not be short.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.calls import SharedLock
from bytecheckpoint.concurrency import parallel_map

__all__ = ["ConnectionShares", "RangeRequest", "RequestSizes", "read_in_parallel"]

#: Connections to one server: for all reads of a process, and at most for one read.
_CONNECTIONS_PER_PROCESS, _CONNECTIONS_PER_READ = 16, 4

#: One request: the offset in the file, and the memory to fill from there, uint8 [nbytes].
RangeRequest = tuple[int, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """The sizes of the requests into which a read is split.

    Attributes:
        parallel: requests in parallel. A read is split into so many, unless the bounds below demand more or fewer.
        shortest: minimum bytes of a request; shorter reads, and the last request, may have fewer.
        longest: maximum bytes of a request.
    """

    parallel: int
    shortest: int
    longest: int

    def step(self, nbytes: int) -> int:
        """Return the bytes of one request, whole MiB, for a read of `nbytes`."""
        parts = min(self.parallel, max(nbytes // self.shortest, 1))
        return min(max(-(-nbytes // parts >> 20), 1) << 20, self.longest)


class ConnectionShares:
    """Divides the connections to one server between the reads of a process."""

    def __init__(self) -> None:
        self._reads = 0
        self._lock = SharedLock()

    @contextlib.contextmanager
    def share(self) -> Iterator[int]:
        """Yield the number of connections that one read may use; wrap the read in this."""
        with self._lock:
            self._reads += 1
            reads = self._reads
        try:
            yield min(max(_CONNECTIONS_PER_PROCESS // reads, 1), _CONNECTIONS_PER_READ)
        finally:
            with self._lock:
                self._reads -= 1


def read_in_parallel(
    get: Callable[[RangeRequest], int], offset: int, buffers: Sequence[memoryview], size: int, sizes: RequestSizes
) -> int:
    """Fill `buffers` one after the other from byte `offset` of a file.

    Args:
        get: carries out one request; returns the bytes read, fewer when the file was removed or truncated meanwhile.
        offset: offset of the first byte in the file.
        buffers: memory to fill.
        size: length of the file in bytes. Memory for bytes beyond it is left as it is.
        sizes: how to split the read.

    Returns:
        The bytes read without a gap.
    """
    wanted = max(min(sum(map(len, buffers)), size - offset), 0)
    step = sizes.step(wanted)
    requests: list[RangeRequest] = []
    position = offset
    for buffer in buffers:
        target = np.frombuffer(buffer, np.uint8)[: max(size - position, 0)]
        requests += [(position + start, target[start : start + step]) for start in range(0, len(target), step)]
        position += len(target)
    got = parallel_map(get, requests, sizes.parallel, "bytecheckpoint-get")
    total = 0
    for (_, target), count in zip(requests, got, strict=True):
        total += count
        if count < len(target):
            break
    return total
