"""A large catalog in groups: all rows of some files each, so that a rank reads only the groups that it needs.

A rank that loads wants a few boxes of nearly every tensor, and finds them in the files of few ranks. So a group, which is
one Parquet row group, has the rows of consecutive files. An index names the tensors, and says for each group and tensor how
many rows there are, and the smallest box around them. It lies before the seal, with a hash of each group: a reader of some
groups verifies them without the others (docs/format.md, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.representation.arrow_columns import number_array, read_lists, read_numbers
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog, row_order
from bytecheckpoint.representation.catalog_footer import (
    FOOTER_KEY,
    Footer,
    damaged,
    decode_footer,
    read_locator,
    tail_start,
)
from bytecheckpoint.representation.catalog_rows import (
    WRITE_OPTIONS,
    catalog_of_rows,
    decoding,
    open_parquet,
    ranges,
    read_tensors,
    tensor_columns,
)
from bytecheckpoint.tuning import tuning

__all__ = ["CatalogGroups", "divide", "encode_index"]

_ROW_BYTES = 32  # of a row in memory and file, about
_SUM_BYTES = 8
_MOST_PART_BYTES = 1 << 30  # of the index, and of one group
_TAIL_BYTES = 1 << 20  # read at once: most footers, with the names of some thousands of files, are shorter

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Places(msgspec.Struct):
    """The place of each group in the file: first byte, length and xxh3_128."""

    offsets: list[_Natural]
    lengths: list[_Natural]
    hashes: list[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]]


msgspec.json.Decoder(_Places)  # see `catalog_footer`


def divide(catalog: Catalog) -> list[Int64s]:
    """Divide a large catalog: return the rows of each group, ascending. All rows of a small catalog are one group.

    Rows of plain values, which every rank reads first, are in groups of their own.
    """
    size = tuning().catalog_group_bytes
    rows = np.bincount(catalog.file, minlength=len(catalog.files))
    weight = rows * _ROW_BYTES + _SUM_BYTES * np.array([len(sums) for sums in catalog.file_sums], np.int64)
    if weight.sum() <= 2 * size:
        return [np.arange(len(catalog.boxes))]
    values = np.zeros(len(rows), bool)
    values[catalog.file[(catalog.slot.codes == catalog.slot.code_of(VALUES_SLOT))[catalog.boxes.tensor]]] = True
    part = (np.cumsum(weight) - weight) // size
    new = (np.diff(part, prepend=-1) != 0) | (np.diff(values, prepend=values[:1]) != 0)
    group = np.cumsum(new) - 1
    count = np.zeros(group[-1] + 1, np.int64)
    np.add.at(count, group, rows)
    # Small integers: numpy sorts those of 16 bits several times faster.
    order = np.argsort(group.astype(np.min_scalar_type(len(count)))[catalog.file], kind="stable")
    return np.split(order, np.cumsum(count[count > 0])[:-1])


def encode_index(catalog: Catalog, groups: Sequence[Int64s], places: Sequence[int], parquet: memoryview) -> bytes:
    """Return the index of a catalog in groups.

    Args:
        catalog: the catalog.
        groups: the rows of each group.
        places: first byte of each group in the file, and the end of the last.
        parquet: the file, without seal.
    """
    hulls, files, counts = zip(*(_hulls(catalog, rows) for rows in groups), strict=True)
    boxes, group = BoxTable.concat(hulls), np.repeat(np.arange(len(groups), dtype=np.int32), list(map(len, hulls)))
    order = np.argsort(boxes.tensor, kind="stable")
    columns = tensor_columns(catalog, boxes.take(order))
    columns["group"] = number_array(group[order], pa.int32())
    columns["file"] = number_array(np.concatenate(files)[order], pa.int32())
    columns["rows"] = number_array(np.concatenate(counts)[order], pa.int64())
    table = pa.Table.from_arrays(list(columns.values()), names=list(columns))
    found = _Places(
        list(places[:-1]),
        np.diff(places).tolist(),
        [xxhash.xxh3_128_hexdigest(parquet[a:b]) for a, b in pairwise(places)],
    )
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **WRITE_OPTIONS) as writer:
        writer.write_table(table, row_group_size=len(table))
        writer.add_key_value_metadata({FOOTER_KEY: msgspec.json.encode(found)})
    return bytes(sink.getvalue())


def _hulls(catalog: Catalog, rows: Int64s) -> tuple[BoxTable, NDArray[np.int32], Int64s]:
    """Return for each tensor of a group the smallest box around its rows, the first of their files, and their number."""
    boxes = catalog.boxes.take(rows)
    first = np.flatnonzero(np.diff(boxes.tensor, prepend=-1))
    low = np.minimum.reduceat(boxes.offsets, first)
    high = np.maximum.reduceat(boxes.offsets + boxes.lengths, first)
    file = np.minimum.reduceat(catalog.file[rows], first)
    return BoxTable(boxes.tensor[first], low, high - low), file, np.diff(first, append=len(rows))


class _Contents(NamedTuple):
    """The file of a catalog in groups: its Parquet file, its footer, and the place of each group."""

    parquet: Any
    footer: Footer
    places: _Places


class CatalogGroups:
    """A catalog in groups.

    Attributes:
        tail: end of the file, which has hashes of all the rest.
        hulls: smallest box around the boxes of each tensor in each group, sorted by tensor, then by group.
        group: number of each hull's group.
        file: first file with rows of each hull's group and tensor.
        value_groups: groups that hold plain values.
    """

    def __init__(self, memory: memoryview, tail_at: int, read: Callable[[int, int], None]) -> None:
        self._memory = memory
        self._here: set[int] = set()  # groups that were loaded and verified
        self.tail = memory[tail_at:]
        located = read_locator(self.tail)
        assert located is not None
        offset, length, own = located
        if offset + length > tail_at or length > _MOST_PART_BYTES:
            raise damaged("its index lies elsewhere")
        read(offset, offset + length)
        index = memory[offset : offset + length]
        if xxhash.xxh3_128_digest(index) != own:
            raise damaged("the bytes of its index do not match their hash")
        with decoding():
            parquet = open_parquet(index)
            table = parquet.read(use_threads=False)
            table.validate(full=True)
            self._tensors, self.hulls = read_tensors(table)
            self.group = read_numbers(table, "group", pa.int32())
            self.file = read_numbers(table, "file", pa.int32())
            self._rows = read_numbers(table, "rows", pa.int64())
            places = msgspec.json.decode(parquet.metadata.metadata[FOOTER_KEY], type=_Places)
            parquet_file = open_parquet(memory)
            footer = decode_footer(parquet_file)
            count = parquet_file.num_row_groups
            sizes = np.array([parquet_file.metadata.row_group(i).num_rows for i in range(count)], np.int64)
            sound = len(places.offsets) == len(places.lengths) == len(places.hashes) == count
            for column, limit in ((self.group, count), (self.file, footer.files.count)):
                sound &= bool((column >= 0).all() and (column < limit).all())
            sound &= bool((self._rows > 0).all())
            if not sound or not np.array_equal(np.bincount(self.group, self._rows, count), sizes):
                raise damaged("its index and its groups do not match")
            slots = self._tensors["slot"]
            values = (slots.codes == slots.code_of(VALUES_SLOT))[self.hulls.tensor]
            self._contents = _Contents(parquet_file, footer, places)
            self.value_groups: Int64s = np.unique(self.group[values]).astype(np.int64)

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return len(self._memory)

    @staticmethod
    def find(data: memoryview) -> CatalogGroups | None:
        """Return the groups of a catalog whose whole file is here and verified; None for a catalog without groups."""
        tail_at = tail_start(data, len(data))
        return CatalogGroups(data, tail_at, lambda start, stop: None) if read_locator(data[tail_at:]) else None

    @staticmethod
    def open(size: int, read_into: Callable[[int, memoryview], None]) -> CatalogGroups | None:
        """Read the index of a catalog in groups; return None for a catalog that is to be read whole.

        Args:
            size: length of the catalog's file.
            read_into: fills memory from a place in the file.

        Raises:
            CorruptCheckpointError: bytes do not match their hash.
        """
        # Memory that was never touched takes no space, and offsets are those of the file.
        memory = memoryview(np.empty(size, np.uint8))

        def read(start: int, stop: int) -> None:
            read_into(start, memory[start:stop])

        at = max(size - _TAIL_BYTES, 0)
        read(at, size)
        tail_at = tail_start(memory, size)
        if tail_at < at:
            read(tail_at, at)
        if read_locator(memory[tail_at:]) is None:
            return None
        return CatalogGroups(memory, tail_at, read)

    def catalog(self, groups: Int64s | None = None) -> Catalog:
        """Return the catalog with the rows of some groups, which are loaded, or of all, if the whole file is here.

        Raises:
            CorruptCheckpointError: the content contradicts itself.
        """
        wanted = np.arange(self._contents.parquet.num_row_groups) if groups is None else np.unique(groups)
        assert groups is None or self._here.issuperset(wanted.tolist())
        with decoding():
            columns = ["offsets", "lengths", "file", "byte_offset", "byte_length", "sums", "view"]
            table = self._contents.parquet.read_row_groups(wanted.tolist(), columns=columns, use_threads=False)
            table.validate(full=True)
            # The rows of each group are sorted by tensor; those of the catalog by tensor, then by offsets.
            hull = np.flatnonzero(np.isin(self.group, wanted))
            count = self._rows[hull]
            in_file = np.argsort(self.group[hull], kind="stable")
            begin = np.empty_like(count)
            begin[in_file] = np.cumsum(count[in_file]) - count[in_file]
            order = ranges(begin, count)
            tensor = np.repeat(self.hulls.tensor[hull], count)
            ndims = self._tensors["ndims"][tensor]
            boxes = []
            for name, fill in (("offsets", 0), ("lengths", 1)):
                column, dims = read_lists(table, name, fill)
                if not np.array_equal(dims[order], ndims):
                    raise damaged("a box has another number of dimensions than its tensor")
                boxes.append(column[order])
            sorted_boxes = BoxTable(tensor, *boxes).widened(self.hulls.ndim)
            again = row_order(sorted_boxes)
            if again is not None:
                sorted_boxes, order = sorted_boxes.take(again), order[again]
            return catalog_of_rows(
                self._tensors, sorted_boxes, table, self._contents.footer, order, whole=groups is None
            )

    def load(self, number: int, read_into: Callable[[int, memoryview], None]) -> memoryview:
        """Load the bytes of a group, unless they are here; return them. Several threads may call this.

        Args:
            number: number of the group.
            read_into: fills memory from a place in the file.

        Raises:
            CorruptCheckpointError: bytes do not match their hash.
        """
        start = self._contents.places.offsets[number]
        stop = start + self._contents.places.lengths[number]
        if stop > len(self._memory) - len(self.tail) or stop - start > _MOST_PART_BYTES:
            raise damaged("a group of it lies elsewhere")
        group = self._memory[start:stop]
        if number not in self._here:
            read_into(start, group)
            if xxhash.xxh3_128_hexdigest(group) != self._contents.places.hashes[number]:
                raise damaged(f"the bytes of its row group {number} do not match their hash")
            self._here.add(number)
        return group
