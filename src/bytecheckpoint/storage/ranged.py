"""Long reads as several requests at the same time, straight into the caller's buffers.

A connection to a store on the other side of a network carries some tens of MB/s, whatever the network could: requests
side by side are several times as fast as one. Each costs processor time on both sides, so they are not short either.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .parallel import at_the_same_time

__all__ = ["Connections", "Cut", "Piece", "fill"]

#: Connections to one place that all reads of a process share, and of which one read takes at most so many.
_ALL, _MOST = 16, 4

#: Where in the file, and the memory to fill from there on, shape [nbytes].
Piece = tuple[int, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a read is cut into requests: one connection carries only so much, and every request costs something.

    Attributes:
        parts: how many at the same time; into as many it is cut, as long as they do not become too short or too long.
        shortest: bytes of one request, but for reads that are shorter, and for the last.
        longest: the same.
    """

    parts: int
    shortest: int
    longest: int

    def step(self, nbytes: int) -> int:
        """Bytes of one request, whole MiB, for a read of `nbytes`."""
        parts = min(self.parts, max(nbytes // self.shortest, 1))
        return min(max(-(-nbytes // parts >> 20), 1) << 20, self.longest)


class Connections:
    """What the reads of a process from one place share."""

    def __init__(self) -> None:
        self._reads = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def share(self) -> Iterator[int]:
        """During a read; how many connections it may take."""
        with self._lock:
            self._reads += 1
            reads = self._reads
        try:
            yield min(max(_ALL // reads, 1), _MOST)
        finally:
            with self._lock:
                self._reads -= 1


def fill(get: Callable[[Piece], int], offset: int, buffers: Sequence[memoryview], size: int, cut: Cut) -> int:
    """Fill `buffers` one after the other from byte `offset` of a file.

    Args:
        get: fills one piece; the bytes read, fewer when the file was removed or cut meanwhile.
        offset: of the first byte.
        buffers: memory to fill.
        size: length of the file in bytes; memory for what would lie behind it is left as it is.
        cut: how to go about it.

    Returns:
        The bytes read without a gap.
    """
    wanted = max(min(sum(map(len, buffers)), size - offset), 0)
    step = cut.step(wanted)
    pieces: list[Piece] = []
    position = offset
    for buffer in buffers:
        target = np.frombuffer(buffer, np.uint8)[: max(size - position, 0)]
        pieces += [(position + start, target[start : start + step]) for start in range(0, len(target), step)]
        position += len(target)
    got = at_the_same_time(get, pieces, cut.parts, "bytecheckpoint-get")
    total = 0
    for (_, target), count in zip(pieces, got, strict=True):
        total += count
        if count < len(target):
            break
    return total
