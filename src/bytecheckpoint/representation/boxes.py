"""Tables of boxes as columns, on which all planning works (ByteCheckpoint, section 3.2: nD_offsets, nD_lengths)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BoxTable", "Int64s", "Mask", "is_one_run", "row_major", "row_major_of", "widened"]

Int64s = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BoxTable:
    """A table of `n` boxes of up to `d` dimensions, each of a numbered tensor.

    Boxes of fewer dimensions are padded on the right with offset 0 and length 1, which changes neither volumes nor
    intersections nor row-major order. All lengths of the box of a 0-dimensional tensor are 1.

    Attributes:
        tensor: number of the tensor that each box belongs to, int64 [n].
        offsets: first coordinate of each box, int64 [n, d].
        lengths: extent of each box, int64 [n, d].
    """

    tensor: Int64s
    offsets: Int64s
    lengths: Int64s

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    @property
    def ndim(self) -> int:
        """Number of columns `d`, the largest number of dimensions."""
        return int(self.offsets.shape[1])

    def volumes(self) -> Int64s:
        """Return the number of elements of each box, shape [n]."""
        volumes = self.lengths[:, 0].copy()  # by columns: a reduction over short rows takes three times as long
        for k in range(1, self.ndim):
            volumes *= self.lengths[:, k]
        return volumes

    def take(self, index: Int64s | NDArray[np.bool_]) -> BoxTable:
        """Return the boxes at `index` (positions or a mask), in that order."""
        return BoxTable(self.tensor[index], self.offsets[index], self.lengths[index])

    def widened(self, ndim: int) -> BoxTable:
        """Return the same boxes padded to `ndim` columns, at least as many as the table has."""
        if ndim == self.ndim:
            return self
        return BoxTable(self.tensor, widened(self.offsets, ndim, 0), widened(self.lengths, ndim, 1))

    @staticmethod
    def build(
        tensor: Sequence[int], offsets: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]], ndim: int = 0
    ) -> BoxTable:
        """Build a table of at least `ndim` columns from Python sequences of different lengths."""
        count = len(tensor)
        dims = np.fromiter(map(len, lengths), np.int64, count)
        width = max(int(dims.max(initial=0)), ndim, 1)
        mask = np.arange(width) < dims[:, None]
        off = np.zeros((count, width), np.int64)
        length = np.ones((count, width), np.int64)
        total = int(dims.sum())
        off[mask] = np.fromiter((x for row in offsets for x in row), np.int64, total)
        length[mask] = np.fromiter((x for row in lengths for x in row), np.int64, total)
        return BoxTable(np.asarray(tensor, np.int64).reshape(count), off, length)

    @staticmethod
    def concat(tables: Sequence[BoxTable]) -> BoxTable:
        """Return all boxes of `tables`, one table after the other."""
        if not tables:
            return BoxTable(np.zeros(0, np.int64), np.zeros((0, 1), np.int64), np.ones((0, 1), np.int64))
        width = max(t.ndim for t in tables)
        wide = [t.widened(width) for t in tables]
        return BoxTable(
            np.concatenate([t.tensor for t in wide]),
            np.concatenate([t.offsets for t in wide]),
            np.concatenate([t.lengths for t in wide]),
        )


def widened(columns: Int64s, ndim: int, value: int) -> Int64s:
    """Return columns of dimensions, padded on the right to `ndim` with a value."""
    return np.pad(columns, ((0, 0), (0, ndim - columns.shape[1])), constant_values=value)


def row_major(lengths: Int64s) -> Int64s:
    """Return the strides of boxes whose elements follow each other, in elements, int64 [n, d]."""
    strides = np.ones_like(lengths)
    if lengths.shape[1] > 1:
        strides[:, :-1] = np.cumprod(lengths[:, :0:-1], axis=1)[:, ::-1]
    return strides


def is_one_run(lengths: Int64s, strides: Int64s) -> Mask:
    """Return whether the elements of boxes follow each other, [n], given their extents and strides, [n, d]."""
    runs: Mask = ((lengths == 1) | (strides == row_major(lengths))).all(axis=1)
    return runs


def row_major_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of one box whose elements follow each other, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
