"""Long reads as several requests at the same time, straight into the caller's buffers.

A connection to a store on the other side of a network carries some tens of MB/s, whatever the network could: many short
requests side by side are several times as fast as one. Beside a store on the same machine the network is memory, and each
request costs processor time that the reader lacks: few long ones are best. How the last ones went tells which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .parallel import at_the_same_time

__all__ = ["Cut", "Piece", "fill"]

#: Where in the file, and the memory to fill from there on, shape [nbytes].
Piece = tuple[int, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a read is cut into requests: one connection carries only so much, and every request costs something.

    Attributes:
        parts: into how many, as long as they do not become too short or too long.
        shortest: bytes of one request, but for the last.
        longest: the same.
        threads: requests at the same time.
    """

    parts: int
    shortest: int
    longest: int
    threads: int

    def step(self, nbytes: int) -> int:
        """Bytes of one request, whole MiB, for a read of `nbytes`."""
        return min(max(-(-nbytes // self.parts >> 20) << 20, self.shortest), self.longest)


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
    got = at_the_same_time(get, pieces, cut.threads, "bytecheckpoint-get")
    total = 0
    for (_, target), count in zip(pieces, got, strict=True):
        total += count
        if count < len(target):
            break
    return total
