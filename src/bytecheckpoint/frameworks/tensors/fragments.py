"""Describe many flat ranges of one tensor in one memory as one shard with fragments, without an object for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bytecheckpoint.frameworks.tensors.flat_ranges import FlatRange, check_ranges, flat_range_shards
from bytecheckpoint.frameworks.tensors.plain import is_lazy_view, plain_shard
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes
from bytecheckpoint.representation.shards import Fragments, LiveShard, TensorKey
from bytecheckpoint.tuning import tuning

__all__ = ["range_shards", "range_table", "repeated_box", "table_shards"]

#: Longer boxes on average are better written from their own memory, without a copy.
_LARGE_BYTES = 256 << 10


def range_table(place: Any) -> Int64s:
    """Convert a table of flat ranges, of NumPy or torch, to int64 [n, 3].

    Raises:
        TypeError: the numbers are no integers.
        ValueError: the rows do not have three numbers.
    """
    table = np.asarray(place)
    if table.shape[1] != 3:
        raise ValueError(f"a table of ranges has three columns, not {table.shape[1]}")
    if table.dtype.kind not in "iu":
        raise TypeError(f"a table of ranges holds integers, not {table.dtype}")
    return table.astype(np.int64)


def table_shards(key: TensorKey, shape: tuple[int, ...], table: Int64s, data: torch.Tensor) -> list[LiveShard]:
    """Return the shards of a table of flat ranges in one 1-D tensor.

    Args:
        key: the tensor.
        shape: shape of the whole tensor.
        table: number of each range's first element in the tensor, its place in `data`, and the number of elements;
            int64 [n, 3].
        data: the live memory.

    Raises:
        UsageError: a range does not lie inside the tensor and `data`, or `data` is not a plain 1-D tensor.
    """
    start, place, count = np.ascontiguousarray(table.T)
    if data.ndim == 1 and data.numel() and data.stride(0) == 1 and not is_lazy_view(data):
        shard = plain_shard(key, data)
        if found := _fragments(key, shape, shard, start, place, count):
            return found
    columns = zip(start.tolist(), place.tolist(), count.tolist(), strict=True)
    grad = data.requires_grad
    return flat_range_shards([FlatRange(key, shape, a, data, at, n, requires_grad=grad) for a, at, n in columns])


def range_shards(key: TensorKey, ranges: Sequence[tuple[tuple[int, ...], int, torch.Tensor]]) -> list[LiveShard]:
    """Return the shards of flat ranges: (shape of the tensor, number of the first element, the live elements)."""
    if len(ranges) >= tuning().fragment_boxes and (found := _of_one_memory(key, ranges)):
        return found
    return flat_range_shards(
        [FlatRange(key, shape, place, data, requires_grad=data.requires_grad) for shape, place, data in ranges]
    )


def _of_one_memory(
    key: TensorKey, ranges: Sequence[tuple[tuple[int, ...], int, torch.Tensor]]
) -> list[LiveShard] | None:
    """Return the shard of ranges that are plain views of one tensor; None if they are anything else."""
    shape, _, first = ranges[0]
    tensors = [data for _, _, data in ranges]
    base, cls, dtype, grad = first._base, type(first), first.dtype, first.requires_grad
    lazy = is_lazy_view if dtype.is_complex else torch.Tensor.is_neg
    alike = base is not None and all(
        data._base is base
        and type(data) is cls
        and data.dtype is dtype
        and data.ndim == 1
        and data.stride(0) == 1
        and data.requires_grad is grad
        and not lazy(data)
        for data in tensors
    )
    if not alike or any(other != shape for other, _, _ in ranges):
        return None
    size = dtype.itemsize
    count = np.array([data.numel() for data in tensors], np.int64)
    address = np.array([data.data_ptr() for data in tensors], np.int64)
    held = np.flatnonzero(count)
    if not len(held):
        return None
    lowest = tensors[int(held[np.argmin(address[held])])]
    place, rest = np.divmod(address - lowest.data_ptr(), size)
    extent = int((place + count)[held].max())
    if rest[held].any() or (lowest.storage_offset() + extent) * size > lowest.untyped_storage().nbytes():
        return None  # a view was given other memory
    memory = plain_shard(key, lowest.detach().as_strided((extent,), (1,)))
    memory.requires_grad = grad
    start = np.array([place for _, place, _ in ranges], np.int64)
    return _fragments(key, shape, memory, start, place, count)


def _fragments(
    key: TensorKey, shape: tuple[int, ...], memory: LiveShard, start: Int64s, place: Int64s, count: Int64s
) -> list[LiveShard] | None:
    """Return `memory` as the shard of flat ranges in it; None if these are few, or long."""
    if not shape or 0 in shape:
        return None
    volume = np.full(len(start), np.prod(shape, dtype=np.int64))
    start[count == 0] = place[count == 0] = 0  # an empty range may name any place
    check_ranges(lambda _: key, start, place, count, np.full(len(start), memory.data.numel()), volume)
    boxes = flat_ranges_to_boxes(
        np.broadcast_to(np.array(shape, np.int64), (len(start), len(shape))), start, start + count
    )
    elements = boxes.lengths.prod(axis=1)
    total = int(count.sum()) * memory.data.element_size()
    if len(elements) < max(tuning().fragment_boxes, total // _LARGE_BYTES):
        return None
    places = boxes.flat_start - start[boxes.source] + place[boxes.source]
    memory.fragments = Fragments(boxes.offsets, boxes.lengths, places, elements)
    memory.global_shape, memory.offsets, memory.lengths = shape, (), ()
    return [memory]


def repeated_box(boxes: BoxTable) -> int | None:
    """Return the number of a box with elements that equals another one; None if all differ."""
    below = np.zeros(max(len(boxes) - 1, 0), bool)
    equal = ~below
    for column in boxes.offsets.T:
        below |= equal & (column[1:] > column[:-1])
        equal &= column[1:] == column[:-1]
    if below.all():
        return None  # ascending, as usual
    columns = [*boxes.lengths.T, *boxes.offsets.T]
    order = np.lexsort(columns)
    same = (boxes.lengths[order[1:]] > 0).all(axis=1)
    for column in columns:
        same &= column[order[1:]] == column[order[:-1]]
    return int(order[1:][same][0]) if same.any() else None
