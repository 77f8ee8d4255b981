"""A foreign checkpoint, and the columns of which a reader makes its catalog."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.formats.decoded import Decoded
from bytecheckpoint.formats.meanings import StoredTensor
from bytecheckpoint.formats.rows import RowColumns
from bytecheckpoint.formats.sharded import ShardedValue
from bytecheckpoint.formats.trees import Tree
from bytecheckpoint.lazy import lazy
from bytecheckpoint.representation.boxes import BoxTable, Int64s, row_major, row_major_of
from bytecheckpoint.representation.catalog import (
    FOREIGN,
    SHARED,
    VALUES_SLOT,
    Catalog,
    StorageFile,
    TensorTable,
    row_order,
)
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.shards import TensorKey

__all__ = ["ForeignCheckpoint", "ForeignColumns"]


@dataclass
class ForeignColumns:
    """The columns of a catalog in the making.

    Attributes:
        files: table of files.
        keys, dtypes, shapes, requires_grad: facts of each tensor.
        rows: tensor, offsets, lengths, file, first byte and strides of each row.
        aliases: FQN under which a tied tensor is stored, by state and further name.
        owners: rank of each tensor that is a value of one rank, by number.
        places: file and first byte of each storage whose tensors are added, by key.
    """

    files: list[StorageFile] = field(default_factory=list)
    keys: list[TensorKey] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...]]] = field(default_factory=list)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

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

    def add_whole(self, state: str, tensors: Mapping[str, StoredTensor], owner: int = SHARED) -> None:
        """Add tensors that lie whole in one storage each; those that are the same view of one storage are tied.

        Args:
            state: state of the tensors.
            tensors: tensors by FQN.
            owner: rank whose values the tensors are; SHARED for all ranks.
        """
        first: dict[object, str] = {}
        for fqn, tensor in tensors.items():
            file, begin = self.places[tensor.storage.key]
            view = (tensor.storage.key, tensor.start, tensor.dtype, tensor.shape, tensor.strides)
            if tensor.span and (stored := first.setdefault(view, fqn)) is not fqn:
                self.aliases.setdefault(state, {})[fqn] = stored
                continue
            number = self.add_tensor(state, fqn, tensor.dtype, tensor.shape, tensor.requires_grad)
            self.owners[number] = owner
            zeros = (0,) * len(tensor.shape)
            self.rows.append((number, zeros, tensor.shape, file, begin + tensor.start, tensor.strides))

    def add_sharded(self, state: str, ranks: Sequence[Mapping[str, ShardedValue]], label: str) -> None:
        """Add tensors of which each rank has parts; equal parts of several ranks are taken once.

        Args:
            state: state of the tensors.
            ranks: tensors of each rank, by FQN.
            label: address of the files, for messages.

        Raises:
            CorruptCheckpointError: the parts of a tensor contradict each other, or do not add up to it.
        """
        held: dict[str, list[ShardedValue]] = {}
        for values in ranks:
            for fqn, value in values.items():
                held.setdefault(fqn, []).append(value)
        for fqn, of_ranks in held.items():
            value, parts = of_ranks[0], dict[tuple[int, ...], StoredTensor]()
            if any((other.dtype, other.shape) != (value.dtype, value.shape) for other in of_ranks):
                raise CorruptCheckpointError(f"{label}: the ranks have different shapes or dtypes of {fqn!r}")
            for offsets, part in itertools.chain.from_iterable(other.parts for other in of_ranks):
                if (
                    not len(offsets) == len(part.shape) == len(value.shape)
                    or parts.setdefault(offsets, part).shape != part.shape
                    or any(o + n > size for o, n, size in zip(offsets, part.shape, value.shape, strict=True))
                ):
                    where = f"a part of {fqn!r} at {list(offsets)}"
                    raise CorruptCheckpointError(f"{label}: {where} does not fit the others, or its tensor")
            have, whole = sum(math.prod(part.shape) for part in parts.values()), math.prod(value.shape)
            if have != whole:
                text = f"the parts of {fqn!r} have {have} of {whole} elements: files of other ranks are needed"
                raise CorruptCheckpointError(f"{label}: {text}")
            number = self.add_tensor(state, fqn, value.dtype, value.shape, value.requires_grad)
            for offsets, part in parts.items():
                file, begin = self.places[part.storage.key]
                self.rows.append((number, offsets, part.shape, file, begin + part.start, part.strides))

    def add_states(self, states: Mapping[str, object], tree: Tree, label: str | None = None) -> dict[str, bytes]:
        """Add the tensors that are in states; return the encoded tree of each.

        Args:
            states: trees by the names of the states.
            tree: encoder of the trees.
            label: address of the files, for messages; None leaves out tensors in parts.
        """
        values, taken = {}, dict[str, set[str]]()
        for key in self.keys:
            taken.setdefault(key.state, set()).add(key.fqn)
        for state, value in states.items():
            values[state] = tree.encode(value, taken.get(state, ()))
            self.add_whole(state, tree.tensors)
            if label is not None:
                self.add_sharded(state, [tree.sharded], label)
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

    def small_tensors(self, state: str, most: int) -> set[str]:
        """Return the names of a state's tensors of at most `most` bytes that lie whole and dense in one of `self.rows`."""
        rows: dict[int, list[Any]] = {}
        for row in self.rows:
            rows.setdefault(row[0], []).append(row)
        found = set()
        for number, key in enumerate(self.keys):
            shape, lying = self.shapes[number], rows.get(number, ())
            dense = len(lying) == 1 and tuple(lying[0][5]) == row_major_of(shape)
            if key.state == state and dense and math.prod(shape) * itemsize(self.dtypes[number]) <= most:
                found.add(key.fqn)
        return found | {alias for alias, name in self.aliases.get(state, {}).items() if name in found}

    def take(
        self, state: str, names: Collection[str], rows: RowColumns | None
    ) -> tuple[dict[str, tuple[str, tuple[int, ...], str, int]], RowColumns | None]:
        """Take tensors that lie whole in one row out of a state.

        Args:
            state: name of the state.
            names: names of the tensors.
            rows: rows that are columns already.

        Returns:
            Dtype, shape, file and first byte of each, by name; and `rows` without theirs.
        """
        tied = self.aliases.get(state, {})
        numbers = {key.fqn: number for number, key in enumerate(self.keys) if key.state == state}
        chosen = {name: numbers[tied.pop(name, name)] for name in names}
        places = {row[0]: (row[3], row[4]) for row in self.rows}
        if rows is not None:
            columns = (rows.boxes.tensor.tolist(), rows.file.tolist(), rows.begin.tolist())
            places |= {tensor: (file, begin) for tensor, file, begin in zip(*columns, strict=True)}
        found = {}
        for name, number in chosen.items():
            file, begin = places[number]
            found[name] = (self.dtypes[number], self.shapes[number], self.files[file].name, begin)
        gone = {*chosen.values()}
        stays = [number for number in range(len(self.keys)) if number not in gone]
        new = np.full(len(self.keys), -1, np.int64)
        new[stays] = np.arange(len(stays))
        self.keys = [self.keys[number] for number in stays]
        self.dtypes = [self.dtypes[number] for number in stays]
        self.shapes = [self.shapes[number] for number in stays]
        self.requires_grad = [self.requires_grad[number] for number in stays]
        self.rows = [(int(new[row[0]]), *row[1:]) for row in self.rows if row[0] not in gone]
        self.owners = {int(new[number]): owner for number, owner in self.owners.items() if number not in gone}
        if rows is not None:
            rows = rows.take(new[rows.boxes.tensor] >= 0)
            rows = replace(rows, boxes=replace(rows.boxes, tensor=new[rows.boxes.tensor]))
        return found, rows

    def add_values(self, state: str, name: str, size: int) -> None:
        """Add the plain values of a state, which are a file."""
        number = self.add_tensor(state, "", "uint8", (size,))
        self.keys[number] = TensorKey(state, "", VALUES_SLOT)
        self.rows.append((number, (0,), (size,), self.add_file(name, size, state=state), 0, (1,)))

    def items(self, tensor: Int64s) -> Int64s:
        """Return the bytes of an element of each of some tensors, by their numbers."""
        return np.array([itemsize(name) for name in self.dtypes], np.int64)[tensor]

    def build(self, info: Mapping[str, Any], columns: RowColumns | None = None) -> Catalog:
        """Return the catalog, of the rows in `columns` and of those that were added."""
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
        sums: file, first byte, length and CRC32 of ranges of the files, where the format has them, int64 [n, 4]; -1 instead
            of the CRC32 of a zip file inside of a file, whose directory has CRC32s.
        made: files that no folder holds, whose names begin with `VALUES_NAME`, by name: numbers that the program keeps in
            plain values, and an optimizer in tensors; contents that are compressed.
        facts: further facts about the save.
    """

    format: str
    columns: ForeignColumns
    values: Mapping[str, bytes]
    notes: Sequence[str] = ()
    rows: RowColumns | None = None
    sums: Int64s = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    made: Mapping[str, bytes | Decoded] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @lazy
    def catalog(self) -> Catalog:
        """The catalog of the tensors. A row has as many bytes as lie between its first and its last element."""
        return self.columns.build({"format": self.format, **self.facts}, self.rows)
