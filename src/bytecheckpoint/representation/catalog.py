"""The catalog: everything that a checkpoint says about itself, as columns (ByteCheckpoint, section 3.2).

Two tables. A *tensor* is a (kind, fqn, slot, owner); a *row* is one stored box of a tensor, and says which bytes of
which file hold it: the paper's TensorShardToBasicByteMap and LoaderShardToByteMap in one. Nothing here loops over rows
in Python; what loops over tensors does so inside one C call per column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.checksums import block_count
from bytecheckpoint.representation.shards import TensorKey

__all__ = ["SHARED", "VALUES_SLOT", "Catalog", "Names", "StorageFile", "row_order"]

VALUES_SLOT: Final = "//values"
"""Slot of the uint8 tensor that holds a kind's encoded tree of plain values, under the FQN ""."""

SHARED: Final = -1
"""The owner of a tensor that all ranks share."""


@dataclass(frozen=True, slots=True)
class StorageFile:
    """One row of the table of files.

    Attributes:
        name: relative to the checkpoint ("model/rank-00003.<generation>.safetensors"), or a URI.
        kind: the kind that it holds.
        rank: the rank that wrote it.
        size: its size in bytes.
        data_offset: first byte of its data section.
        header_sum: xxh3_64 of the bytes before `data_offset`.
        block_bytes: size of a checksum block of the data section; 0 when there are no sums.
        generation: of the save that wrote it; "" for a foreign file.
        format: how to read it.
    """

    name: str
    kind: str
    rank: int
    size: int
    data_offset: int
    header_sum: int
    block_bytes: int
    generation: str
    format: str = "safetensors"

    @property
    def blocks(self) -> int:
        """Number of checksum blocks of the data section."""
        return block_count(self.size - self.data_offset, self.block_bytes) if self.block_bytes else 0


class Names:
    """A column of strings, most of them repeated: `codes[i]` is the place of row i's string in `values`.

    Attributes:
        codes: int64, shape [t].
        values: the distinct strings.
    """

    __slots__ = ("_index", "codes", "values")

    def __init__(self, codes: Int64s, values: list[str]) -> None:
        self.codes = codes
        self.values = values
        self._index: dict[str, int] | None = None

    @staticmethod
    def of(column: Sequence[str]) -> Names:
        """The column with these strings, in order."""
        names = Names(np.zeros(len(column), np.int64), list(dict.fromkeys(column)))
        names.codes = names.codes_of(column)
        return names

    def codes_of(self, wanted: Sequence[str]) -> Int64s:
        """The code of each of `wanted`, -1 where the column does not have it."""
        if self._index is None:
            self._index = {value: code for code, value in enumerate(self.values)}
        return np.fromiter(map(self._index.get, wanted, repeat(-1)), np.int64, len(wanted))

    def code_of(self, wanted: str) -> int:
        """The code of `wanted`, -1 where the column does not have it."""
        if self._index is None:
            self._index = {value: code for code, value in enumerate(self.values)}
        return self._index.get(wanted, -1)

    def __getitem__(self, i: int) -> str:
        return self.values[int(self.codes[i])]

    def to_list(self) -> list[str]:
        """The strings, in order."""
        return [self.values[code] for code in self.codes.tolist()]


@dataclass(frozen=True, eq=False)
class Catalog:
    """All tensors, rows and files of one checkpoint. Immutable; `t` tensors, `n` rows, at most `d` dimensions.

    Attributes:
        kind, fqn, slot, dtype, device: one string per tensor.
        shapes: int64, shape [t, d], padded on the right with 1.
        ndims: int64, shape [t].
        owner: int32, shape [t]: the rank whose own value the tensor is, or -1 when all ranks share it.
        requires_grad: bool, shape [t].
        boxes: the n stored boxes, sorted by (tensor, offsets); every tensor has at least one.
        file: int32, shape [n]: place in `files`.
        byte_offset: int64, shape [n], from the start of the file.
        byte_length: int64, shape [n].
        files: the table of files.
        file_sums: per file, the sums of its blocks, uint64.
        aliases: by kind, from each further name of a tied tensor to the FQN under which it is stored.
        info: plain JSON: world size, framework, layout, creation time, package versions.
    """

    kind: Names
    fqn: Names
    slot: Names
    dtype: Names
    device: Names
    shapes: Int64s
    ndims: Int64s
    owner: NDArray[np.int32]
    requires_grad: NDArray[np.bool_]
    boxes: BoxTable
    file: NDArray[np.int32]
    byte_offset: Int64s
    byte_length: Int64s
    files: tuple[StorageFile, ...]
    file_sums: tuple[NDArray[np.uint64], ...]
    aliases: Mapping[str, Mapping[str, str]]
    info: Mapping[str, Any]

    @classmethod
    def from_columns(
        cls,
        *,
        kinds: Sequence[str],
        fqns: Sequence[str],
        slots: Sequence[str],
        dtypes: Sequence[str],
        shapes: Int64s,
        ndims: Int64s,
        owner: NDArray[np.int32],
        requires_grad: NDArray[np.bool_],
        devices: Sequence[str] | None = None,
        boxes: BoxTable,
        file: NDArray[np.int32],
        byte_offset: Int64s,
        byte_length: Int64s,
        files: Sequence[StorageFile],
        sums: Sequence[NDArray[np.uint64]],
        aliases: Mapping[str, Mapping[str, str]] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Catalog:
        """A catalog from its columns; rows may come in any order, see the class for what each column is."""
        order = row_order(boxes)
        if order is not None:
            boxes, file, byte_offset, byte_length = (
                boxes.take(order),
                file[order],
                byte_offset[order],
                byte_length[order],
            )
        width = max(boxes.ndim, shapes.shape[1], 1)
        return cls(
            kind=Names.of(kinds),
            fqn=Names.of(fqns),
            slot=Names.of(slots),
            dtype=Names.of(dtypes),
            device=Names.of(devices if devices is not None else ["cpu"] * len(fqns)),
            shapes=np.pad(shapes, ((0, 0), (0, width - shapes.shape[1])), constant_values=1),
            ndims=ndims,
            owner=owner,
            requires_grad=requires_grad,
            boxes=boxes.widened(width),
            file=file,
            byte_offset=byte_offset,
            byte_length=byte_length,
            files=tuple(files),
            file_sums=tuple(sums),
            aliases=aliases or {},
            info=info or {},
        )

    def with_files(
        self,
        files: Sequence[StorageFile],
        sums: Sequence[NDArray[np.uint64]],
        info: Mapping[str, Any] | None = None,
    ) -> Catalog:
        """The same tensors and rows in other files of the same layout: how a cached plan makes the next catalog."""
        assert [f.data_offset for f in files] == [f.data_offset for f in self.files], "the files have another layout"
        new_info = self.info if info is None else info
        return replace(self, files=tuple(files), file_sums=tuple(sums), info=new_info)

    @property
    def count(self) -> int:
        """Number of tensors."""
        return int(self.ndims.shape[0])

    def key(self, i: int) -> TensorKey:
        """The key of tensor `i`; tensors that differ only in their owner have equal keys."""
        return TensorKey(self.kind[i], self.fqn[i], self.slot[i])

    def keys(self) -> list[TensorKey]:
        """The keys of all tensors, in order."""
        return list(map(TensorKey, self.kind.to_list(), self.fqn.to_list(), self.slot.to_list()))

    def shape(self, i: int) -> tuple[int, ...]:
        """The global shape of tensor `i`."""
        return tuple(self._shape_rows[i][: self._ndim_list[i]])

    @cached_property
    def _shape_rows(self) -> list[list[int]]:
        rows: list[list[int]] = self.shapes.tolist()
        return rows

    @cached_property
    def _ndim_list(self) -> list[int]:
        ndims: list[int] = self.ndims.tolist()
        return ndims

    def kinds(self) -> list[str]:
        """The kinds that the checkpoint holds, in the order of their first tensors."""
        return [self.kind.values[code] for code in dict.fromkeys(self.kind.codes.tolist())]

    def of_kind(self, kind: str) -> Int64s:
        """The numbers of the tensors of `kind`, ascending, those that hold plain values included."""
        return np.flatnonzero(self.kind.codes == self.kind.codes_of([kind])[0])

    def fqns(self, kind: str) -> list[str]:
        """The distinct FQNs of the tensors of `kind` in order of tensors, without aliases and plain values."""
        chosen = (self.kind.codes == self.kind.codes_of([kind])[0]) & (
            self.slot.codes != self.slot.codes_of([VALUES_SLOT])[0]
        )
        return [self.fqn.values[code] for code in dict.fromkeys(self.fqn.codes[chosen].tolist())]

    def sums(self, file_index: int) -> NDArray[np.uint64]:
        """The sums of the blocks of one file's data section, shape [blocks]."""
        return self.file_sums[file_index]

    @cached_property
    def untiled(self) -> NDArray[np.bool_]:
        """Which files the rows do not cover exactly once, shape [files]; every row lies inside its file."""
        first = np.array([f.data_offset for f in self.files], np.int64)
        size = np.array([f.size for f in self.files], np.int64)
        holes: NDArray[np.bool_] = first != size
        if not len(self.file):
            return holes
        order = _file_order(self.file, self.byte_offset, self.byte_length, size)
        file, begin = self.file[order], self.byte_offset[order]
        end = begin + self.byte_length[order]
        starts = np.ones(len(file), np.bool_)
        starts[1:] = file[1:] != file[:-1]
        due = np.empty(len(file), np.int64)
        due[1:] = end[:-1]
        due[starts] = first[file[starts]]
        last = np.flatnonzero(np.append(starts[1:], True))
        holes[file[last]] = end[last] != size[file[last]]
        holes[file[begin != due]] = True
        return holes

    def find(self, keys: Sequence[TensorKey], owner: int = SHARED) -> Int64s:
        """The number of the tensor for each of `keys`, -1 where there is none; any name of a tied tensor finds it.

        Args:
            keys: what to look for.
            owner: the rank whose own values are meant, -1 for those that all ranks share.
        """
        if not keys:
            return np.zeros(0, np.int64)
        kinds, fqns, slots = zip(*keys, strict=True)
        found = self._lookup(kinds, fqns, slots, owner)
        if self.aliases:
            absent = np.flatnonzero(found < 0)
            other = [self.aliases.get(kinds[i], {}).get(fqns[i]) for i in absent.tolist()]
            tied = np.fromiter((name is not None for name in other), np.bool_, len(other))
            again = absent[tied]
            found[again] = self._lookup(
                [kinds[i] for i in again.tolist()],
                [name for name in other if name is not None],
                [slots[i] for i in again.tolist()],
                owner,
            )
        return found

    def find_one(self, key: TensorKey, owner: int = SHARED) -> int:
        """`find` for one key: a few microseconds, where a call for columns of length one takes a hundred."""
        found = self._lookup_one(key, owner)
        if found < 0 and self.aliases:
            name = self.aliases.get(key.kind, {}).get(key.fqn)
            if name is not None:
                return self._lookup_one(key._replace(fqn=name), owner)
        return found

    def _lookup_one(self, key: TensorKey, owner: int) -> int:
        kind, fqn, slot = self.kind.code_of(key.kind), self.fqn.code_of(key.fqn), self.slot.code_of(key.slot)
        number = self._owner_numbers.get(owner, -1)
        if min(kind, fqn, slot, number) < 0:
            return -1
        code = (kind * len(self.slot.values) + slot) * len(self.fqn.values) + fqn
        wanted = code * max(len(self._owners), 1) + number
        composites, tensors = self._by_composite
        place = int(composites.searchsorted(wanted))
        return int(tensors[place]) if place < len(composites) and composites[place] == wanted else -1

    def _lookup(self, kinds: Sequence[str], fqns: Sequence[str], slots: Sequence[str], owner: int) -> Int64s:
        kind, fqn, slot = self.kind.codes_of(kinds), self.fqn.codes_of(fqns), self.slot.codes_of(slots)
        numbers = np.searchsorted(self._owners, [owner])
        known = (kind >= 0) & (fqn >= 0) & (slot >= 0) & bool(np.isin(owner, self._owners))
        wanted = self._compose(kind, fqn, slot, np.broadcast_to(numbers, kind.shape))
        composites, tensors = self._by_composite
        place = np.minimum(np.searchsorted(composites, wanted), max(len(composites) - 1, 0))
        found = np.full(len(kinds), -1, np.int64)
        if len(composites):
            hit = known & (composites[place] == wanted)
            found[hit] = tensors[place[hit]]
        return found

    def _compose(self, kind: Int64s, fqn: Int64s, slot: Int64s, owner: Int64s) -> Int64s:
        """One integer per tensor, different for different tensors (kinds x slots x fqns x owners stays below 2**63)."""
        code = (kind * len(self.slot.values) + slot) * len(self.fqn.values) + fqn
        return np.asarray(code * max(len(self._owners), 1) + owner, np.int64)

    @cached_property
    def _owners(self) -> NDArray[np.int32]:
        return np.unique(self.owner)

    @cached_property
    def _owner_numbers(self) -> dict[int, int]:
        return {owner: number for number, owner in enumerate(self._owners.tolist())}

    @cached_property
    def _by_composite(self) -> tuple[Int64s, Int64s]:
        """The composites of all tensors, ascending, and the tensors they belong to."""
        owners = np.searchsorted(self._owners, self.owner)
        composites = self._compose(self.kind.codes, self.fqn.codes, self.slot.codes, owners)
        order = np.argsort(composites, kind="stable")
        return composites[order], order

    def has_duplicates(self) -> bool:
        """Whether two tensors have the same kind, FQN, slot and owner: never so in a sound catalog."""
        composites, _ = self._by_composite
        return bool((composites[1:] == composites[:-1]).any())


def row_order(boxes: BoxTable) -> Int64s | None:
    """The order of the rows by (tensor, offsets), or None when they are so ordered already."""
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
    """Rows by (file, place), empty ones before the one that has bytes at their place."""
    within = 2 * begin + (length > 0)
    if size.astype(np.float64).sum() >= 2.0**61:  # one number line for all files would be too long
        return np.lexsort((within, file))
    return np.argsort((2 * (np.cumsum(size) - size + np.arange(len(size))))[file] + within)
