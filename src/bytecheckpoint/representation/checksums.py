"""Checksums: xxh3_64 of each block of a file's data section, so that any part can be verified as it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MAX_BLOCK_BYTES", "MIN_BLOCK_BYTES", "RunningSum", "block_bytes", "block_count", "block_sum", "block_sums"]

MIN_BLOCK_BYTES: Final = 64 * 1024
MAX_BLOCK_BYTES: Final = 1024 * 1024
_BLOCKS_PER_FILE = 1024


def block_bytes(data_length: int) -> int:
    """Block size for a data section of `data_length` bytes: a power of two, about a 1024th, 64 KiB to 1 MiB.

    Small blocks let a slice of a small file be read and verified precisely; large ones keep the catalog small.
    """
    wanted = -(-data_length // _BLOCKS_PER_FILE)
    power: int = 1 << max(wanted - 1, 0).bit_length()
    return min(max(power, MIN_BLOCK_BYTES), MAX_BLOCK_BYTES)


def block_count(data_length: int, block_bytes: int) -> int:
    """Number of blocks of a data section; the last may be short, and no bytes are no block."""
    return -(-data_length // block_bytes)


def block_sum(buffer: Buffer) -> int:
    """The xxh3_64 (seed 0) of all bytes of `buffer`, as an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(buffer)


def block_sums(buffer: Buffer, block_bytes: int) -> NDArray[np.uint64]:
    """The sum of each block of a contiguous `buffer` that starts at a block boundary, shape [blocks], uint64."""
    view = memoryview(buffer).cast("B")
    return np.fromiter(
        (xxhash.xxh3_64_intdigest(view[start : start + block_bytes]) for start in range(0, len(view), block_bytes)),
        np.uint64,
        block_count(len(view), block_bytes),
    )


class RunningSum:
    """The sum of one block whose bytes come in pieces."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def update(self, buffer: Buffer) -> None:
        """Add the next bytes of the block."""
        self._hash.update(buffer)

    def value(self) -> int:
        """The sum of the bytes so far."""
        return self._hash.intdigest()

    def reset(self) -> None:
        """Start the next block."""
        self._hash.reset()
