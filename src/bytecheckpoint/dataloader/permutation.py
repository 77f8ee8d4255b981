"""Compute random orders of `range(n)` place by place, without a list of n numbers.

A keyed Feistel network is a bijection for any round function (M. Luby, C. Rackoff, "How to construct pseudorandom
permutations"). Its halves are numbers below `rows` and `columns`, with rows * columns just above n (J. Black, P. Rogaway,
"Ciphers with arbitrary finite domains"). A result of at least n is put through the network again, until it is below n.

Saved checkpoints rely on these orders: nothing here may change, and nothing may depend on a generator of numpy.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.errors import UsageError

__all__ = ["MAX_LENGTH", "Permutation", "order_key", "order_of"]

#: Longest order. Above it, the multiplication that brings a hash below `rows` would prefer some numbers.
MAX_LENGTH: Final = 1 << 40

#: Longest order that is computed as a whole. Many streams read such a one, each of them a few of its places.
_SHORT: Final = 1024

_ROUNDS = 12  # with 8, orders of five or six numbers are measurably uneven
# SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators").
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = (np.uint64(bits) for bits in (30, 27, 31, 32))


def order_key(seed: int, epoch: int, name: str) -> int:
    """Return the 64-bit key of the order of one source in one epoch."""
    return xxhash.xxh3_64_intdigest(f"{seed}\0{epoch}\0{name}".encode("utf-8", "surrogatepass"))


@functools.lru_cache(256)
def order_of(length: int, key: int) -> Permutation:
    """Return the order of a length and a key, the one that was made before if it is not long ago."""
    return Permutation(length, key)


class Permutation:
    """A random order of `range(length)`, equal for equal keys in all versions.

    Args:
        length: number of numbers, at most 2**40.
        key: 64-bit number, by `order_key`.

    Raises:
        UsageError: the length is negative or above 2**40.
    """

    __slots__ = ("_columns", "_keys", "_length", "_rows", "_whole")

    def __init__(self, length: int, key: int) -> None:
        if not 0 <= length <= MAX_LENGTH:
            raise UsageError(f"cannot order {length} documents: between 0 and 2**40 are possible")
        self._length = np.uint64(length)
        rows = math.isqrt(max(length - 1, 0)) + 1
        columns = -(-length // rows)
        columns += columns & 1  # if both were odd, every turn would be an even permutation
        self._rows, self._columns = np.uint64(rows), np.uint64(columns)
        self._whole: NDArray[np.int64] | None = None
        self._keys = _mix(np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GAMMA + np.uint64(key))

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers at `places` of the order, each below the length; int64 [places] both."""
        if self._length > _SHORT:
            return self._computed(places)
        if self._whole is None:
            self._whole = self._computed(np.arange(int(self._length)))
        return self._whole[places]

    def _computed(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        found = self._pass(places.astype(np.uint64))
        while (outside := np.flatnonzero(found >= self._length)).size:
            found[outside] = self._pass(found[outside])
        return found.astype(np.int64)

    def _pass(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        columns, rows = np.divmod(numbers, self._rows)
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            rows = _turn(rows, columns + even, self._rows)
            columns = _turn(columns, rows + odd, self._columns)
        return columns * self._rows + rows


def _turn(half: NDArray[np.uint64], other: NDArray[np.uint64], length: np.uint64) -> NDArray[np.uint64]:
    """Add a hash of `other` to `half`, modulo `length`."""
    half = half + (((_mix(other) >> _32) * length) >> _32)
    # Where `half` is below the length, the difference wraps to a huge number.
    turned: NDArray[np.uint64] = np.minimum(half, half - length)
    return turned


def _mix(numbers: Any) -> Any:
    """Return the SplitMix64 hash of each number; uint64 [numbers] both."""
    numbers = (numbers ^ (numbers >> _30)) * _MULTIPLIERS[0]
    numbers = (numbers ^ (numbers >> _27)) * _MULTIPLIERS[1]
    return numbers ^ (numbers >> _31)
