"""Irregular shards: flat ranges of tensors, as ZeRO and flat parameters cut them, made into boxes where they lie.

An optimizer that shards by bytes holds runs of elements that begin and end anywhere in a tensor. An adapter describes
each run as a `Fragment`; `fragment_shards` turns all fragments of a rank at once into live shards, views of the same
memory. Nothing is sent, gathered or copied for it, and the same description serves a load, which writes through the
views. ByteCheckpoint, section 3.2 ("irregular tensor sharding") and section 4.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.dtensors import is_dtensor
from bytecheckpoint.frameworks.leaves import add_shards
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = ["WHOLE", "Block", "Fragment", "fragment_shards"]


@dataclass(frozen=True, slots=True)
class Block:
    """The box of a tensor that was laid out flat before it was cut, where that is not the whole tensor as it stands.

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


WHOLE = Block()
"""All of the tensor, row-major: the block of fragments that say nothing else. (It is recognised; an equal one is not.)"""


@dataclass(slots=True)
class Fragment:
    """One run of elements of one tensor, as this rank holds it right now.

    Attributes:
        key: which tensor.
        global_shape: shape of the whole tensor.
        start: number of the run's first element, in the memory order of `block`.
        data: the live memory that holds the run: 1-D, any stride, any device. Many fragments may share one buffer.
        first: place of the run's first element in `data`.
        count: number of elements; -1: up to the end of `data`.
        block: what the run was cut from.
        aliases: further FQNs of the tensor.
        requires_grad: as the whole tensor has it.
    """

    key: TensorKey
    global_shape: tuple[int, ...]
    start: int
    data: torch.Tensor
    first: int = 0
    count: int = -1
    block: Block = WHOLE
    aliases: tuple[str, ...] = ()
    requires_grad: bool = False


class _Buffer(NamedTuple):
    data: torch.Tensor  # detached
    dtype: str
    size: int
    stride: int
    offset: int


def fragment_shards(fragments: Sequence[Fragment]) -> list[LiveShard]:
    """The boxes that tile the fragments, as views of their memory, in the order of the fragments.

    A fragment of a tensor with `k` dimensions longer than 1 becomes at most `2 * k - 1` shards, which follow each
    other in memory. A fragment without elements becomes none, unless its whole tensor has none: that one must not be
    lost, and becomes one empty shard.

    Raises:
        UsageError: the memory of a fragment is not a plain 1-D tensor, or the fragment reaches beyond its memory or
            its block; names the key.
    """
    if not fragments:
        return []
    buffers = _buffers(fragments)
    shapes = _shapes(fragments)
    start = np.array([f.start for f in fragments], np.int64)
    first = np.array([f.first for f in fragments], np.int64)
    size = np.array([b.size for b in buffers], np.int64)
    count = np.array([f.count for f in fragments], np.int64)
    count = np.where(count < 0, size - first, count)
    start[count == 0] = first[count == 0] = 0  # nothing is nowhere
    wrong = (first < 0) | (count < 0) | (first + count > size) | (start < 0) | (start + count > shapes.prod(axis=1))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise UsageError(
            f"{fragments[row].key}: {int(count[row])} elements from number {int(start[row])}, at place "
            f"{int(first[row])} of a buffer of {int(size[row])}, do not lie inside the buffer and the tensor's box of "
            f"{int(shapes[row].prod())} elements"
        )
    boxes = flat_ranges_to_boxes(shapes, start, start + count)

    # One as_strided makes a view of any box; slicing and reshaping take several calls.
    stride = np.array([b.stride for b in buffers], np.int64)[boxes.source]
    origin = np.array([b.offset for b in buffers], np.int64)[boxes.source]
    places = origin + (boxes.flat_start - start[boxes.source] + first[boxes.source]) * stride
    strides = _row_major(boxes.lengths) * stride[:, None]
    corners, extents, steps = (
        _rows(column, boxes.source, fragments) for column in (boxes.offsets, boxes.lengths, strides)
    )
    out: list[LiveShard] = []
    for source, corner, lengths, step, place in zip(
        boxes.source.tolist(), corners, extents, steps, places.tolist(), strict=True
    ):
        fragment, buffer = fragments[source], buffers[source]
        block = fragment.block
        if block is not WHOLE:
            if block.order is not None:
                # Entry k of the columns is dimension order[k] of the tensor.
                back = sorted(range(len(corner)), key=block.order.__getitem__)
                corner, lengths, step = (tuple(column[k] for k in back) for column in (corner, lengths, step))
            if block.offsets is not None:
                corner = tuple(o + b for o, b in zip(corner, block.offsets, strict=True))
        data = buffer.data.as_strided(lengths, step, place)
        out.append(
            LiveShard(
                fragment.key,
                buffer.dtype,
                fragment.global_shape,
                corner,
                lengths,
                data,
                fragment.aliases,
                fragment.requires_grad,
            )
        )
    for row in np.flatnonzero(shapes.prod(axis=1) == 0).tolist():
        if 0 in fragments[row].global_shape:
            out.append(_nothing(fragments[row], buffers[row]))
    return out


def _rows(column: Int64s, source: Int64s, fragments: Sequence[Fragment]) -> list[tuple[int, ...]]:
    """The rows of a column of boxes as tuples, each as long as its fragment's tensor has dimensions."""
    ndims = np.array([len(f.global_shape) for f in fragments], np.int64)[source]
    out: list[tuple[int, ...]] = [()] * len(source)
    for ndim in np.unique(ndims[ndims > 0]).tolist():
        rows = np.flatnonzero(ndims == ndim)
        # Columns to lists, and lists to tuples, without a step of Python for each row.
        made = zip(*column[rows, :ndim].T.tolist(), strict=True)
        if len(rows) == len(out):
            return list(made)
        for row, values in zip(rows.tolist(), made, strict=True):
            out[row] = values
    return out


def _buffers(fragments: Sequence[Fragment]) -> list[_Buffer]:
    known: dict[int, _Buffer] = {}
    out: list[_Buffer] = []
    for fragment in fragments:
        data = fragment.data
        buffer = known.get(id(data))
        if buffer is None:
            if data.ndim != 1 or is_dtensor(data):
                raise UsageError(
                    f"{fragment.key}: a flat range lies in a plain 1-D tensor, not in one of shape {tuple(data.shape)}"
                )
            checked: list[LiveShard] = []
            add_shards(checked, fragment.key, data)
            plain = checked[0].data
            buffer = _Buffer(plain, checked[0].dtype, data.numel(), plain.stride(0), int(plain.storage_offset()))
            known[id(data)] = buffer
        out.append(buffer)
    return out


def _shapes(fragments: Sequence[Fragment]) -> Int64s:
    """Extents of the blocks in memory order, padded with ones on the right."""
    extents = [f.global_shape if f.block is WHOLE else _in_memory_order(f) for f in fragments]
    width = max(1, *map(len, extents))
    return np.array([(*e, *(1,) * (width - len(e))) for e in extents], np.int64)


def _in_memory_order(fragment: Fragment) -> tuple[int, ...]:
    shape, block = fragment.global_shape, fragment.block
    lengths = shape if block.lengths is None else block.lengths
    origin = block.offsets or (0,) * len(shape)
    order = block.order or tuple(range(len(shape)))
    inside = len(lengths) == len(shape) == len(origin) and sorted(order) == list(range(len(shape)))
    if not inside or any(o < 0 or o + n > s for s, o, n in zip(shape, origin, lengths, strict=True)):
        raise UsageError(f"{fragment.key}: {block} does not lie inside the tensor's shape {shape}")
    return tuple(lengths[dim] for dim in order)


def _row_major(lengths: Int64s) -> Int64s:
    """Strides of dense boxes, in elements, shape [m, d]."""
    strides = np.ones_like(lengths)
    strides[:, :-1] = np.cumprod(lengths[:, :0:-1], axis=1)[:, ::-1]
    return strides


def _nothing(fragment: Fragment, buffer: _Buffer) -> LiveShard:
    shape = fragment.global_shape
    nothing = buffer.data.new_empty(shape)
    origin = (0,) * len(shape)
    return LiveShard(
        fragment.key, buffer.dtype, shape, origin, shape, nothing, fragment.aliases, fragment.requires_grad
    )
