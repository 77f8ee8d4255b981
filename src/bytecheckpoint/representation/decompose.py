"""Decompose flat ranges into boxes (ByteCheckpoint, section 3.2, "irregular tensor sharding").

ZeRO and flattened FSDP cut tensors anywhere in their row-major order. Such a range consists of a few boxes, which every
rank computes for itself: a save gathers nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bytecheckpoint.representation.boxes import Int64s

__all__ = ["FlatBoxes", "flat_ranges_to_boxes"]


@dataclass(frozen=True, slots=True)
class FlatBoxes:
    """Boxes that tile flat ranges, sorted by range and then by place in the tensor.

    Attributes:
        source: number of the range that the box is a part of, [m].
        offsets: first coordinate, [m, d].
        lengths: extent, [m, d].
        flat_start: row-major number of the box's first element in the whole tensor, [m]. The elements of the box are
            this element and those that directly follow it.
    """

    source: Int64s
    offsets: Int64s
    lengths: Int64s
    flat_start: Int64s

    def __len__(self) -> int:
        return int(self.source.shape[0])


def flat_ranges_to_boxes(shapes: Int64s, start: Int64s, stop: Int64s) -> FlatBoxes:
    """Cut row-major ranges of elements into boxes.

    A range of a tensor with `k` dimensions longer than 1 becomes at most `2 * k - 1` boxes: first boxes of growing
    dimension (part of a row, rows of a plane, ...), then whole slices of the outermost dimension, then boxes of falling
    dimension. An empty range becomes no box.

    Args:
        shapes: shape of the tensor of each range, padded with ones on the right, [n, d].
        start: first element of each range, [n].
        stop: one past the last element of each range, [n].
    """
    count, ndim = shapes.shape
    extents = np.maximum(shapes, 1)
    # strides[:, 0] is the number of elements of the tensor, strides[:, k + 1] that of one slice of dimension k.
    strides = np.ones((count, ndim + 1), np.int64)
    strides[:, :-1] = np.cumprod(extents[:, ::-1], axis=1)[:, ::-1]
    assert ((start >= 0) & (start <= stop) & (stop <= np.prod(shapes, axis=1))).all()

    # Step i takes the elements cuts[:, i] to cuts[:, i + 1]; their box extends along dimension along[i].
    along = np.array([*range(ndim - 1, 0, -1), *range(ndim)], np.int64)
    cuts = np.empty((count, len(along) + 1), np.int64)
    cuts[:, 0] = start
    for step, k in enumerate(along.tolist()):
        at = cuts[:, step]
        if step < ndim - 1:
            block = strides[:, k]
            end = -(-at // block) * block
            cuts[:, step + 1] = np.where(end <= stop, end, at)
        else:
            slice_size = strides[:, k + 1]
            cuts[:, step + 1] = np.maximum(stop // slice_size * slice_size, at)

    source, step_of = np.nonzero(cuts[:, 1:] > cuts[:, :-1])
    flat_start = cuts[source, step_of]
    size = cuts[source, step_of + 1] - flat_start
    dim = along[step_of]
    extents, strides = extents[source], strides[source]
    offsets = flat_start[:, None] // strides[:, 1:] % extents
    lengths = np.where(np.arange(ndim) < dim[:, None], 1, extents)
    row = np.arange(len(source))
    lengths[row, dim] = size // strides[row, dim + 1]
    return FlatBoxes(source.astype(np.int64), offsets, lengths, flat_start)
