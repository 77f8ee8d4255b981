"""Find the boxes of a tensor that a rank of a device mesh holds, from plain numbers. Torch is not imported.

A split follows torch.chunk: parts of ceil(size / parts), the last ones shorter or empty. A split with a factor marks a
dimension that was split right to left (tensor parallelism first, then FSDP over the local part). The same splits therefore
describe two layouts, which differ when sizes are uneven:

- *right to left*: what `fully_shard` makes of a tensor-parallel parameter. Each mesh dimension cuts its part out of the
  part of the dimension before it, so the result is always one box.
- *left to right*: what `distribute_tensor` makes from the placements themselves. A strided split interleaves, and the
  next split cuts through the interleaved part, so a rank may hold several intervals of one dimension.

The extent of the local tensor distinguishes the two, except for a few uneven splits over four and more tensor-parallel
ranks. There this module assumes right to left, the only layout that exists in practice; a save of the other one then
shows a hole. (torch's own compute_local_shape_and_global_offset knows left to right only, and only its first offset.)
ByteCheckpoint, section 3.2: nD_offsets and nD_lengths of ShardMeta.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from bytecheckpoint.errors import UsageError

__all__ = ["LocalBox", "MeshSplit", "split_boxes"]

# (first coordinate, extent) along one dimension. A list of intervals is a rank's part of the dimension, in local order.
Interval = tuple[int, int]


class LocalBox(NamedTuple):
    """A box of the global tensor and where it lies in the local one.

    Attributes:
        offsets: first global coordinate, one per dimension.
        lengths: extent, one per dimension.
        slices: position in the local tensor, or None when the box is the whole local tensor.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    slices: tuple[slice, ...] | None


class MeshSplit(NamedTuple):
    """A split of one dimension of a tensor over one dimension of a mesh.

    Attributes:
        dim: dimension of the tensor.
        parts: extent of the mesh's dimension.
        coordinate: coordinate of the rank in it.
        factor: number of parts into which other mesh dimensions had split the tensor's dimension before; 1 for none.
    """

    dim: int
    parts: int
    coordinate: int
    factor: int = 1


def split_boxes(
    splits: Sequence[MeshSplit],
    global_shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    layout: str = "its placements",
) -> tuple[LocalBox, ...]:
    """Return the boxes that a rank holds: usually one; none for an empty part.

    Args:
        splits: splits, in the order of the mesh's dimensions.
        global_shape: shape of the whole tensor.
        local_shape: shape of the local tensor, which distinguishes the two layouts of splits with a factor.
        layout: description of the splits, for the message.

    Raises:
        UsageError: the local tensor does not have the extent that the splits give it.
    """
    by_dim: dict[int, list[tuple[int, int, int]]] = {}
    for dim, parts, index, factor in splits:
        by_dim.setdefault(dim, []).append((parts, index, factor))
    intervals: list[list[Interval]] = []
    for dim, size in enumerate(global_shape):
        candidates = _possible_parts(size, by_dim[dim]) if dim in by_dim else [[(0, size)]]
        fitting = [c for c in candidates if len(local_shape) == len(global_shape) and _extent(c) == local_shape[dim]]
        intervals.append((fitting or candidates)[0])
    expected = tuple(map(_extent, intervals))
    if expected != local_shape and prod(expected) + prod(local_shape) != 0:
        raise UsageError(
            f"its local tensor has shape {local_shape}, but {layout} give {expected}: "
            "it was not made by torch's chunking rule"
        )
    if prod(expected) == 0:
        return ()
    if all(len(r) <= 1 for r in intervals):
        return (LocalBox(tuple(r[0][0] for r in intervals), expected, None),)
    return tuple(_boxes_from(intervals))


def _possible_parts(size: int, splits: Sequence[tuple[int, int, int]]) -> list[list[Interval]]:
    """Return what a rank may hold of one dimension, the more usual layout first; `splits`: (parts, index, factor)."""
    left_to_right: list[Interval] = [(0, size)]
    for parts, index, factor in splits:
        interleaved = [_chunk(left_to_right, factor, j) for j in range(factor)]
        left_to_right = _join_adjacent(itertools.chain.from_iterable(_chunk(p, parts, index) for p in interleaved))
    order = _split_order(splits)
    if order is None:
        return [left_to_right]
    right_to_left: list[Interval] = [(0, size)]
    for position in order:
        parts, index, _ = splits[position]
        right_to_left = _chunk(right_to_left, parts, index)
    return [right_to_left, left_to_right]


def _split_order(splits: Sequence[tuple[int, int, int]]) -> list[int] | None:
    """Return the order in which the splits were made; None when no order explains the factors.

    A split with factor f came after splits to its right into f parts in all.
    """
    order: list[int] = []
    for position in reversed(range(len(splits))):
        factor = splits[position][2]
        place, product = 0, 1
        while product < factor and place < len(order):
            product *= splits[order[place]][0]
            place += 1
        if product != factor:
            return None
        order.insert(place, position)
    return order


def _extent(intervals: Sequence[Interval]) -> int:
    return sum(length for _, length in intervals)


def _chunk(intervals: Sequence[Interval], parts: int, index: int) -> list[Interval]:
    """Cut part `index` of `parts` out of the concatenated intervals, by the rule of torch.chunk."""
    total = _extent(intervals)
    size = -(-total // parts)
    low, high = min(size * index, total), min(size * (index + 1), total)
    out: list[Interval] = []
    at = 0
    for start, length in intervals:
        first, last = max(low, at), min(high, at + length)
        if first < last:
            out.append((start + first - at, last - first))
        at += length
    return out


def _join_adjacent(intervals: itertools.chain[Interval]) -> list[Interval]:
    out: list[Interval] = []
    for start, length in intervals:
        if out and out[-1][0] + out[-1][1] == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((start, length))
    return out


def _boxes_from(intervals: Sequence[Sequence[Interval]]) -> list[LocalBox]:
    """Return all boxes of a rank that holds `intervals[d]` along each dimension d."""
    placed: list[list[tuple[int, int, slice]]] = []
    for dim_intervals in intervals:
        at, row = 0, []
        for start, length in dim_intervals:
            row.append((start, length, slice(at, at + length)))
            at += length
        placed.append(row)
    return [
        LocalBox(tuple(p[0] for p in pick), tuple(p[1] for p in pick), tuple(p[2] for p in pick))
        for pick in itertools.product(*placed)
    ]
