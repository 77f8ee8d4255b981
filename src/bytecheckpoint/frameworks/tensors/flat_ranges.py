"""Decompose flat ranges of tensors, as ZeRO and FSDP1 cut them, into boxes without copying.

An optimizer that shards by bytes holds ranges of elements that begin and end anywhere in a tensor. An adapter describes
each as a `FlatRange`, and `flat_range_shards` turns all flat ranges of a rank into live shards, which are views of the
same memory. Nothing is sent, gathered or copied. A load describes its destination the same way and writes through the
views. ByteCheckpoint, section 3.2 ("irregular tensor sharding") and section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import ParameterName
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor
from bytecheckpoint.frameworks.tensors.plain import plain_shard
from bytecheckpoint.representation.boxes import Int64s, row_major
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = [
    "WHOLE_TENSOR",
    "FlatRange",
    "FlattenedBox",
    "JoinedBoxes",
    "ParameterRange",
    "check_ranges",
    "flat_range_shards",
]


@dataclass(frozen=True, slots=True)
class FlattenedBox:
    """A box of a tensor that was flattened before it was cut: a part of the tensor, or not in row-major order.

    Attributes:
        offsets: first coordinate of the box in the global tensor, one per dimension (tensor parallelism); None: the
            origin.
        lengths: extent of the box; None: the whole tensor.
        order: the dimensions from the outermost in memory to the innermost (a transposed matrix: (1, 0)); None:
            row-major order.
    """

    offsets: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None


WHOLE_TENSOR = FlattenedBox()
"""The whole tensor in row-major order: the default of flat ranges, compared by identity."""


@dataclass(frozen=True, slots=True)
class JoinedBoxes:
    """Boxes of a tensor that were flattened one behind the other (the parts of a fused projection).

    Attributes:
        boxes: the boxes, in the order of their elements; each gives its offsets and lengths.
    """

    boxes: tuple[FlattenedBox, ...]


@dataclass(slots=True)
class FlatRange:
    """Consecutive elements of one flattened tensor, as this rank holds them right now.

    Attributes:
        key: key of the tensor.
        global_shape: shape of the whole tensor.
        start: number of the first element, in the memory order of `box`.
        data: the live memory of the elements: 1-D, any stride, any device. Many flat ranges may share one buffer.
        offset: place of the first element in `data`.
        count: number of elements; -1: up to the end of `data`.
        box: the box that was flattened, or the boxes.
        aliases: further FQNs of the tensor.
        requires_grad: value of the whole tensor's attribute.
    """

    key: TensorKey
    global_shape: tuple[int, ...]
    start: int
    data: torch.Tensor
    offset: int = 0
    count: int = -1
    box: FlattenedBox | JoinedBoxes = WHOLE_TENSOR
    aliases: tuple[str, ...] = ()
    requires_grad: bool = False


@dataclass(slots=True)
class ParameterRange:
    """The elements of one original parameter in a flat tensor that joins parameters (FSDP1, ZeRO).

    Attributes:
        fqn: name of the parameter in the bare model.
        aliases: further names (shared parameters).
        shape: shape of the whole parameter.
        start: number of the first element on this rank, in the memory order of `box`.
        offset: place of that element in the flat tensor.
        count: number of elements on this rank.
        owned: True if this rank saves the elements.
        box: the box that was flattened, or the boxes: a transposed parameter, a tensor-parallel part.
        requires_grad: True if the parameter is trained.
    """

    fqn: str
    aliases: list[str]
    shape: tuple[int, ...]
    start: int
    offset: int
    count: int
    owned: bool
    box: FlattenedBox | JoinedBoxes
    requires_grad: bool

    @property
    def parameter_name(self) -> ParameterName:
        """The FQN and the aliases."""
        return self.fqn, tuple(self.aliases)

    def flat_range(self, key: TensorKey, data: torch.Tensor, offset: int) -> FlatRange:
        """Return the same elements of the tensor `key`, which begin at place `offset` of `data`."""
        return FlatRange(
            key, self.shape, self.start, data, offset, self.count, self.box, tuple(self.aliases), self.requires_grad
        )


class _Buffer(NamedTuple):
    """The 1-D tensor in which flat ranges lie."""

    data: torch.Tensor  # detached
    dtype: str
    size: int  # elements
    stride: int
    offset: int  # of the first element in its storage


def flat_range_shards(ranges: Sequence[FlatRange]) -> list[LiveShard]:
    """Decompose flat ranges into the boxes that tile them, as views of their memory, in the order of the ranges.

    A range of a tensor with `k` dimensions longer than 1 becomes at most `2 * k - 1` shards, which follow each other in
    memory: elements 4 to 13 of a (5, 3) tensor become [1:2, 1:3], [2:4, 0:3] and [4:5, 0:2]. A range without elements
    becomes none, unless its whole tensor has none: the checkpoint must keep that tensor, so it becomes one empty shard.

    Raises:
        UsageError: the memory of a range is not a plain 1-D tensor, or the range reaches beyond its memory or its box;
            names the key.
    """
    if any(type(flat.box) is JoinedBoxes for flat in ranges):
        ranges = list(chain.from_iterable(map(_by_box, ranges)))
    if not ranges:
        return []
    buffers = _buffers(ranges)
    size, stride, origin = np.array([(b.size, b.stride, b.offset) for b in buffers], np.int64).T
    shapes = _shapes_in_memory_order(ranges)
    start, offset, count = _range_columns(ranges, size, shapes)
    boxes = flat_ranges_to_boxes(shapes, start, start + count)

    # One as_strided makes a view of any box; slicing and reshaping take several calls.
    stride = stride[boxes.source]
    places = origin[boxes.source] + (boxes.flat_start - start[boxes.source] + offset[boxes.source]) * stride
    strides = row_major(boxes.lengths) * stride[:, None]
    offset_rows, length_rows, stride_rows = (
        _rows(column, boxes.source, ranges) for column in (boxes.offsets, boxes.lengths, strides)
    )
    out: list[LiveShard] = []
    for source, offsets, lengths, steps, place in zip(
        boxes.source.tolist(), offset_rows, length_rows, stride_rows, places.tolist(), strict=True
    ):
        flat, buffer = ranges[source], buffers[source]
        if flat.box is not WHOLE_TENSOR:
            assert isinstance(flat.box, FlattenedBox)
            offsets, lengths, steps = _in_tensor(flat.box, offsets, lengths, steps)
        data = buffer.data.as_strided(lengths, steps, place)
        out.append(_shard(flat, buffer, offsets, lengths, data))
    for row in np.flatnonzero(shapes.prod(axis=1) == 0).tolist():
        shape = ranges[row].global_shape
        if 0 in shape:
            out.append(_shard(ranges[row], buffers[row], (0,) * len(shape), shape, buffers[row].data.new_empty(shape)))
    return out


def _by_box(flat: FlatRange) -> Iterator[FlatRange]:
    """Cut a range of joined boxes into one range for each box."""
    if not isinstance(flat.box, JoinedBoxes):
        yield flat
        return
    first, size = 0, flat.data.numel() - flat.offset
    last = flat.start + (size if flat.count < 0 else flat.count)
    for box in flat.box.boxes:
        end = first + prod(box.lengths or ())
        low, high = max(first, flat.start), min(end, last)
        if low < high:
            yield replace(flat, start=low - first, offset=flat.offset + low - flat.start, count=high - low, box=box)
        first = end
    if flat.start < 0 or last > first:
        raise UsageError(f"{flat.key}: elements {flat.start} to {last} do not lie in the {first} of {flat.box}")


def _range_columns(ranges: Sequence[FlatRange], size: Int64s, shapes: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return start, offset and count of the ranges, shape [n] each, checked against their buffers and boxes."""
    start = np.fromiter((r.start for r in ranges), np.int64, len(ranges))
    offset = np.fromiter((r.offset for r in ranges), np.int64, len(ranges))
    count = np.fromiter((r.count for r in ranges), np.int64, len(ranges))
    count = np.where(count < 0, size - offset, count)
    start[count == 0] = offset[count == 0] = 0  # an empty range may name any place
    check_ranges(lambda row: ranges[row].key, start, offset, count, size, shapes.prod(axis=1))
    return start, offset, count


def check_ranges(
    key_of: Callable[[int], TensorKey], start: Int64s, offset: Int64s, count: Int64s, size: Int64s, volume: Int64s
) -> None:
    """Check that flat ranges lie inside their buffers of `size` elements and their boxes of `volume` elements, [n] each.

    Raises:
        UsageError: one does not; names its key.
    """
    wrong = (offset < 0) | (count < 0) | (offset + count > size) | (start < 0) | (start + count > volume)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise UsageError(
            f"{key_of(row)}: {int(count[row])} elements from number {int(start[row])}, at place {int(offset[row])} of a "
            f"buffer of {int(size[row])}, do not lie inside the buffer and the tensor's box of {int(volume[row])} elements"
        )


def _in_tensor(
    box: FlattenedBox, offsets: tuple[int, ...], lengths: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Convert offsets, lengths and strides from the memory order of a flattened box to its tensor's dimensions."""
    if box.order is not None:
        # Entry k in memory order is dimension order[k] of the tensor.
        back = sorted(range(len(offsets)), key=box.order.__getitem__)
        offsets, lengths, strides = (tuple(column[k] for k in back) for column in (offsets, lengths, strides))
    if box.offsets is not None:
        offsets = tuple(o + b for o, b in zip(offsets, box.offsets, strict=True))
    return offsets, lengths, strides


def _shard(
    flat: FlatRange, buffer: _Buffer, offsets: tuple[int, ...], lengths: tuple[int, ...], data: torch.Tensor
) -> LiveShard:
    return LiveShard(
        flat.key, buffer.dtype, flat.global_shape, offsets, lengths, data, flat.aliases, flat.requires_grad
    )


def _rows(column: Int64s, source: Int64s, ranges: Sequence[FlatRange]) -> list[tuple[int, ...]]:
    """Convert the rows of a column of boxes to tuples, each as long as its range's tensor has dimensions."""
    ndims = np.array([len(r.global_shape) for r in ranges], np.int64)[source]
    out: list[tuple[int, ...]] = [()] * len(source)
    for ndim in np.unique(ndims[ndims > 0]).tolist():
        rows = np.flatnonzero(ndims == ndim)
        # Columns to lists, and lists to tuples, without a step of Python for each row.
        tuples = zip(*column[rows, :ndim].T.tolist(), strict=True)
        if len(rows) == len(out):
            return list(tuples)
        for row, values in zip(rows.tolist(), tuples, strict=True):
            out[row] = values
    return out


def _buffers(ranges: Sequence[FlatRange]) -> list[_Buffer]:
    known: dict[int, _Buffer] = {}
    out: list[_Buffer] = []
    for flat in ranges:
        data = flat.data
        buffer = known.get(id(data))
        if buffer is None:
            if data.ndim != 1 or is_dtensor(data):
                raise UsageError(
                    f"{flat.key}: a flat range lies in a plain 1-D tensor, not in one of shape {tuple(data.shape)}"
                )
            shard = plain_shard(flat.key, data)
            plain = shard.data
            buffer = _Buffer(plain, shard.dtype, data.numel(), plain.stride(0), int(plain.storage_offset()))
            known[id(data)] = buffer
        out.append(buffer)
    return out


def _shapes_in_memory_order(ranges: Sequence[FlatRange]) -> Int64s:
    """Return the extents of the flattened boxes, outermost dimension first, padded with ones on the right; [n, d]."""
    # Many ranges have few shapes: a look-up takes a tenth of the time of making an array of them all.
    known: dict[tuple[int, ...], int] = {}
    extents = (r.global_shape if r.box is WHOLE_TENSOR else _in_memory_order(r) for r in ranges)
    number = np.fromiter((known.setdefault(tuple(e), len(known)) for e in extents), np.int64, len(ranges))
    width = max(1, *map(len, known))
    return np.array([(*e, *(1,) * (width - len(e))) for e in known], np.int64)[number]


def _in_memory_order(flat: FlatRange) -> tuple[int, ...]:
    shape, box = flat.global_shape, flat.box
    assert isinstance(box, FlattenedBox)
    lengths = shape if box.lengths is None else box.lengths
    origin = box.offsets or (0,) * len(shape)
    order = box.order or tuple(range(len(shape)))
    inside = len(lengths) == len(shape) == len(origin) and sorted(order) == list(range(len(shape)))
    if not inside or any(o < 0 or o + n > s for s, o, n in zip(shape, origin, lengths, strict=True)):
        raise UsageError(f"{flat.key}: {box} does not lie inside the tensor's shape {shape}")
    return tuple(lengths[dim] for dim in order)
