"""A foreign checkpoint, and the columns of which a reader makes its catalog."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.formats.decoded import Decoded
from bytecheckpoint.formats.meanings import StoredTensor
from bytecheckpoint.formats.sharded import ShardedValue
from bytecheckpoint.formats.trees import Tree
from bytecheckpoint.lazy import lazy
from bytecheckpoint.representation.boxes import BoxTable, Int64s, row_major, widened
from bytecheckpoint.representation.catalog import (
    FOREIGN,
    SHARED,
    VALUES_SLOT,
    Catalog,
    StorageFile,
    TensorTable,
    row_order,
)
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.shards import TensorKey

__all__ = ["FileSums", "ForeignCheckpoint", "ForeignColumns", "RowColumns"]


@dataclass(frozen=True, slots=True)
class FileSums:
    """CRC32 of byte ranges of foreign files, as columns; `n` ranges.

    Attributes:
        file: position in the catalog's table of files, int32 [n].
        offset: first byte of each range in its file, int64 [n].
        length: bytes of each range, int64 [n].
        crc: CRC32 of each range, uint32 [n].
        archives: file, first byte and length of zip files inside of files, whose directories have CRC32s, int64 [m, 3].
    """

    file: NDArray[np.int32]
    offset: Int64s
    length: Int64s
    crc: NDArray[np.uint32]
    archives: Int64s

    @staticmethod
    def of(rows: Sequence[tuple[int, int, int, int]] = (), archives: Int64s | None = None) -> FileSums:
        """Return the columns of (file, offset, length, crc)."""
        columns = np.array(rows, np.int64).reshape(len(rows), 4)
        return FileSums(
            columns[:, 0].astype(np.int32), columns[:, 1].copy(), columns[:, 2].copy(), columns[:, 3].astype(np.uint32),
            np.zeros((0, 3), np.int64) if archives is None else archives,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Rows of a catalog as columns.

    Attributes:
        boxes: the boxes of the rows.
        file: position of each row's file in the table of files, int32 [n].
        begin: first byte of each row in its file, int64 [n].
        strides: elements between two neighbours, int64 [n, d].
    """

    boxes: BoxTable
    file: NDArray[np.int32]
    begin: Int64s
    strides: Int64s

    def take(self, index: Int64s | NDArray[np.bool_]) -> RowColumns:
        """Return the rows at `index` (positions or a mask), in that order."""
        return RowColumns(self.boxes.take(index), self.file[index], self.begin[index], self.strides[index])

    @staticmethod
    def concat(tables: Sequence[RowColumns]) -> RowColumns:
        """Return all rows, one table after the other."""
        boxes = BoxTable.concat([table.boxes for table in tables])
        return RowColumns(
            boxes,
            np.concatenate([table.file for table in tables]),
            np.concatenate([table.begin for table in tables]),
            np.concatenate([widened(table.strides, boxes.ndim, 1) for table in tables]),
        )

    @staticmethod
    def of_ranges(
        boxes: BoxTable, ranges: tuple[Int64s, Int64s], file: NDArray[np.int32], begin: Int64s, items: Int64s
    ) -> tuple[RowColumns, Int64s]:
        """Return the rows of ranges of elements in boxes, and the number of each row's range.

        Args:
            boxes: the box in which each range lies.
            ranges: row-major number in the box of the first element of each range, and of the one behind it.
            file: file of each range.
            begin: first byte of each range in its file.
            items: bytes of an element of each range.
        """
        found = flat_ranges_to_boxes(boxes.lengths, *ranges)
        of = found.source
        rows = BoxTable(boxes.tensor[of], boxes.offsets[of] + found.offsets, found.lengths)
        first = begin[of] + (found.flat_start - ranges[0][of]) * items[of]
        return RowColumns(rows, file[of], first, row_major(found.lengths)), of


@dataclass
class ForeignColumns:
    """The columns of a catalog in the making.

    Attributes:
        files: table of files.
        keys, dtypes, shapes, requires_grad: facts of each tensor.
        rows: tensor, offsets, lengths, file, first byte and strides of each row.
        aliases: FQN under which a tied tensor is stored, by state and further name.
        owners: rank of each tensor that is a value of one rank, by number.
    """

    files: list[StorageFile] = field(default_factory=list)
    keys: list[TensorKey] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...]]] = field(default_factory=list)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)

    def add_file(self, name: str, size: int, rank: int = 0, state: str = "model") -> int:
        """Add a file to the table; return its position."""
        self.files.append(StorageFile(name, state, rank, size, 0, 0, 0, "", format=FOREIGN))
        return len(self.files) - 1

    def add_tensor(self, state: str, fqn: str, dtype: str, shape: tuple[int, ...], requires_grad: bool = False) -> int:
        """Add a tensor; return its number."""
        self.keys.append(TensorKey(state, fqn))
        self.dtypes.append(dtype)
        self.shapes.append(shape)
        self.requires_grad.append(requires_grad)
        return len(self.keys) - 1

    def add_whole(
        self,
        state: str,
        tensors: Mapping[str, StoredTensor],
        places: Mapping[str, tuple[int, int]],
        owner: int = SHARED,
    ) -> None:
        """Add tensors that lie whole in one storage each; those that are the same view of one storage are tied.

        Args:
            state: state of the tensors.
            tensors: tensors by FQN.
            places: file and first byte of each storage, by key.
            owner: rank whose values the tensors are; SHARED for all ranks.
        """
        first: dict[object, str] = {}
        for fqn, tensor in tensors.items():
            file, begin = places[tensor.storage.key]
            view = (tensor.storage.key, tensor.start, tensor.dtype, tensor.shape, tensor.strides)
            if tensor.span and (stored := first.setdefault(view, fqn)) is not fqn:
                self.aliases.setdefault(state, {})[fqn] = stored
                continue
            number = self.add_tensor(state, fqn, tensor.dtype, tensor.shape, tensor.requires_grad)
            self.owners[number] = owner
            zeros = (0,) * len(tensor.shape)
            self.rows.append((number, zeros, tensor.shape, file, begin + tensor.start, tensor.strides))

    def add_sharded(
        self,
        state: str,
        ranks: Sequence[Mapping[str, ShardedValue]],
        places: Mapping[str, tuple[int, int]],
        label: str,
    ) -> None:
        """Add tensors of which each rank has parts; equal parts of several ranks are taken once.

        Args:
            state: state of the tensors.
            ranks: tensors of each rank, by FQN.
            places: file and first byte of each storage, by key.
            label: address of the files, for messages.

        Raises:
            CorruptCheckpointError: the parts of a tensor contradict each other, or do not add up to it.
        """
        first: dict[str, tuple[int, ShardedValue]] = {}
        volumes: dict[str, int] = {}
        taken: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        for values in ranks:
            for fqn, value in values.items():
                if fqn not in first:
                    number = self.add_tensor(state, fqn, value.dtype, value.shape, value.requires_grad)
                    first[fqn] = number, value
                    volumes[fqn] = 0
                number, other = first[fqn]
                if (value.dtype, value.shape) != (other.dtype, other.shape):
                    raise CorruptCheckpointError(f"{label}: the ranks have different shapes or dtypes of {fqn!r}")
                for offsets, part in value.parts:
                    ends = [o + n for o, n in zip(offsets, part.shape, strict=False)]
                    known = taken.get((fqn, offsets))
                    if (
                        not len(offsets) == len(part.shape) == len(value.shape)
                        or known not in {None, part.shape}
                        or any(end > size for end, size in zip(ends, value.shape, strict=True))
                    ):
                        where = f"a part of {fqn!r} at {list(offsets)}"
                        raise CorruptCheckpointError(f"{label}: {where} does not fit the others, or its tensor")
                    if known is not None:
                        continue
                    taken[fqn, offsets] = part.shape
                    file, begin = places[part.storage.key]
                    volumes[fqn] += math.prod(part.shape)
                    self.rows.append((number, offsets, part.shape, file, begin + part.start, part.strides))
        for fqn, volume in volumes.items():
            number, value = first[fqn]
            if volume != math.prod(value.shape):
                have = f"{volume} of {math.prod(value.shape)} elements"
                raise CorruptCheckpointError(
                    f"{label}: the parts of {fqn!r} have {have}: files of other ranks are needed"
                )

    def add_states(
        self,
        states: Mapping[str, object],
        tree: Tree,
        places: Mapping[str, tuple[int, int]],
        label: str | None = None,
    ) -> dict[str, bytes]:
        """Add the tensors that are in states; return the encoded tree of each.

        Args:
            states: trees by the names of the states.
            tree: encoder of the trees.
            places: file and first byte of each storage, by key.
            label: address of the files, for messages; None leaves out tensors in parts.
        """
        values = {}
        for state, value in states.items():
            values[state] = tree.encode(value)
            self.add_whole(state, tree.tensors, places)
            if label is not None:
                self.add_sharded(state, [tree.sharded], places, label)
        return values

    def rename(self, state: str, places: Mapping[str, tuple[str, str]]) -> None:
        """Give tensors of a state other names.

        Args:
            state: name of the state.
            places: new name and slot of each tensor. Further names of a tied tensor become tensors of their own.
        """
        tied = self.aliases.get(state, {})
        numbers: dict[str, list[int]] = {}
        for number, key in enumerate(self.keys):
            if key.state == state:
                numbers.setdefault(key.fqn, []).append(number)
        rows = {row[0]: row for row in self.rows}
        for name, (fqn, slot) in places.items():
            found = numbers.get(name, [])
            if (first := tied.pop(name, None)) is not None:
                (same,) = numbers[first]
                found = [self.add_tensor(state, fqn, self.dtypes[same], self.shapes[same], self.requires_grad[same])]
                self.rows.append((found[0], *rows[same][1:]))
            for number in found:
                self.keys[number] = TensorKey(state, fqn, slot)

    def add_values(self, state: str, name: str, size: int) -> None:
        """Add the plain values of a state, which are a file."""
        number = self.add_tensor(state, "", "uint8", (size,))
        self.keys[number] = TensorKey(state, "", VALUES_SLOT)
        self.rows.append((number, (0,), (size,), self.add_file(name, size, state=state), 0, (1,)))

    def items(self, tensor: Int64s) -> Int64s:
        """Return the bytes of an element of each of some tensors, by their numbers."""
        return np.array([itemsize(name) for name in self.dtypes], np.int64)[tensor]

    def build(self, info: Mapping[str, Any], columns: RowColumns | None = None) -> Catalog:
        """Return the catalog.

        Args:
            info: facts about the save.
            columns: rows before the others, which are columns already.
        """
        tensor, offsets, lengths, files, begins, steps = zip(*self.rows, strict=True) if self.rows else ((),) * 6
        boxes = BoxTable.build(tensor, offsets, lengths)
        strides = BoxTable.build(tensor, steps, lengths, boxes.ndim).offsets
        rows = RowColumns(boxes, np.array(files, np.int32), np.array(begins, np.int64), strides)
        if columns is not None:
            rows = RowColumns.concat([columns, rows])
        if (order := row_order(rows.boxes)) is not None:
            rows = rows.take(order)
        boxes = rows.boxes
        shapes = BoxTable.build(range(len(self.shapes)), self.shapes, self.shapes, boxes.ndim).lengths
        empty = (boxes.lengths == 0).any(axis=1)
        dense = row_major(boxes.lengths)
        # Along a dimension of one element, and in a row without elements, any stride will do.
        strides = np.where((boxes.lengths > 1) & ~empty[:, None], rows.strides, dense)
        elements = np.where(empty, 0, ((boxes.lengths - 1) * strides).sum(axis=1) + 1)
        catalog = Catalog.build(
            TensorTable.of(
                states=[key.state for key in self.keys],
                fqns=[key.fqn for key in self.keys],
                slots=[key.slot for key in self.keys],
                dtypes=self.dtypes,
                shapes=shapes,
                ndims=np.array([len(shape) for shape in self.shapes], np.int64),
                owner=np.array([self.owners.get(number, SHARED) for number in range(len(self.keys))], np.int32),
                requires_grad=np.array(self.requires_grad, np.bool_),
            ),
            boxes=boxes,
            file=rows.file,
            byte_offset=rows.begin,
            byte_length=elements * self.items(boxes.tensor),
            files=self.files,
            sums=[np.zeros(0, np.uint64)] * len(self.files),
            aliases=self.aliases,
            info=info,
        )
        return replace(catalog, strides=strides) if (strides != dense).any() else catalog


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of another program, as it lies.

    Attributes:
        format: name of the format: "torch-save", "dcp", "safetensors", ...
        columns: the tensors.
        values: the encoded tree of plain values of each state (docs/format-values.md). No file holds these bytes.
        notes: facts that a user should know: values that were left out, sizes that nothing proves.
        rows: rows that are columns already; None: all rows are in `columns`.
        sums: CRC32 of ranges of the files, where the format has them.
        made: files that no folder holds, whose names begin with `VALUES_NAME`, by name: numbers that the program keeps in
            plain values, and an optimizer in tensors; contents that are compressed.
        facts: further facts about the save.
    """

    format: str
    columns: ForeignColumns
    values: Mapping[str, bytes]
    notes: Sequence[str] = ()
    rows: RowColumns | None = None
    sums: FileSums = field(default_factory=FileSums.of)
    made: Mapping[str, bytes | Decoded] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @lazy
    def catalog(self) -> Catalog:
        """The catalog of the tensors. A row has as many bytes as lie between its first and its last element."""
        return self.columns.build({"format": self.format, **self.facts}, self.rows)
