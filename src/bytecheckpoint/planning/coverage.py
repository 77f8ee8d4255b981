"""Proof that every wanted element is filled exactly once (no overlap among sources, no gap in destinations)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.planning.intersect import Intersections, intersect
from bytecheckpoint.representation.boxes import BoxTable, Int64s

__all__ = ["first_gap", "missing_volume", "not_tiled", "overlapping"]

Box = tuple[tuple[int, ...], tuple[int, ...]]


def overlapping(table: BoxTable) -> Intersections:
    """The pairs of boxes of one table that have elements in common, each once, with `left` < `right`."""
    if (table.tensor[1:] > table.tensor[:-1]).all():
        table = table.take(np.zeros(0, np.int64))  # one box for each tensor
    return intersect(table, table, ascending=True)


def missing_volume(wanted: BoxTable, found: Intersections) -> Int64s:
    """Number of elements of each wanted box that no found box covers, shape [n].

    Args:
        wanted: the right table of `found`.
        found: its intersections with boxes that do not overlap each other.
    """
    sums = np.concatenate([[0], np.cumsum(found.volumes())])
    bounds = np.searchsorted(found.right, np.arange(len(wanted) + 1))
    covered: Int64s = sums[bounds[1:]] - sums[bounds[:-1]]
    return wanted.volumes() - covered


def not_tiled(shapes: Int64s, boxes: BoxTable) -> Int64s:
    """The tensors whose boxes do not fill them exactly once each element, ascending.

    Linear, without sorting: every coordinate of a dimension has a random weight, an element the product of its
    coordinates' weights, a box the sum of its elements'. Boxes that tile a tensor weigh as much as it; others do by a
    chance of about 2 ** -55 (they would have to be a root of a polynomial in the weights).

    Args:
        shapes: shape [t, d]: of each tensor, padded with 1.
        boxes: `boxes.tensor` numbers `shapes`; every box lies inside its tensor.
    """
    weight = np.ones(len(boxes), np.uint64)
    whole = np.ones(len(shapes), np.uint64)
    for k in range(boxes.ndim):
        origin = _upto(np.zeros(1, np.int64), k)
        weight *= _upto(boxes.offsets[:, k] + boxes.lengths[:, k], k) - _upto(boxes.offsets[:, k], k)
        whole *= _upto(shapes[:, k], k) - origin
    found = np.zeros(len(shapes), np.uint64)
    np.add.at(found, boxes.tensor, weight)
    return np.flatnonzero(found != whole)


def _upto(coordinate: Int64s, dim: int) -> NDArray[np.uint64]:
    """Sum of the weights of all coordinates below, but for a constant: a random number (splitmix64), modulo 2 ** 64."""
    x = coordinate.astype(np.uint64)
    x += np.uint64(dim << 56)
    x *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def first_gap(
    wanted_offsets: Sequence[int] | Int64s,
    wanted_lengths: Sequence[int] | Int64s,
    found_offsets: Int64s,
    found_lengths: Int64s,
) -> Box | None:
    """One box within the wanted box that the found boxes leave uncovered, for an error message.

    It cannot be enlarged in any direction. None when the found boxes, which may overlap, cover everything.

    Args:
        wanted_offsets: shape [d].
        wanted_lengths: shape [d].
        found_offsets: shape [k, d].
        found_lengths: shape [k, d].

    Returns:
        (offsets, lengths) of the gap, in the same coordinates.
    """
    lo = np.asarray(wanted_offsets, np.int64)
    hi = lo + np.asarray(wanted_lengths, np.int64)
    real = (found_lengths > 0).all(axis=1)
    starts, stops = found_offsets[real], found_offsets[real] + found_lengths[real]
    todo = [(lo, hi, np.arange(len(starts)))] if (lo < hi).all() else []
    while todo:
        a, b, near = todo.pop()
        near = near[((starts[near] < b) & (stops[near] > a)).all(axis=1)]
        if not len(near):
            return _grown(a, b, lo, hi, starts, stops)
        # The middle one of the boxes halves the rest in the ordinary case, boxes sorted along one dimension.
        pivot = near[len(near) // 2]
        inner_a, inner_b = np.maximum(a, starts[pivot]), np.minimum(b, stops[pivot])
        rest: list[tuple[Int64s, Int64s, Int64s]] = []
        a, b = a.copy(), b.copy()
        for k in range(len(a)):
            if a[k] < inner_a[k]:
                before = b.copy()
                before[k] = inner_a[k]
                rest.append((a.copy(), before, near))
            if inner_b[k] < b[k]:
                after = a.copy()
                after[k] = inner_b[k]
                rest.append((after, b.copy(), near))
            a[k], b[k] = inner_a[k], inner_b[k]
        todo.extend(reversed(rest))
    return None


def _grown(a: Int64s, b: Int64s, lo: Int64s, hi: Int64s, starts: Int64s, stops: Int64s) -> Box:
    """The free box [a, b) stretched within [lo, hi) as far as the occupied boxes let it, one dimension at a time."""
    a, b = a.copy(), b.copy()
    for k in range(len(a)):
        beside = (starts < b) & (stops > a)
        beside[:, k] = True
        blocking = beside.all(axis=1)
        before = stops[blocking & (stops[:, k] <= a[k]), k]
        after = starts[blocking & (starts[:, k] >= b[k]), k]
        a[k] = max(int(lo[k]), int(before.max(initial=lo[k])))
        b[k] = min(int(hi[k]), int(after.min(initial=hi[k])))
    return tuple(a.tolist()), tuple((b - a).tolist())
