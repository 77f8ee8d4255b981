"""Fingerprints of tensors: sums over coordinates and values, so that those of boxes that tile a tensor add up to its own.

A tensor is a matrix here: the bytes of its last dimensions, merged until they have at least 512 bytes, are a *row*; the
other dimensions number the rows. A row consists of words of 8 bytes, little-endian, zeros at its end. P(x, j) and Q(x, j)
are products of one pseudo-random odd 64-bit weight for each outer coordinate in x, for j // 1024 and for j % 1024. Then a
fingerprint is

    (sum of P(x, j) * word(x, j),  sum of Q(x, j) * (word(x, j) // 2**32))    modulo 2**64

over all words j of all rows x (docs/format.md, section 3.6). Both are linear in the words: that is why any cut of a tensor
into boxes, and of a box into runs of bytes, gives the same sums. The products make a sum over a matrix two products of a
matrix and a vector, which read each byte twice and compute no hash for each element.

What it misses: a change inside one word, so of one element of at most 8 bytes, changes the first sum for sure, since the
weight is odd. Changes of several words that do not depend on the weights cancel out with a chance of about 2**-64, and of
2**-26 in the worst case: the signs of four float32 at the corners of a rectangle. This is no protection against somebody
who chooses the changes by the weights.

This module must not import torch: the helper process uses it.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import SHARED, VALUES_SLOT, Catalog
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.names import is_of_values
from bytecheckpoint.representation.shards import TensorKey

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "BoxSums",
    "FileBoxSums",
    "Fingerprint",
    "StoredBox",
    "Sums",
    "change_sums",
    "mixed",
    "row_dims",
    "shared_tensors",
    "stored_fingerprint",
    "weights",
]

#: The two sums of a tensor or of a part of it, uint64 [2].
Sums = NDArray[np.uint64]

_WORD: Final = 8
_ROW_BYTES: Final = 512  # rows of fewer bytes would cost more than their words
_BLOCK_WORDS: Final = 1024
_BLOCK: Final = _WORD * _BLOCK_WORDS
_PIECE: Final = 1 << 20  # bytes that stay in a processor's cache between the two products
_CACHED: Final = 1 << 16
#: Dimensions of the weights: those of tensors are 0 to 63.
_HIGH, _LOW = 64, 65


def row_dims(shape: Sequence[int], itemsize: int) -> int:
    """Return the number of leading dimensions that number the rows of a tensor; the others are merged to rows."""
    nbytes, outer = itemsize, len(shape)
    while outer and (nbytes < _ROW_BYTES or outer == len(shape)):
        outer -= 1
        nbytes *= shape[outer]
    return outer


def weights(dim: int, begin: int, end: int) -> NDArray[np.uint64]:
    """Return the weights P and Q of the coordinates `begin` to `end` of a dimension, odd, uint64 [2, end - begin]."""
    if end <= _CACHED:
        return _first_weights(dim, 1 << max(end - 1, 0).bit_length())[:, begin:end]
    return _weights_of(dim, begin, end)


@functools.lru_cache(maxsize=512)
def _first_weights(dim: int, count: int) -> NDArray[np.uint64]:
    return _weights_of(dim, 0, count)


def _weights_of(dim: int, begin: int, end: int) -> NDArray[np.uint64]:
    streams = (np.arange(2, dtype=np.uint64) + np.uint64(2 * dim + 1)) << np.uint64(40)
    return mixed(np.arange(begin, end, dtype=np.uint64) + streams[:, None]) | np.uint64(1)


def mixed(counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the pseudo-random numbers of some counters, uint64 of the same shape (SplitMix64; Steele et al., 2014)."""
    x = counters * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    return x ^ (x >> np.uint64(31))


class BoxSums:
    """Sums of the bytes of one box of a tensor, which come in any order and any pieces.

    Args:
        shape: global shape of the tensor.
        itemsize: bytes of an element.
        offsets: first coordinates of the box.
        lengths: extent of the box.
    """

    def __init__(self, shape: Sequence[int], itemsize: int, offsets: Sequence[int], lengths: Sequence[int]) -> None:
        outer = row_dims(shape, itemsize)
        # Along which dimensions a run of the box's bytes is a part of a row: all behind it are whole.
        cut = next((k for k in range(len(shape) - 1, outer, -1) if lengths[k] != shape[k]), outer)
        steps = [itemsize * math.prod(shape[k + 1 :]) for k in range(len(shape))]
        self._outer, self._dims = outer, cut
        self._offsets, self._lengths = list(offsets), list(lengths)
        self._steps = steps
        # Bytes that lie side by side in a row, and the place of the first in its row.
        self._run = math.prod(lengths[cut:]) * itemsize
        self._begin = sum(offset * step for offset, step in zip(offsets[outer:], steps[outer:], strict=True))

    def of(self, start: int, data: Buffer) -> Sums:
        """Return the sums of some bytes of the box.

        Args:
            start: place of the first of them in the box, whose bytes are in row-major order.
            data: the bytes.
        """
        found = np.frombuffer(data, np.uint8)
        total = np.zeros(2, np.uint64)
        while len(found):
            run, inside = divmod(start, self._run)
            if inside or len(found) < self._run:
                count, rows = min(self._run - inside, len(found)), 1
            else:
                count, rows = self._run, len(found) // self._run
            for first, some, weight, begin in self._runs(run, rows):
                matrix = found[first * count : (first + some) * count].reshape(some, count)
                total += _sums_of(matrix, weight, begin + inside)
            start, found = start + rows * count, found[rows * count :]
        return total

    def _runs(self, run: int, count: int) -> Sequence[tuple[int, int, NDArray[np.uint64], int]]:
        """Return for some runs: the first of them, their number, weights of their rows [2, runs], first byte in the row."""
        outer, dims = self._outer, self._dims
        if dims == outer:
            return [(0, count, self._row_weights(np.arange(run, run + count)), self._begin)]
        # The box cuts dimensions inside of rows, so runs begin at different places of theirs.
        inner = math.prod(self._lengths[outer:dims])
        numbers = np.arange(run, run + count)
        places = np.full(count, self._begin)
        rest = numbers % inner
        for k in range(dims - 1, outer - 1, -1):
            rest, at = np.divmod(rest, self._lengths[k])
            places += at * self._steps[k]
        weight = self._row_weights(numbers // inner)
        return [(n, 1, weight[:, n : n + 1], place) for n, place in enumerate(places.tolist())]

    def _row_weights(self, rows: Int64s) -> NDArray[np.uint64]:
        """Return the weights of some of the box's rows, uint64 [2, rows]."""
        found = np.ones((2, len(rows)), np.uint64)
        for k in range(self._outer - 1, -1, -1):
            rows, at = np.divmod(rows, self._lengths[k]) if k else (rows, rows)
            low, high = int(at.min()), int(at.max()) + 1
            found *= weights(k, self._offsets[k] + low, self._offsets[k] + high)[:, at - low]
        return found


def _sums_of(matrix: NDArray[np.uint8], weight: NDArray[np.uint64], begin: int) -> Sums:
    """Return the sums of equal parts of some rows.

    Args:
        matrix: bytes of the parts, uint8 [rows, bytes].
        weight: weights of the rows, uint64 [2, rows].
        begin: place of the parts in their rows.
    """
    total, end = np.zeros(2, np.uint64), begin + matrix.shape[1]
    if begin % _WORD or end % _WORD or matrix.ctypes.data % _WORD:
        padded = np.zeros((len(matrix), -(-end // _WORD) * _WORD - begin // _WORD * _WORD), np.uint8)
        padded[:, begin % _WORD : begin % _WORD + matrix.shape[1]] = matrix
        matrix, begin = padded, begin // _WORD * _WORD
        end = begin + matrix.shape[1]
    words = matrix.view(np.uint64)
    # First the rest of a block of words, then whole blocks, then the beginning of one.
    borders = sorted({begin, min(-(-begin // _BLOCK) * _BLOCK, end), max(end // _BLOCK * _BLOCK, begin), end})
    for first, last in itertools.pairwise(borders):
        part = words[:, (first - begin) // _WORD : (last - begin) // _WORD]
        blocks = max((last - first) // _BLOCK, 1)
        high = weights(_HIGH, first // _BLOCK, first // _BLOCK + blocks)
        low = weights(_LOW, 0, _BLOCK_WORDS)[:, first % _BLOCK // _WORD :][:, : part.shape[1] // blocks]
        rows, each = part.reshape(len(part), blocks, -1), weight[:, :, None] * high[:, None, :]
        if len(part) > blocks:
            rows, each = rows.swapaxes(0, 1), each.swapaxes(1, 2)
        for k in range(len(rows)):
            total += _weighted(rows[k], each[:, k], low)
    return total


def _weighted(rows: NDArray[np.uint64], weight: NDArray[np.uint64], low: NDArray[np.uint64]) -> Sums:
    """Return both sums of words [rows, words] with the weights [2, rows] and [2, words]."""
    sums = np.zeros_like(low)
    step = max(_PIECE // max(rows.shape[1] * _WORD, 1), 1)
    upper = np.empty((min(step, len(rows)), rows.shape[1]), np.uint64)
    for at in range(0, len(rows), step):
        piece = rows[at : at + step]
        sums[0] += np.einsum("r,rc->c", weight[0, at : at + step], piece)
        shifted = np.right_shift(piece, np.uint64(32), out=upper[: len(piece)])
        sums[1] += np.einsum("r,rc->c", weight[1, at : at + step], shifted)
    return np.asarray((sums * low).sum(axis=1), np.uint64)


def change_sums(
    shape: Sequence[int],
    itemsize: int,
    places: Int64s,
    old: NDArray[np.unsignedinteger],
    new: NDArray[np.unsignedinteger],
) -> Sums:
    """Return by how much some changes change the sums of a tensor.

    Args:
        shape: global shape of the tensor.
        itemsize: bytes of an element.
        places: first byte of each change in the tensor, whose bytes are in row-major order, int64 [n].
        old: elements before, or halves of elements of 8 bytes, unsigned integers of at most 4 bytes, [n].
        new: elements now.
    """
    outer = row_dims(shape, itemsize)
    row_bytes = itemsize * math.prod(shape[outer:])
    row = places // row_bytes
    inside = places - row * row_bytes
    first, second = _word_weights(-(-row_bytes // _WORD))
    word = inside >> 3
    bits = ((inside & 7) << 3).astype(np.uint64)
    change = new.astype(np.uint64) - old.astype(np.uint64)
    in_upper = bits >= 32
    upper = (change * in_upper) << (bits - (in_upper.astype(np.uint64) << np.uint64(5)))
    sums = np.stack([first[word] * (change << bits), second[word] * upper])
    begins = np.flatnonzero(np.diff(row, prepend=-1))
    sums, row = np.add.reduceat(sums, begins, axis=1), row[begins]
    for k in range(outer - 1, -1, -1):
        row, at = np.divmod(row, shape[k]) if k else (row, row)
        low = int(at.min(initial=0))
        sums *= weights(k, low, int(at.max(initial=0)) + 1)[:, at - low]
    return np.asarray(sums.sum(axis=1), np.uint64)


@functools.lru_cache(maxsize=64)
def _word_weights(count: int) -> NDArray[np.uint64]:
    """Return the weights of the first words of a row, uint64 [2, count]."""
    high = weights(_HIGH, 0, -(-count // _BLOCK_WORDS))
    return (high[:, :, None] * weights(_LOW, 0, _BLOCK_WORDS)[:, None, :]).reshape(2, -1)[:, :count].copy()


class StoredBox(msgspec.Struct, frozen=True, array_like=True):
    """A box in the data section of a file.

    Attributes:
        start: first byte in the data section.
        nbytes: length.
        itemsize: bytes of an element.
        shape: global shape of the tensor.
        offsets: first coordinates of the box.
        lengths: extent of the box.
    """

    start: int
    nbytes: int
    itemsize: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class FileBoxSums:
    """Sums of the boxes of one file, whose bytes come in any order, from several threads.

    Args:
        boxes: boxes of the file, by their place.

    Attributes:
        sums: sums of each box so far, uint64 [boxes, 2].
    """

    def __init__(self, boxes: Sequence[StoredBox]) -> None:
        self._boxes = boxes
        self._starts = np.array([box.start for box in boxes], np.int64)
        self._lock = threading.Lock()
        self.sums: NDArray[np.uint64] = np.zeros((len(boxes), 2), np.uint64)

    def add(self, start: int, buffers: Sequence[memoryview]) -> None:
        """Add bytes of the data section, from byte `start` on."""
        for buffer in buffers if len(self._boxes) else ():
            end = start + len(buffer)
            first = max(int(np.searchsorted(self._starts, start, "right")) - 1, 0)
            for number in range(first, int(np.searchsorted(self._starts, end))):
                box = self._boxes[number]
                low, high = max(start, box.start), min(end, box.start + box.nbytes)
                if low < high:
                    sums = BoxSums(box.shape, box.itemsize, box.offsets, box.lengths)
                    found = sums.of(low - box.start, buffer[low - start : high - start])
                    with self._lock:
                        self.sums[number] += found
            start = end


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprints of states and of their tensors, 32 hexadecimal digits each.

    Two are equal if they have the same states, and these tensors of the same names, dtypes, shapes and bits.

    Attributes:
        states: fingerprint of each state.
        tensors: fingerprint of each tensor, by its key.
        nbytes: bytes of all tensors.
    """

    states: Mapping[str, str]
    tensors: Mapping[str, str] = field(compare=False)
    nbytes: int = field(compare=False)

    @staticmethod
    def of(tensors: Iterable[tuple[TensorKey, str, tuple[int, ...], Sequence[int]]]) -> Fingerprint:
        """Return the fingerprint of tensors: key, dtype, global shape and sums of each."""
        lines: dict[str, list[str]] = {}
        each, nbytes = {}, 0
        for key, dtype, shape, sums in tensors:
            name = str(key)
            each[name] = f"{sums[0]:016x}{sums[1]:016x}"
            inside = name.removeprefix(f"{key.state}/")
            lines.setdefault(key.state, []).append(f"{inside} {dtype} {list(shape)} {each[name]}\n")
            nbytes += math.prod(shape) * itemsize(dtype)
        texts = {state: "".join(sorted(found)).encode("utf-8", "surrogatepass") for state, found in lines.items()}
        return Fingerprint({state: xxhash.xxh3_128_hexdigest(text) for state, text in texts.items()}, each, nbytes)


def stored_fingerprint(catalog: Catalog) -> Fingerprint | None:
    """Return the fingerprint that a catalog holds; None if the save made none."""
    if catalog.fingerprints is None:
        return None
    sums = catalog.fingerprints.tolist()
    return Fingerprint.of(
        (catalog.key(n), catalog.dtype[n], catalog.shape(n), sums[n]) for n in shared_tensors(catalog)
    )


def shared_tensors(catalog: Catalog) -> list[int]:
    """Return the numbers of the tensors that have fingerprints: those of modules, of optimizers and of other programs."""
    if catalog.fingerprints is not None:
        return list(range(len(catalog.fingerprints)))
    in_values = np.array([is_of_values(f.name) for f in catalog.files], bool)
    chosen = (catalog.owner == SHARED) & (catalog.slot.codes != catalog.slot.code_of(VALUES_SLOT))
    chosen[catalog.boxes.tensor[in_values[catalog.file]]] = False
    return np.flatnonzero(chosen).tolist()
