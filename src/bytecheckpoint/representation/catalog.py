"""The catalog: the description of a whole checkpoint, as columns (ByteCheckpoint, section 3.2).

The catalog has two tables. A *tensor* is a (state, fqn, slot, owner). A *row* is one stored box of a tensor with the
file and the bytes that hold it: the paper's TensorShardToBasicByteMap and LoaderShardToByteMap in one. No Python loop
runs over rows; loops over tensors run inside one C call per column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.lazy import lazy
from bytecheckpoint.representation.boxes import BoxTable, Int64s, widened
from bytecheckpoint.representation.checksums import block_count
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.string_column import StringColumn
from bytecheckpoint.representation.tilings import Tilings

__all__ = [
    "DELTA",
    "FOREIGN",
    "MAX_DIMS",
    "PUBLISHED",
    "SHARED",
    "VALUES_SLOT",
    "Catalog",
    "CatalogSummary",
    "StorageFile",
    "TensorTable",
    "published_facts",
    "row_order",
]

VALUES_SLOT: Final = "//values"
"""Slot of the uint8 tensor that holds a state's encoded tree of plain values; its FQN is ""."""

SHARED: Final = -1
"""The owner of a tensor that all ranks share."""

FOREIGN: Final = "foreign"
"""The format of files that other programs wrote, of which only the rows are known."""

DELTA: Final = "delta"
"""The format of files that are kept as differences from an earlier file."""

PUBLISHED: Final = "published"
"""Name of a publisher's facts in the metadata of a version."""

MAX_DIMS: Final = 64
"""Largest number of dimensions of a tensor, as in torch."""


def published_facts(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the publisher's facts in the metadata of a checkpoint; a name of the user's own is none."""
    facts = metadata.get(PUBLISHED)
    return {key: value for key, value in facts.items() if isinstance(value, str)} if isinstance(facts, dict) else {}


@dataclass(frozen=True, slots=True)
class StorageFile:
    """One row of the table of files.

    Attributes:
        name: name relative to the checkpoint ("model/rank-00003.<generation>.safetensors"), or a URI.
        state: name of the state that the file's tensors belong to.
        rank: the rank that wrote the file.
        size: size in bytes.
        data_offset: first byte of the data section.
        header_sum: xxh3_64 of the bytes before `data_offset`.
        block_bytes: size of a checksum block of the data section; 0 when there are no sums.
        generation: generation of the save that wrote the file; "" for a foreign file.
        format: format of the file.
        stored: bytes that the file takes in the storage, if it is kept as differences; `size` and all else is of the
            decoded file then. 0 for a file that is stored as it is.
    """

    name: str
    state: str
    rank: int
    size: int
    data_offset: int
    header_sum: int
    block_bytes: int
    generation: str
    format: str = "safetensors"
    stored: int = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes that the file takes in the storage."""
        return self.stored or self.size

    @property
    def blocks(self) -> int:
        """Number of checksum blocks of the data section."""
        return block_count(self.size - self.data_offset, self.block_bytes) if self.block_bytes else 0


@dataclass(frozen=True, slots=True)
class CatalogSummary:
    """The facts of a checkpoint for which no rows are needed.

    Attributes:
        states: names of the states, in the order of their first tensors.
        tensors: number of tensors, plain values not counted.
        files: table of files.
        info: facts about the save.
    """

    states: Sequence[str]
    tensors: int
    files: Sequence[StorageFile]
    info: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class TensorTable:
    """The tensors of one checkpoint as columns; `t` tensors of at most `d` dimensions.

    Attributes:
        state, fqn, slot, dtype, device: one string per tensor.
        shapes: global shape of each tensor, padded on the right with 1, int64 [t, d].
        ndims: number of dimensions of each tensor, int64 [t].
        owner: rank that has the tensor as its own value, or -1 when all ranks share it, int32 [t].
        requires_grad: bool [t].
    """

    state: StringColumn
    fqn: StringColumn
    slot: StringColumn
    dtype: StringColumn
    device: StringColumn
    shapes: Int64s
    ndims: Int64s
    owner: NDArray[np.int32]
    requires_grad: NDArray[np.bool_]

    @staticmethod
    def of(
        *,
        states: Sequence[str],
        fqns: Sequence[str],
        slots: Sequence[str],
        dtypes: Sequence[str],
        devices: Sequence[str] | None = None,
        shapes: Int64s,
        ndims: Int64s,
        owner: NDArray[np.int32],
        requires_grad: NDArray[np.bool_],
    ) -> TensorTable:
        """Build the table from lists of strings and the other columns; without `devices` all tensors are of the CPU."""
        devices = ["cpu"] * len(fqns) if devices is None else devices
        state, fqn, slot, dtype, device = map(StringColumn.of, (states, fqns, slots, dtypes, devices))
        return TensorTable(state, fqn, slot, dtype, device, shapes, ndims, owner, requires_grad)


@dataclass(frozen=True, eq=False)
class Catalog(TensorTable):
    """All tensors, rows and files of one checkpoint. Immutable; `n` rows.

    Attributes:
        boxes: the n stored boxes, sorted by (tensor, offsets); every tensor has at least one.
        file: position in `files`, int32 [n].
        byte_offset: first byte of each row, from the start of its file, int64 [n].
        byte_length: number of bytes of each row, int64 [n].
        files: table of files.
        file_sums: sums of the blocks of each file, uint64.
        aliases: FQN under which a tied tensor is stored, by state and further name.
        info: plain JSON: world size, framework, layout, creation time, package versions.
        files_read: mask of the files whose rows and sums are here, all of each file's (of tiles those that a load wants);
            None: all files. Tensors and files are complete in any case.
        tilings: further rows, of boxes that many files have in common but for their place. A catalog that was read has
            none: its boxes have a row each.
        strides: elements of the file from one element of a row to the next along each dimension, int64 [n, d]; only rows
            of foreign files need them. None: all rows are row-major.
        fingerprints: fingerprint of each of the first tensors (`representation/fingerprints.py`), uint64 [p, 2]; the others
            are values of states that are neither modules nor optimizers. None if the save made none.
    """

    boxes: BoxTable
    file: NDArray[np.int32]
    byte_offset: Int64s
    byte_length: Int64s
    files: tuple[StorageFile, ...]
    file_sums: tuple[NDArray[np.uint64], ...]
    aliases: Mapping[str, Mapping[str, str]]
    info: Mapping[str, Any]
    files_read: NDArray[np.bool_] | None = None
    tilings: Tilings | None = None
    strides: Int64s | None = None
    fingerprints: NDArray[np.uint64] | None = None

    @staticmethod
    def build(
        tensors: TensorTable,
        *,
        boxes: BoxTable,
        file: NDArray[np.int32],
        byte_offset: Int64s,
        byte_length: Int64s,
        files: Sequence[StorageFile],
        sums: Sequence[NDArray[np.uint64]],
        aliases: Mapping[str, Mapping[str, str]] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Catalog:
        """Build a catalog from its columns, which the class describes; the rows may have any order."""
        if (order := row_order(boxes)) is not None:
            boxes, file, byte_offset, byte_length = (
                boxes.take(order),
                file[order],
                byte_offset[order],
                byte_length[order],
            )
        width = max(boxes.ndim, tensors.shapes.shape[1], 1)
        columns = {column.name: getattr(tensors, column.name) for column in fields(TensorTable)}
        return Catalog(
            **{**columns, "shapes": widened(tensors.shapes, width, 1)},
            boxes=boxes.widened(width),
            file=file,
            byte_offset=byte_offset,
            byte_length=byte_length,
            files=tuple(files),
            file_sums=tuple(sums),
            aliases=aliases or {},
            info=info or {},
        )

    def with_tilings(self, tilings: Tilings | None) -> Catalog:
        """Return the catalog with further rows, of tilings."""
        return self if tilings is None else replace(self, tilings=tilings.widened(self.boxes.ndim))

    def expanded(self, wanted: BoxTable | None = None) -> Catalog:
        """Return the same catalog with a row for each box, or of tiles only for those near wanted boxes."""
        if self.tilings is None:
            return self
        found = self.tilings.rows(np.arange(len(self.tilings.file)), wanted)
        boxes = BoxTable.concat([self.boxes, found.boxes])
        order = row_order(boxes)
        at = slice(None) if order is None else order
        return replace(
            self,
            boxes=boxes if order is None else boxes.take(order),
            file=np.concatenate([self.file, found.file])[at],
            byte_offset=np.concatenate([self.byte_offset, found.byte_offset])[at],
            byte_length=np.concatenate([self.byte_length, found.byte_length])[at],
            tilings=None,
        )

    @lazy
    def is_foreign(self) -> bool:
        """True if other programs wrote some files: rows may overlap there in bytes, and leave bytes out."""
        return any(file.format == FOREIGN for file in self.files)

    @lazy
    def has_differences(self) -> bool:
        """True if files are kept as differences from those of an earlier checkpoint."""
        return any(file.format == DELTA for file in self.files)

    @lazy
    def published(self) -> Mapping[str, str]:
        """The publisher's facts about a version: its id, that of its base, and so on; empty for other checkpoints."""
        return published_facts(self.info.get("metadata", {}))

    @lazy
    def has_differences_beside(self) -> bool:
        """True if the files are whole, and their differences from those of an earlier version may lie beside them."""
        return bool(self.published.get("before")) and not self.has_differences

    @lazy
    def runs(self) -> tuple[NDArray[np.int32], Int64s, Int64s]:
        """File, first byte and number of bytes of each row, then of each tile, int32 and int64 [n + i]."""
        tiles = self.tilings
        if tiles is None:
            return self.file, self.byte_offset, self.byte_length
        return (
            np.concatenate([self.file, tiles.file]),
            np.concatenate([self.byte_offset, tiles.byte_offset]),
            np.concatenate([self.byte_length, tiles.byte_length]),
        )

    def with_files(
        self,
        files: Sequence[StorageFile],
        sums: Sequence[NDArray[np.uint64]],
        info: Mapping[str, Any] | None = None,
    ) -> Catalog:
        """Return the same tensors and rows in other files of equal layout: the next save by a cached plan."""
        assert [f.data_offset for f in files] == [f.data_offset for f in self.files], "the files have another layout"
        new_info = self.info if info is None else info
        return replace(self, files=tuple(files), file_sums=tuple(sums), info=new_info)

    @property
    def count(self) -> int:
        """Number of tensors."""
        return int(self.ndims.shape[0])

    def key(self, i: int) -> TensorKey:
        """Return the key of tensor `i`; tensors that differ only in their owner have equal keys."""
        return TensorKey(self.state[i], self.fqn[i], self.slot[i])

    def keys(self) -> list[TensorKey]:
        """Return the keys of all tensors, in order."""
        return list(map(TensorKey, self.state.to_list(), self.fqn.to_list(), self.slot.to_list()))

    def shape(self, i: int) -> tuple[int, ...]:
        """Return the global shape of tensor `i`."""
        return tuple(self._shape_rows[i][: self._ndim_list[i]])

    @lazy
    def _shape_rows(self) -> list[list[int]]:
        rows: list[list[int]] = self.shapes.tolist()
        return rows

    @lazy
    def _ndim_list(self) -> list[int]:
        ndims: list[int] = self.ndims.tolist()
        return ndims

    def states(self) -> list[str]:
        """Return the states of the checkpoint, in the order of their first tensors."""
        return [self.state.values[code] for code in dict.fromkeys(self.state.codes.tolist())]

    def summary(self) -> CatalogSummary:
        """Return the facts of the checkpoint for which no rows are needed."""
        values = self.slot.codes == self.slot.code_of(VALUES_SLOT)
        return CatalogSummary(self.states(), int((~values).sum()), self.files, self.info)

    def of_state(self, state: str) -> Int64s:
        """Return the numbers of all tensors of `state`, ascending, with those that hold plain values."""
        return np.flatnonzero(self.state.codes == self.state.code_of(state))

    def fqns(self, state: str) -> list[str]:
        """Return the distinct FQNs of the tensors of `state`, in order, without aliases and plain values."""
        chosen = (self.state.codes == self.state.code_of(state)) & (self.slot.codes != self.slot.code_of(VALUES_SLOT))
        return [self.fqn.values[code] for code in dict.fromkeys(self.fqn.codes[chosen].tolist())]

    def sums(self, file_index: int) -> NDArray[np.uint64]:
        """Return the sums of the blocks of one file's data section, shape [blocks]."""
        assert self.files_read is None or self.files_read[file_index], "the rows of this file were not read"
        return self.file_sums[file_index]

    @lazy
    def untiled(self) -> NDArray[np.bool_]:
        """Mask of the files whose data section the rows do not cover exactly once, shape [files].

        This assumes that every row lies inside its file.
        """
        row_file, row_begin, row_length = self.runs
        first = np.array([f.data_offset for f in self.files], np.int64)
        size = np.array([f.size for f in self.files], np.int64)
        untiled: NDArray[np.bool_] = first != size
        if not len(row_file):
            return untiled if self.files_read is None else untiled & self.files_read
        order = _file_order(row_file, row_begin, row_length, size)
        file, begin = row_file[order], row_begin[order]
        end = begin + row_length[order]
        starts_file = np.ones(len(file), np.bool_)
        starts_file[1:] = file[1:] != file[:-1]
        expected_begin = np.empty(len(file), np.int64)
        expected_begin[1:] = end[:-1]
        expected_begin[starts_file] = first[file[starts_file]]
        last = np.flatnonzero(np.append(starts_file[1:], True))
        untiled[file[last]] = end[last] != size[file[last]]
        untiled[file[begin != expected_begin]] = True
        return untiled if self.files_read is None else untiled & self.files_read

    def find(self, keys: Sequence[TensorKey], owner: int = SHARED) -> Int64s:
        """Return the number of the tensor of each key, -1 for keys without tensor; aliases are resolved.

        Args:
            keys: keys to look up.
            owner: the rank whose own values to find, or -1 for values that all ranks share.
        """
        if not keys:
            return np.zeros(0, np.int64)
        states, fqns, slots = zip(*keys, strict=True)
        found = self._lookup(states, fqns, slots, owner)
        if self.aliases:
            absent = np.flatnonzero(found < 0)
            stored = [self.aliases.get(states[i], {}).get(fqns[i]) for i in absent.tolist()]
            tied = absent[np.fromiter((name is not None for name in stored), np.bool_, len(stored))]
            found[tied] = self._lookup(
                [states[i] for i in tied.tolist()],
                [name for name in stored if name is not None],
                [slots[i] for i in tied.tolist()],
                owner,
            )
        return found

    def find_one(self, key: TensorKey, owner: int = SHARED) -> int:
        """Return the number of the tensor of one key, as `find` does. For one key this is some 50 times as fast."""
        found = self._lookup_one(key, owner)
        if found < 0 and self.aliases:
            name = self.aliases.get(key.state, {}).get(key.fqn)
            if name is not None:
                return self._lookup_one(key._replace(fqn=name), owner)
        return found

    def _lookup_one(self, key: TensorKey, owner: int) -> int:
        state, fqn, slot = self.state.code_of(key.state), self.fqn.code_of(key.fqn), self.slot.code_of(key.slot)
        number = self._owner_numbers.get(owner, -1)
        if min(state, fqn, slot, number) < 0:
            return -1
        code = (state * len(self.slot.values) + slot) * len(self.fqn.values) + fqn
        wanted = code * max(len(self._owners), 1) + number
        composites, tensors = self._by_composite
        place = int(composites.searchsorted(wanted))
        return int(tensors[place]) if place < len(composites) and composites[place] == wanted else -1

    def _lookup(self, states: Sequence[str], fqns: Sequence[str], slots: Sequence[str], owner: int) -> Int64s:
        state, fqn, slot = self.state.codes_of(states), self.fqn.codes_of(fqns), self.slot.codes_of(slots)
        numbers = np.searchsorted(self._owners, [owner])
        known = (state >= 0) & (fqn >= 0) & (slot >= 0) & bool(np.isin(owner, self._owners))
        wanted = self._compose(state, fqn, slot, np.broadcast_to(numbers, state.shape))
        composites, tensors = self._by_composite
        place = np.minimum(np.searchsorted(composites, wanted), max(len(composites) - 1, 0))
        found = np.full(len(states), -1, np.int64)
        if len(composites):
            hit = known & (composites[place] == wanted)
            found[hit] = tensors[place[hit]]
        return found

    def _compose(self, state: Int64s, fqn: Int64s, slot: Int64s, owner: Int64s) -> Int64s:
        """Return one integer per tensor, all different (states x slots x fqns x owners stays below 2**63)."""
        code = (state * len(self.slot.values) + slot) * len(self.fqn.values) + fqn
        return np.asarray(code * max(len(self._owners), 1) + owner, np.int64)

    @lazy
    def _owners(self) -> NDArray[np.int32]:
        return np.unique(self.owner)

    @lazy
    def _owner_numbers(self) -> dict[int, int]:
        return {owner: number for number, owner in enumerate(self._owners.tolist())}

    @lazy
    def _by_composite(self) -> tuple[Int64s, Int64s]:
        """The composite integers of all tensors, ascending, and the number of each one's tensor."""
        owners = np.searchsorted(self._owners, self.owner)
        composites = self._compose(self.state.codes, self.fqn.codes, self.slot.codes, owners)
        order = np.argsort(composites, kind="stable")
        return composites[order], order

    def has_duplicates(self) -> bool:
        """Return whether two tensors have the same state, FQN, slot and owner, which no sound catalog has."""
        composites, _ = self._by_composite
        return bool((composites[1:] == composites[:-1]).any())


def row_order(boxes: BoxTable) -> Int64s | None:
    """Return the permutation that sorts rows by (tensor, offsets), or None when the rows are sorted."""
    columns = [boxes.tensor, *boxes.offsets.T]
    sorted_so_far = np.ones(max(len(boxes) - 1, 0), np.bool_)
    tie = sorted_so_far.copy()
    for column in columns:
        sorted_so_far &= ~tie | (column[1:] >= column[:-1])
        tie &= column[1:] == column[:-1]
    if sorted_so_far.all():
        return None
    return np.lexsort(columns[::-1])


def _file_order(file: NDArray[np.int32], begin: Int64s, length: Int64s, size: Int64s) -> Int64s:
    """Return the permutation that sorts rows by (file, first byte), empty rows first among equals."""
    place = 2 * begin + (length > 0)
    if size.astype(np.float64).sum() >= 2.0**61:  # one number line for all files would be too long
        return np.lexsort((place, file))
    # Rows are sorted by tensor: in sorted runs, which a stable sort merges.
    return np.argsort((2 * (np.cumsum(size) - size + np.arange(len(size))))[file] + place, kind="stable")
