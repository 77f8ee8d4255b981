"""Intersection of saved boxes with wanted boxes, which is all of resharding (ByteCheckpoint, section 3.2).

One sweep over sorted columns serves every pair of layouts. It costs a sort of the left boxes and one binary search for
each right box. When the boxes partition their tensors along some dimension, every candidate of the search is a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.tuning import tuning

__all__ = ["Intersections", "intersect"]


@dataclass(frozen=True, slots=True)
class Intersections:
    """The non-empty common boxes of two tables, sorted by (right, left).

    Attributes:
        left: row in the left table, [k].
        right: row in the right table, [k].
        offsets: first coordinate of the common box, in coordinates of the tensor, [k, d].
        lengths: extent of the common box, at least 1 in every dimension, [k, d].
    """

    left: Int64s
    right: Int64s
    offsets: Int64s
    lengths: Int64s

    def __len__(self) -> int:
        return int(self.left.shape[0])

    def volumes(self) -> Int64s:
        """Return the number of elements of each common box, [k]."""
        # By columns: many times faster than a product along short rows.
        result = np.ones(len(self), np.int64)
        for k in range(self.lengths.shape[1]):
            result *= self.lengths[:, k]
        return result

    def take(self, index: Int64s | NDArray[np.bool_]) -> Intersections:
        """Return the pairs at `index` (positions or a mask), in that order."""
        at: Int64s = np.arange(len(self))[index] if index.dtype == np.bool_ else index.astype(np.int64, copy=False)
        return Intersections(self.left[at], self.right[at], _rows_of(self.offsets, at), _rows_of(self.lengths, at))


def intersect(left: BoxTable, right: BoxTable, *, ascending: bool = False) -> Intersections:
    """Find all pairs of a left and a right box of the same tensor that have common elements.

    Boxes of either table may overlap each other and may be empty; an empty box is in no pair.

    Args:
        left: usually the saved boxes, the longer table.
        right: usually the wanted boxes.
        ascending: `right` is `left`, and only pairs with a smaller left than right row number are wanted.
    """
    width = max(left.ndim, right.ndim)
    left, right = _contiguous(left.widened(width)), _contiguous(right.widened(width))
    wanted = np.flatnonzero((right.lengths > 0).all(axis=1))
    if not len(left) or not len(wanted):
        return _concat([], width)
    hulls = _hulls(right, wanted)
    rows, codes = _filtered(left, hulls)
    if not len(rows):
        return _concat([], width)
    index = _Index.build(left, rows, codes, hulls)
    if ascending:
        wanted = np.sort(index.crowded())
        if not len(wanted):
            return _concat([], width)
    found = _concat(list(_matches(left, right, wanted, index, ascending)), width)
    return found if index.in_order else _sorted(found, len(left))


class _Hulls(NamedTuple):
    """The wanted tensors, and for each the smallest box around all wanted boxes."""

    tensor: Int64s  # [t], ascending
    lo: Int64s  # [t, d]
    hi: Int64s  # [t, d]

    def codes(self, tensor: Int64s) -> Int64s:
        """Return the position of each tensor number in `self.tensor`, the number of hulls for an absent one."""
        low, high, count = int(self.tensor[0]), int(self.tensor[-1]), len(self.tensor)
        if high - low < 16 * count + 65536:
            table = np.full(high - low + 2, count, np.int64)
            table[self.tensor - low] = np.arange(count)
            inside = (tensor >= low) & (tensor <= high)
            return table[np.where(inside, tensor - low, high - low + 1)]
        at = np.searchsorted(self.tensor, tensor)
        return np.where(self.tensor[np.minimum(at, count - 1)] == tensor, at, count)


def _hulls(right: BoxTable, wanted: Int64s) -> _Hulls:
    tensor = right.tensor[wanted]
    if (tensor[1:] < tensor[:-1]).any():
        wanted = wanted[np.argsort(tensor)]
        tensor = right.tensor[wanted]
    first = np.flatnonzero(np.diff(tensor, prepend=tensor[0] - 1))
    lo = _rows_of(right.offsets, wanted)
    hi = lo + _rows_of(right.lengths, wanted)
    return _Hulls(tensor[first], np.minimum.reduceat(lo, first, axis=0), np.maximum.reduceat(hi, first, axis=0))


def _filtered(left: BoxTable, hulls: _Hulls) -> tuple[Int64s, Int64s]:
    """Return the rows of `left` that meet the hull of their tensor, and the position of each one's hull.

    This filter takes linear time. For the wanted boxes of one rank it leaves few rows of a large catalog to sort.
    """
    rows: list[Int64s] = []
    codes: list[Int64s] = []
    # An additional, empty hull stands for tensors that are not wanted.
    none = np.zeros((1, left.ndim), np.int64)
    lo = np.concatenate([hulls.lo, none])
    hi = np.concatenate([hulls.hi, none])
    step = tuning().intersect_rows
    for begin in range(0, len(left), step):
        part = slice(begin, begin + step)
        code = hulls.codes(left.tensor[part])
        keep = code < len(hulls.tensor)
        for k in range(left.ndim):
            start, length = left.offsets[part, k], left.lengths[part, k]
            keep &= (length > 0) & (start < hi[code, k]) & (start + length > lo[code, k])
        kept = np.flatnonzero(keep)
        rows.append(kept + begin)
        codes.append(code[kept])
    return np.concatenate(rows), np.concatenate(codes)


@dataclass(frozen=True, slots=True)
class _Index:
    """Left rows sorted by (tensor, start along the tensor's sweep dimension).

    One int64 key stands for both: each tensor has a range of keys as long as the extent of its hull along its sweep
    dimension, so keys overflow only when these extents add up to 2**63.
    """

    rows: Int64s  # [m]: row numbers of the left table
    starts: Int64s  # [m]: keys, ascending
    reach: Int64s  # [m]: largest stop key of this and all earlier rows, ascending
    hulls: _Hulls
    dim: Int64s  # [t]: sweep dimension of each tensor
    base: Int64s  # [t]: first key of each tensor
    in_order: bool  # True when `rows` is ascending

    @staticmethod
    def build(left: BoxTable, rows: Int64s, codes: Int64s, hulls: _Hulls) -> _Index:
        extents = hulls.hi - hulls.lo
        dim = _sweep_dims(left, rows, codes, hulls)
        each = np.arange(len(dim))
        sweep = extents[each, dim]
        base = np.cumsum(sweep) - sweep
        assert float(np.sum(sweep, dtype=np.float64)) < 2.0**62, "extents of all tensors together exceed int64"
        chosen = int(dim[0]) if (dim == dim[0]).all() else dim[codes]
        lo = hulls.lo[each, dim]
        starts = left.offsets[rows, chosen] - lo[codes]
        stops = starts + left.lengths[rows, chosen]
        shift = base[codes]
        starts = np.maximum(starts, 0) + shift
        stops = np.minimum(stops, sweep[codes]) + shift
        in_order = bool((starts[1:] >= starts[:-1]).all())
        if not in_order:
            order = np.argsort(starts, kind="stable")  # rows of most catalogs are in sorted runs
            rows, starts, stops = rows[order], starts[order], stops[order]
        return _Index(rows, starts, np.maximum.accumulate(stops), hulls, dim, base, in_order)

    def crowded(self) -> Int64s:
        """Return the rows that share a coordinate of the sweep dimension with another row; others overlap no row."""
        meets = self.starts[1:] < self.reach[:-1]
        crowded = np.zeros(len(self.rows), np.bool_)
        crowded[1:] |= meets
        crowded[:-1] |= meets
        return self.rows[crowded]

    def windows(self, right: BoxTable, wanted: Int64s) -> tuple[Int64s, Int64s]:
        """Return for each wanted row the range of positions [first, last) that holds all its partners."""
        codes = self.hulls.codes(right.tensor[wanted])
        dim = self.dim[codes]
        starts = right.offsets[wanted, dim] - self.hulls.lo[codes, dim] + self.base[codes]
        stops = starts + right.lengths[wanted, dim]
        # Rows before `first` end at the wanted start or earlier; rows from `last` on begin at the wanted stop or later.
        first = np.searchsorted(self.reach, starts, side="right")
        last = np.searchsorted(self.starts, stops, side="left")
        return first.astype(np.int64), np.maximum(first, last).astype(np.int64)


def _sweep_dims(left: BoxTable, rows: Int64s, codes: Int64s, hulls: _Hulls) -> Int64s:
    """Return for each hull the dimension along which the left boxes have the most different starts, [t]."""
    everything = len(rows) == len(left)
    columns: dict[int, Int64s] = {}
    for k in range(left.ndim):
        column = left.offsets[:, k] if everything else left.offsets[rows, k]
        if (column > hulls.lo[:, k].max()).any() or (column > hulls.lo[codes, k]).any():
            columns[k] = column
    if len(columns) <= 1:
        return np.full(len(hulls.tensor), next(iter(columns), 0), np.int64)
    distinct = np.zeros(hulls.lo.shape, np.int64)
    for k, column in columns.items():
        extent = hulls.hi[:, k] - hulls.lo[:, k]
        base = np.cumsum(extent) - extent
        keys = np.sort(np.maximum(column - hulls.lo[codes, k], 0) + base[codes])
        fresh = np.concatenate([keys[:1], keys[1:][keys[1:] != keys[:-1]]])
        distinct[:, k] = np.diff(np.searchsorted(fresh, np.append(base, base[-1] + extent[-1])))
    return np.argmax(distinct, axis=1)


def _matches(
    left: BoxTable, right: BoxTable, wanted: Int64s, index: _Index, ascending: bool
) -> Iterator[Intersections]:
    """Yield the pairs in batches of bounded memory, sorted by right row and then by position in the index."""
    first, last = index.windows(right, wanted)
    ends = np.cumsum(last - first)
    begins = ends - (last - first)
    shift = first - begins
    total = int(ends[-1])
    step = tuning().intersect_pairs
    for lo in range(0, total, step):
        hi = min(lo + step, total)
        a, b = np.searchsorted(ends, [lo, hi - 1], side="right") + [0, 1]
        repeats = np.minimum(ends[a:b], hi) - np.maximum(begins[a:b], lo)
        l_row = index.rows[np.arange(lo, hi) + np.repeat(shift[a:b], repeats)]
        r_row = np.repeat(wanted[a:b], repeats)
        if ascending:
            keep = l_row < r_row
            l_row, r_row = l_row[keep], r_row[keep]
        l_start, r_start = _rows_of(left.offsets, l_row), _rows_of(right.offsets, r_row)
        offsets = np.maximum(l_start, r_start)
        l_start += _rows_of(left.lengths, l_row)
        r_start += _rows_of(right.lengths, r_row)
        lengths = np.minimum(l_start, r_start, out=l_start)
        lengths -= offsets
        hit = lengths[:, 0] > 0
        for k in range(1, left.ndim):
            hit &= lengths[:, k] > 0
        part = Intersections(l_row, r_row, offsets, lengths)
        if hit.all():
            yield part
        elif hit.any():
            yield part.take(hit)


def _rows_of(boxes: Int64s, rows: Int64s) -> Int64s:
    """Return `boxes[rows]`, several times faster for short rows; `boxes` must be contiguous, or `take` copies it."""
    return np.take(boxes, rows, axis=0)


def _contiguous(table: BoxTable) -> BoxTable:
    return BoxTable(table.tensor, np.ascontiguousarray(table.offsets), np.ascontiguousarray(table.lengths))


def _concat(parts: list[Intersections], width: int) -> Intersections:
    if not parts:
        none, boxes = np.zeros(0, np.int64), np.zeros((0, width), np.int64)
        return Intersections(none, none, boxes, boxes)
    return Intersections(
        np.concatenate([p.left for p in parts]),
        np.concatenate([p.right for p in parts]),
        np.concatenate([p.offsets for p in parts]),
        np.concatenate([p.lengths for p in parts]),
    )


def _sorted(found: Intersections, left_rows: int) -> Intersections:
    keys = found.right * left_rows + found.left
    return found if (keys[1:] > keys[:-1]).all() else found.take(np.argsort(keys))
