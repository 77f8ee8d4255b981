"""Checksums: xxh3_64 of each block of a file's data section. A reader verifies each block as it reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "MAX_BLOCK_BYTES",
    "MIN_BLOCK_BYTES",
    "RunningSum",
    "block_bytes",
    "block_count",
    "block_sum",
    "block_sums",
    "is_block_size",
]

MIN_BLOCK_BYTES: Final = 64 * 1024
MAX_BLOCK_BYTES: Final = 1024 * 1024
_BLOCKS_PER_FILE = 2048


def block_bytes(data_length: int) -> int:
    """Return the block size for a data section of `data_length` bytes: a power of two from 64 KiB to 1 MiB.

    A file has about 2048 blocks. Small blocks allow exact reads of small files; large blocks keep the catalog small.
    """
    wanted = -(-data_length // _BLOCKS_PER_FILE)
    power: int = 1 << max(wanted - 1, 0).bit_length()
    return min(max(power, MIN_BLOCK_BYTES), MAX_BLOCK_BYTES)


def is_block_size(nbytes: int) -> bool:
    """Return whether a file may have blocks of this size, so that a reader of whole blocks needs little memory."""
    return 4096 <= nbytes <= MAX_BLOCK_BYTES and not nbytes & (nbytes - 1)


def block_count(data_length: int, block_bytes: int) -> int:
    """Return the number of blocks of a data section; the last block may be short."""
    return -(-data_length // block_bytes)


def block_sum(buffer: Buffer) -> int:
    """Return the xxh3_64 (seed 0) of all bytes of `buffer`, an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(buffer)


def block_sums(buffer: Buffer, block_bytes: int) -> NDArray[np.uint64]:
    """Return the sum of each block of a contiguous `buffer`, which starts at a block boundary, uint64 [blocks]."""
    view = memoryview(buffer).cast("B")
    return np.fromiter(
        (xxhash.xxh3_64_intdigest(view[start : start + block_bytes]) for start in range(0, len(view), block_bytes)),
        np.uint64,
        block_count(len(view), block_bytes),
    )


class RunningSum:
    """The sum of one block whose bytes arrive in several buffers."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def update(self, buffer: Buffer) -> None:
        """Add the next bytes of the block."""
        self._hash.update(buffer)

    def value(self) -> int:
        """Return the sum of all bytes added since the last reset."""
        return self._hash.intdigest()

    def reset(self) -> None:
        """Start the next block."""
        self._hash.reset()
