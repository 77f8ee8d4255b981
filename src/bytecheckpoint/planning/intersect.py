"""Which saved boxes meet which wanted boxes: the whole of resharding (ByteCheckpoint, section 3.2).

One sweep over sorted columns serves every pair of layouts. The cost is a sort of the left boxes and one binary search
per right box; for boxes that partition their tensors along some dimension the candidates that the search leaves are
the answers themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.representation.boxes import BoxTable, Int64s

__all__ = ["Intersections", "intersect"]

# Candidate pairs looked at in one go: few enough that the temporary columns stay near the processor's cache.
_BATCH = 1 << 18
# Rows of the left table looked at in one go by the filter that precedes the sort.
_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Intersections:
    """The non-empty common boxes of two tables, sorted by (right, left).

    Attributes:
        left: shape [k]: row in the left table.
        right: shape [k]: row in the right table.
        offsets: shape [k, d]: first coordinate of the common box, in the tensor's own coordinates.
        lengths: shape [k, d]: its extent, at least 1 everywhere.
    """

    left: Int64s
    right: Int64s
    offsets: Int64s
    lengths: Int64s

    def __len__(self) -> int:
        return int(self.left.shape[0])

    def volumes(self) -> Int64s:
        """Number of elements of each common box, shape [k]."""
        # Column by column: many times quicker than a product along short rows.
        result = np.ones(len(self), np.int64)
        for k in range(self.lengths.shape[1]):
            result *= self.lengths[:, k]
        return result

    def take(self, index: Int64s | NDArray[np.bool_]) -> Intersections:
        """The pairs at `index` (positions or a mask), in that order."""
        at: Int64s = np.arange(len(self))[index] if index.dtype == np.bool_ else index.astype(np.int64, copy=False)
        return Intersections(self.left[at], self.right[at], _picked(self.offsets, at), _picked(self.lengths, at))


def intersect(left: BoxTable, right: BoxTable, *, ascending: bool = False) -> Intersections:
    """All pairs of a left and a right box of the same tensor that have elements in common.

    Boxes of either table may be empty (they meet nothing) and may overlap each other.

    Args:
        left: usually the saved boxes, the longer table.
        right: usually the wanted boxes.
        ascending: `right` is `left` itself, and only pairs whose left row number is the smaller are wanted.
    """
    width = max(left.ndim, right.ndim)
    left, right = _contiguous(left.widened(width)), _contiguous(right.widened(width))
    wanted = np.flatnonzero((right.lengths > 0).all(axis=1))
    if not len(left) or not len(wanted):
        return _concat([], width)
    hulls = _hulls(right, wanted)
    rows, codes = _near(left, hulls)
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
    """The tensors that are wanted at all, and the smallest box around what is wanted of each."""

    tensor: Int64s  # [t], ascending
    lo: Int64s  # [t, d]
    hi: Int64s  # [t, d]

    def codes(self, tensor: Int64s) -> Int64s:
        """Position of each tensor number in `self.tensor`, or the number of hulls where it is not there."""
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
    lo = _picked(right.offsets, wanted)
    hi = lo + _picked(right.lengths, wanted)
    return _Hulls(tensor[first], np.minimum.reduceat(lo, first, axis=0), np.maximum.reduceat(hi, first, axis=0))


def _near(left: BoxTable, hulls: _Hulls) -> tuple[Int64s, Int64s]:
    """Rows of `left` that meet the hull of their tensor, and the hull's position for each.

    Linear, and for one rank's wanted boxes it leaves little of a large catalog to be sorted.
    """
    rows: list[Int64s] = []
    codes: list[Int64s] = []
    # One hull more, of no extent, for tensors that nobody wants.
    none = np.zeros((1, left.ndim), np.int64)
    lo = np.concatenate([hulls.lo, none])
    hi = np.concatenate([hulls.hi, none])
    for begin in range(0, len(left), _ROWS):
        part = slice(begin, begin + _ROWS)
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

    Both coordinates are one int64 key: each tensor owns a range of keys as long as its hull's extent along its sweep
    dimension, so the keys cannot overflow before the extents themselves add up to 2**63.
    """

    rows: Int64s  # [m]: row numbers of the left table
    starts: Int64s  # [m]: keys, ascending
    reach: Int64s  # [m]: largest stop key of this row and all before it, ascending as well
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
            order = np.argsort(starts)
            rows, starts, stops = rows[order], starts[order], stops[order]
        return _Index(rows, starts, np.maximum.accumulate(stops), hulls, dim, base, in_order)

    def crowded(self) -> Int64s:
        """The rows that share some coordinate of the sweep dimension with another row; the others meet nobody."""
        meets = self.starts[1:] < self.reach[:-1]
        crowded = np.zeros(len(self.rows), np.bool_)
        crowded[1:] |= meets
        crowded[:-1] |= meets
        return self.rows[crowded]

    def windows(self, right: BoxTable, wanted: Int64s) -> tuple[Int64s, Int64s]:
        """For each wanted row the range of positions [first, last) that holds all its partners."""
        codes = self.hulls.codes(right.tensor[wanted])
        dim = self.dim[codes]
        starts = right.offsets[wanted, dim] - self.hulls.lo[codes, dim] + self.base[codes]
        stops = starts + right.lengths[wanted, dim]
        # Before `first` nothing reaches beyond the start; from `last` on everything begins at the stop or later.
        first = np.searchsorted(self.reach, starts, side="right")
        last = np.searchsorted(self.starts, stops, side="left")
        return first.astype(np.int64), np.maximum(first, last).astype(np.int64)


def _sweep_dims(left: BoxTable, rows: Int64s, codes: Int64s, hulls: _Hulls) -> Int64s:
    """For each hull the dimension along which the left boxes begin at the most different places, shape [t]."""
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
    """The pairs, in batches of bounded memory, ordered by right row and then by position in the index."""
    first, last = index.windows(right, wanted)
    ends = np.cumsum(last - first)
    begins = ends - (last - first)
    shift = first - begins
    total = int(ends[-1])
    for lo in range(0, total, _BATCH):
        hi = min(lo + _BATCH, total)
        a, b = np.searchsorted(ends, [lo, hi - 1], side="right") + [0, 1]
        repeats = np.minimum(ends[a:b], hi) - np.maximum(begins[a:b], lo)
        l_row = index.rows[np.arange(lo, hi) + np.repeat(shift[a:b], repeats)]
        r_row = np.repeat(wanted[a:b], repeats)
        if ascending:
            keep = l_row < r_row
            l_row, r_row = l_row[keep], r_row[keep]
        l_start, r_start = _picked(left.offsets, l_row), _picked(right.offsets, r_row)
        offsets = np.maximum(l_start, r_start)
        l_start += _picked(left.lengths, l_row)
        r_start += _picked(right.lengths, r_row)
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


def _picked(boxes: Int64s, rows: Int64s) -> Int64s:
    """`boxes[rows]`; indexing takes several times as long for short rows, `take` copies arrays that have strides."""
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
