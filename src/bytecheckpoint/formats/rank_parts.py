"""Join tensors of which tensor-parallel ranks have boxes, from flat ranges of elements in their files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.formats.files import RangedFile
from bytecheckpoint.formats.foreign import ForeignColumns
from bytecheckpoint.formats.meanings import StoredTensor
from bytecheckpoint.formats.rows import RowColumns
from bytecheckpoint.representation.boxes import BoxTable, Int64s, row_major_of
from bytecheckpoint.representation.catalog_rows import ranges
from bytecheckpoint.representation.dtypes import itemsize

__all__ = ["DividedTensor", "FlatRanges", "RankPart", "clip_rows", "divide", "divide_view", "replicated"]


@dataclass(frozen=True, slots=True)
class RankPart:
    """A box of a tensor that one rank has.

    Attributes:
        rank: tensor-parallel rank.
        offsets: first element in the tensor of the rank.
        lengths: extents.
        whole: first element in the whole tensor.
    """

    rank: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    whole: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DividedTensor:
    """A tensor of which each rank has boxes.

    Attributes:
        shape: shape of the whole tensor.
        shapes: shape of the tensor of each rank.
        parts: boxes of the ranks, of which each element of the tensor is in one.
    """

    shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[RankPart, ...]


def replicated(shapes: Sequence[tuple[int, ...]]) -> DividedTensor:
    """Return a tensor that all ranks have. Raises ValueError: their shapes differ."""
    if len(set(shapes)) != 1:
        raise ValueError(f"ranks that have the same tensor have shapes {sorted(set(shapes))}")
    zeros = (0,) * len(shapes[0])
    return DividedTensor(shapes[0], tuple(shapes), (RankPart(0, zeros, shapes[0], zeros),))


def divide(shapes: Sequence[tuple[int, ...]], dim: int, widths: Sequence[Sequence[int]] | None = None) -> DividedTensor:
    """Return a tensor that is divided along one dimension.

    Args:
        shapes: shape of the tensor of each rank.
        dim: the dimension.
        widths: extent of each rank in each of the blocks along the dimension, one after the other; None: one block.

    Raises:
        ValueError: the shapes do not fit together.
    """
    if any(
        len(shape) <= dim or shape[:dim] + shape[dim + 1 :] != shapes[0][:dim] + shapes[0][dim + 1 :]
        for shape in shapes
    ):
        raise ValueError(f"tensors of shapes {list(shapes)} do not join along dimension {dim}")
    extents = [shape[dim] for shape in shapes]
    widths = [extents] if widths is None else widths
    if (
        any(len(block) != len(shapes) or min(block) < 0 for block in widths)
        or [*map(sum, zip(*widths, strict=True))] != extents
    ):
        raise ValueError(f"blocks of widths {widths} do not add up to the extents {extents}")
    parts, whole, at = [], 0, [0] * len(shapes)
    for block in widths:
        for rank, width in enumerate(block):
            where = [[0] * len(shapes[0]) for _ in range(2)]
            where[0][dim], where[1][dim] = at[rank], whole
            lengths = (*shapes[0][:dim], width, *shapes[0][dim + 1 :])
            parts.append(RankPart(rank, tuple(where[0]), lengths, tuple(where[1])))
            at[rank] += width
            whole += width
    return DividedTensor((*shapes[0][:dim], whole, *shapes[0][dim + 1 :]), tuple(shapes), tuple(parts))


def divide_view(
    shapes: Sequence[tuple[int, ...]], view: Sequence[int], dim: int, widths: Sequence[Sequence[int]]
) -> DividedTensor:
    """Return a tensor that is divided along dimension `dim` of a view of it; `shapes` and `widths` as for `divide`.

    `view` is the shape of the whole tensor as the program sees it, -1 once for what follows from the number of elements.
    """
    known = [sum(map(sum, widths)) if k == dim else size for k, size in enumerate(view)]
    if known.count(-1) == 1:
        rest = -math.prod(known)
        known[known.index(-1)] = sum(map(math.prod, shapes)) // rest if rest else 0
    outer, inner = math.prod(known[:dim]), math.prod(known[dim + 1 :])
    width = sum(block[0] for block in widths)
    for axis, size in enumerate(shapes[0]):  # dimension of the tensor that holds that of the view
        before, behind = math.prod(shapes[0][:axis]), math.prod(shapes[0][axis + 1 :])
        if before and behind and outer % before == inner % behind == 0:
            repeats, factor = outer // before, inner // behind
            if repeats * width * factor == size:
                return divide(shapes, axis, [[n * factor for n in block] for block in widths] * repeats)
    raise ValueError(f"a tensor of shape {list(shapes[0])} has no dimension for that of size {width} in {known}")


def clip_rows(found: DividedTensor, rows: int) -> DividedTensor:
    """Return a tensor without its rows from a number on: padding."""
    parts = []
    for part in found.parts:
        kept = min(max(rows - part.whole[0], 0), part.lengths[0])
        parts.append(RankPart(part.rank, part.offsets, (kept, *part.lengths[1:]), part.whole))
    return DividedTensor((min(rows, found.shape[0]), *found.shape[1:]), found.shapes, tuple(parts))


@dataclass(slots=True)
class _RankTensor:
    """The tensor of a rank.

    Attributes:
        number: number of the whole tensor.
        rank: the rank.
        divided: division of the whole tensor.
        filled: elements that the ranges so far have.
        ranges: first and last element, file and first byte of each range.
    """

    number: int
    rank: int
    divided: DividedTensor
    filled: int = 0
    ranges: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.divided.shapes[self.rank]


@dataclass
class FlatRanges:
    """Flat ranges of elements in files, of tensors that ranks have.

    Attributes:
        columns: table of the whole tensors.
        numbers: number of each tensor that has ranges, by state and FQN.
        tensors: tensors of ranks, by number of the whole tensor and rank.
    """

    columns: ForeignColumns
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    tensors: dict[tuple[int, int], _RankTensor] = field(default_factory=dict)

    def add(
        self, key: tuple[str, str], dtype: str, divided: DividedTensor, rank: int, place: tuple[int, int], count: int
    ) -> None:
        """Add elements as the next elements of a rank's tensor.

        Args:
            key: state and FQN.
            dtype: dtype of the elements.
            divided: division of the tensor among the ranks.
            rank: the rank.
            place: file and first byte of the elements.
            count: number of elements.

        Raises:
            ValueError: the tensor of other ranks has another dtype.
        """
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = self.columns.add_tensor(*key, dtype, divided.shape)
        if self.columns.dtypes[number] != dtype:
            raise ValueError(f"the ranks have different dtypes of {key[1]!r}")
        own = self.tensors.setdefault((number, rank), _RankTensor(number, rank, divided))
        if count:
            own.ranges.append((own.filled, own.filled + count, *place))
        own.filled += count

    def add_part(
        self, key: tuple[str, str], divided: DividedTensor, rank: int, tensor: Any, elements: tuple[int, int]
    ) -> None:
        """Add elements of a flat tensor: number of the first, and how many; other arguments as for `add`.

        Raises:
            ValueError: the flat tensor has no such elements, or another dtype than those of other ranks.
        """
        if type(tensor) is not StoredTensor:
            raise ValueError(f"no tensor has the elements of {key[1]!r}")
        first, count = elements
        if tensor.strides != (1,) or not 0 <= first <= first + count <= tensor.shape[0]:
            raise ValueError(f"the partition of {key[1]!r} has no elements {first} to {first + count}")
        file, begin = self.columns.places[tensor.storage.key]
        begin += tensor.start + first * itemsize(tensor.dtype)
        self.add(key, tensor.dtype, divided, rank, (file, begin), count)

    def add_whole(self, key: tuple[str, str], divided: DividedTensor, rank: int, tensor: StoredTensor) -> None:
        """Add all of a rank's tensor, which has to be row-major; arguments as for `add_part`."""
        if tensor.strides != row_major_of(tensor.shape):
            raise IncompatibleCheckpointError(
                f"the tensor of {key[1]!r} has strides {tensor.strides}, which are not read"
            )
        size = math.prod(tensor.shape)
        flat = msgspec.structs.replace(tensor, shape=(size,), strides=(1,))
        self.add_part(key, divided, rank, flat, (0, size))

    def rows(self, file: RangedFile) -> RowColumns:
        """Return the boxes of all ranges, which have to fill the tensors; `file` stands in errors."""
        columns, tensors = self.columns, list(self.tensors.values())
        for own in tensors:
            if own.filled != math.prod(own.shape):
                have = f"{own.filled} of {math.prod(own.shape)} elements"
                raise file.damaged(f"the partitions of {columns.keys[own.number].fqn!r} have {have}")
        shapes, ndim = [own.shape for own in tensors], max(map(len, columns.shapes), default=1)
        table = BoxTable.build([own.number for own in tensors], [(0,) * len(shape) for shape in shapes], shapes, ndim)
        owner = np.repeat(np.arange(len(tensors)), [len(own.ranges) for own in tensors])
        start, stop, at, begin = np.array([each for own in tensors for each in own.ranges], np.int64).reshape(-1, 4).T
        items = columns.items(table.tensor[owner])
        local, of = RowColumns.of_ranges(table.take(owner), (start, stop), at.astype(np.int32), begin, items)
        rows = _in_whole(local, owner[of], tensors, items[of])
        volumes = np.bincount(rows.boxes.tensor, rows.boxes.volumes(), len(columns.shapes))
        for (_, fqn), number in self.numbers.items():
            if volumes[number] != math.prod(columns.shapes[number]):
                have = f"{volumes[number]:.0f} of {math.prod(columns.shapes[number])} elements"
                raise file.damaged(f"the parts of {fqn!r} have {have}")
        return rows


def _in_whole(rows: RowColumns, of: Int64s, tensors: Sequence[_RankTensor], items: Int64s) -> RowColumns:
    """Return boxes in the tensors of ranks as boxes in the whole tensors.

    Args:
        rows: boxes in the tensors of ranks.
        of: position of each box's tensor.
        tensors: the tensors of ranks.
        items: bytes of an element of each box.
    """
    parts = [[part for part in own.divided.parts if part.rank == own.rank] for own in tensors]
    flat = [part for found in parts for part in found]
    numbers, lengths_of = range(len(flat)), [part.lengths for part in flat]
    local = BoxTable.build(numbers, [part.offsets for part in flat], lengths_of, rows.boxes.ndim)
    whole = BoxTable.build(numbers, [part.whole for part in flat], lengths_of, rows.boxes.ndim)
    part_counts = np.array([len(found) for found in parts], np.int64)
    count = part_counts[of]
    row = np.repeat(np.arange(len(of)), count)
    part = ranges((np.cumsum(part_counts) - part_counts)[of], count)
    low = np.maximum(rows.boxes.offsets[row], local.offsets[part])
    high = np.minimum((rows.boxes.offsets + rows.boxes.lengths)[row], (local.offsets + local.lengths)[part])
    kept = np.flatnonzero((high > low).all(axis=1))
    row, part, low, high = row[kept], part[kept], low[kept], high[kept]
    strides = rows.strides[row]
    begin = rows.begin[row] + ((low - rows.boxes.offsets[row]) * strides).sum(axis=1) * items[row]
    boxes = BoxTable(rows.boxes.tensor[row], low - local.offsets[part] + whole.offsets[part], high - low)
    return RowColumns(boxes, rows.file[row], begin, strides)
