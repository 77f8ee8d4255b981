"""Cut boxes of tensors into boxes of parts.

An interval of an axis of `k` dims is the union of at most `2 * k - 1` boxes of its dims. The elements of such a box lie in
the tensor at `first + sum(stride * index)`, so both sides of a copy are strided arrays of one shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bytecheckpoint.layouts.axes import Alternative, Axis, Dim, Product, affine, size_of
from bytecheckpoint.representation.boxes import BoxTable, Int64s, Mask
from bytecheckpoint.representation.catalog_rows import ranges
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes

__all__ = ["Lowering", "PartBoxes", "PartPlaces", "to_parts"]


@dataclass(frozen=True, eq=False)
class Lowering:
    """The way in which a part lies in a tensor.

    Attributes:
        axes: axis along each dimension of the tensor, without sums.
        dims: dims of the part, in the order of the columns.
        sizes: sizes of the dims, and of others in the axes.
        lacking: columns of the dims that the tensor lacks, because elements along them are equal.
    """

    axes: tuple[Axis, ...]
    dims: tuple[str, ...]
    sizes: dict[str, int]
    lacking: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PartPlaces:
    """The places of parts in the tensors of one side, sorted by tensor.

    Attributes:
        tensor: number of the tensor, int64 [n].
        part: number of the part, -1 for padding, int64 [n].
        lowering: number of the lowering, int64 [n].
        fixed: coordinate of each dim of the part that stands in the name of the tensor, otherwise 0, int64 [n, k].
        copy: mask of the tensors that are second names of others, bool [n]: nothing is read from them.
        virtual: mask of the places that tensors have by second names that are missing, bool [n]: nothing is written there.
        lowerings: the distinct lowerings.
        width: number of dims of the largest part of both sides.
    """

    tensor: Int64s
    part: Int64s
    lowering: Int64s
    fixed: Int64s
    copy: Mask
    virtual: Mask
    lowerings: Sequence[Lowering]
    width: int

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, eq=False)
class PartBoxes:
    """Boxes of parts, sorted by the boxes of tensors that they are cut from.

    Attributes:
        boxes: boxes in the coordinates of parts, numbered by part, -1 for padding.
        origin: number of the tensor's box that holds the elements, int64 [m].
        first: place of the box's first element, in elements from the first one of the tensor's box, int64 [m].
        strides: elements per step of each dim, int64 [m, k].
    """

    boxes: BoxTable
    origin: Int64s
    first: Int64s
    strides: Int64s

    def __len__(self) -> int:
        return len(self.origin)


def to_parts(places: PartPlaces, boxes: BoxTable, strides: Int64s, *, target: bool) -> tuple[PartBoxes, PartBoxes]:
    """Cut boxes of tensors into boxes of parts.

    Args:
        places: places of the side's tensors.
        boxes: boxes in the coordinates of tensors, numbered by the tensors of the side.
        strides: elements per step of each dimension in memory or in the file, int64 [n, d].
        target: the boxes are to be filled, not to be read: all second names are, and dims that the tensors lack have the
            coordinate 0 only.

    Returns:
        The boxes of parts, and those of padding.
    """
    unused = places.copy
    if target:
        unused = places.virtual & np.isin(places.tensor, places.tensor[~places.virtual])
    chosen = np.flatnonzero(~unused)
    tensor = places.tensor[chosen]
    start, stop = np.searchsorted(tensor, boxes.tensor), np.searchsorted(tensor, boxes.tensor, side="right")
    count = stop - start
    origin = np.repeat(np.arange(len(boxes)), count)
    place = chosen[ranges(start, count)]
    order = np.argsort(places.lowering[place], kind="stable")
    origin, place = origin[order], place[order]
    lowering = places.lowering[place]
    cuts = [0, *(np.flatnonzero(np.diff(lowering)) + 1).tolist(), len(lowering)] if len(lowering) else [0]
    width = max(places.width, *(len(low.dims) for low in places.lowerings), places.fixed.shape[1])
    results = [_nothing(width)]
    for at, end in itertools.pairwise(cuts):
        low = places.lowerings[int(lowering[at])]
        results.append(_lowered(low, places, place[at:end], origin[at:end], boxes, strides, target, width))
    columns = [np.concatenate(arrays) for arrays in zip(*results, strict=True)]
    order = np.argsort(columns[3], kind="stable")
    part, offsets, lengths, origin, first, part_strides = (column[order] for column in columns)
    made = PartBoxes(BoxTable(part, offsets, lengths), origin, first, part_strides)
    return _take(made, part >= 0, places.width), _take(made, part < 0, width)


def _take(found: PartBoxes, mask: Mask, width: int) -> PartBoxes:
    """Return the boxes of a mask, in `width` columns; the others are those of padding."""
    index = np.flatnonzero(mask)
    boxes, strides = found.boxes.take(index), found.strides[index, :width]
    boxes = BoxTable(boxes.tensor, boxes.offsets[:, :width], boxes.lengths[:, :width])
    return PartBoxes(boxes, found.origin[index], found.first[index], strides)


def _nothing(width: int) -> tuple[Int64s, ...]:
    empty, rows = np.zeros(0, np.int64), np.zeros((0, width), np.int64)
    return empty, rows, rows, empty, empty, rows


def _lowered(
    low: Lowering,
    places: PartPlaces,
    place: Int64s,
    origin: Int64s,
    boxes: BoxTable,
    strides: Int64s,
    target: bool,
    width: int,
) -> tuple[Int64s, ...]:
    """Cut the boxes `origin` into boxes of the parts at the places `place`, all of one lowering."""
    column = {name: k for k, name in enumerate(low.dims)}
    offsets = np.zeros((len(place), width), np.int64)
    lengths = np.ones((len(place), width), np.int64)
    offsets[:, : places.fixed.shape[1]] = places.fixed[place]
    for k in low.lacking:
        lengths[:, k] = 1 if target else low.sizes[low.dims[k]]
    pieces = _Cut(np.arange(len(place)), offsets, lengths, column, low.sizes)
    first = np.zeros(len(place), np.int64)
    weights = np.zeros((len(place), width), np.int64)
    for d, axis in enumerate(low.axes):
        at = boxes.offsets[origin, d]
        pieces.cut(axis, at[pieces.source], (at + boxes.lengths[origin, d])[pieces.source])
        base, weight = affine(axis, low.sizes)
        first += (base - at) * strides[origin, d]
        for name, w in weight.items():
            weights[:, column[name]] += w * strides[origin, d]
    source = pieces.source
    along = np.flatnonzero(weights.any(0)) if len(weights) else np.zeros(0, np.int64)
    first = first[source] + (pieces.offsets[:, along] * weights[source][:, along]).sum(1)
    return places.part[place][source], pieces.offsets, pieces.lengths, origin[source], first, weights[source]


class _Cut:
    """Boxes that are cut axis by axis.

    Attributes:
        source: number of the box that each piece is cut from.
        offsets: first coordinates of each piece, by dim.
        lengths: extents of each piece, by dim.
    """

    def __init__(
        self, source: Int64s, offsets: Int64s, lengths: Int64s, column: dict[str, int], sizes: dict[str, int]
    ) -> None:
        self.source, self.offsets, self.lengths = source, offsets, lengths
        self._column, self._sizes = column, sizes

    def take(self, index: Int64s) -> None:
        """Replace the pieces by those at `index`."""
        self.source, self.offsets, self.lengths = self.source[index], self.offsets[index], self.lengths[index]

    def cut(self, axis: Axis, low: Int64s, high: Int64s) -> Int64s:
        """Cut each piece to the coordinates from `low` to `high` along an axis; return the numbers of the former pieces."""
        match axis:
            case Alternative(whole, index, term):
                base = sum(size_of(other, self._sizes) for other in whole.terms[:index])
                size = size_of(whole.terms[index], self._sizes)
                return self.cut(term, np.clip(low - base, 0, size), np.clip(high - base, 0, size))
            case Product(factors):
                sizes = np.array([size_of(factor, self._sizes) for factor in factors], np.int64)
                flat = flat_ranges_to_boxes(np.broadcast_to(sizes, (len(low), len(sizes))), low, np.maximum(high, low))
                former = flat.source
                self.take(flat.source)
                where = np.arange(len(flat))
                for k, factor in enumerate(factors):
                    inner = self.cut(factor, flat.offsets[where, k], (flat.offsets + flat.lengths)[where, k])
                    where, former = where[inner], former[inner]
                return former
            case _:
                kept = np.flatnonzero(high > low)
                self.take(kept)
                if isinstance(axis, Dim):
                    k = self._column[axis.name]
                    self.offsets[:, k], self.lengths[:, k] = low[kept], (high - low)[kept]
                return kept
