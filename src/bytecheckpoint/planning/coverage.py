"""Proof that every wanted element is filled exactly once: no overlap among sources, no gap in destinations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.planning.intersect import Intersections, intersect
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.fingerprints import mixed

__all__ = ["box_weights", "first_gap", "missing_volume", "not_tiled", "overlapping"]

Box = tuple[tuple[int, ...], tuple[int, ...]]


def overlapping(table: BoxTable) -> Intersections:
    """Return the pairs of boxes of one table that have common elements, each pair once with `left` < `right`."""
    if (table.tensor[1:] > table.tensor[:-1]).all():
        table = table.take(np.zeros(0, np.int64))  # no tensor has two boxes
    return intersect(table, table, ascending=True)


def missing_volume(wanted: BoxTable, found: Intersections) -> Int64s:
    """Return the number of elements of each wanted box that no found box covers, [n].

    Args:
        wanted: the wanted boxes, the right table of `found`.
        found: intersections of the wanted boxes with boxes that do not overlap each other.
    """
    sums = np.concatenate([[0], np.cumsum(found.volumes())])
    bounds = np.searchsorted(found.right, np.arange(len(wanted) + 1))
    covered: Int64s = sums[bounds[1:]] - sums[bounds[:-1]]
    return wanted.volumes() - covered


def not_tiled(shapes: Int64s, boxes: BoxTable, others: NDArray[np.uint64] | None = None) -> Int64s:
    """Return the tensors whose boxes do not cover each element exactly once, ascending.

    The test takes linear time. Every coordinate of a dimension has a random weight. The weight of an element is the
    product of its coordinates' weights, the weight of a box the sum of its elements' weights. Boxes that tile a tensor
    weigh as much as the tensor. Other boxes have that weight with a probability of about 2 ** -55, since the weights
    would have to be a root of a polynomial.

    Args:
        shapes: shape of each tensor, padded with 1, [t, d].
        boxes: boxes, each inside its tensor; `boxes.tensor` numbers the rows of `shapes`.
        others: weight of further boxes of each tensor, uint64 [t].
    """
    found = np.zeros(len(shapes), np.uint64) if others is None else others.copy()
    np.add.at(found, boxes.tensor, box_weights(boxes))
    whole = BoxTable(np.arange(len(shapes)), np.zeros_like(shapes), shapes)
    return np.flatnonzero(found != box_weights(whole))


def box_weights(boxes: BoxTable) -> NDArray[np.uint64]:
    """Return the sum of the weights of each box's elements, as `not_tiled` describes them, modulo 2 ** 64, [n]."""
    weight = np.ones(len(boxes), np.uint64)
    for k in range(boxes.ndim):
        weight *= _weight_below(boxes.offsets[:, k] + boxes.lengths[:, k], k) - _weight_below(boxes.offsets[:, k], k)
    return weight


def _weight_below(coordinate: Int64s, dim: int) -> NDArray[np.uint64]:
    """Return the sum of the weights of all smaller coordinates, up to a constant: a random number."""
    return mixed(coordinate.astype(np.uint64) + np.uint64(dim << 56))


def first_gap(
    wanted_offsets: Sequence[int] | Int64s,
    wanted_lengths: Sequence[int] | Int64s,
    found_offsets: Int64s,
    found_lengths: Int64s,
) -> Box | None:
    """Return a part of the wanted box that no found box covers, for an error message.

    The part cannot be enlarged in any direction. The found boxes may overlap.

    Args:
        wanted_offsets: shape [d].
        wanted_lengths: shape [d].
        found_offsets: shape [k, d].
        found_lengths: shape [k, d].

    Returns:
        (offsets, lengths) of the gap in the same coordinates, or None when there is no gap.
    """
    lo = np.asarray(wanted_offsets, np.int64)
    hi = lo + np.asarray(wanted_lengths, np.int64)
    real = (found_lengths > 0).all(axis=1)
    starts, stops = found_offsets[real], found_offsets[real] + found_lengths[real]
    pending = [(lo, hi, np.arange(len(starts)))] if (lo < hi).all() else []
    while pending:
        a, b, near = pending.pop()
        near = near[((starts[near] < b) & (stops[near] > a)).all(axis=1)]
        if not len(near):
            return _enlarged(a, b, lo, hi, starts, stops)
        # Boxes are usually sorted along one dimension, where the middle box halves the rest.
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
        pending.extend(reversed(rest))
    return None


def _enlarged(a: Int64s, b: Int64s, lo: Int64s, hi: Int64s, starts: Int64s, stops: Int64s) -> Box:
    """Enlarge the free box [a, b) within [lo, hi) up to the occupied boxes, one dimension after the other."""
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
