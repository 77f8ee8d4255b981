"""A large catalog in groups: all rows of some files each, so that a rank reads only the groups that it needs.

A rank that loads wants a few boxes of nearly every tensor, and finds them in the files of few ranks. So a group, which is
one Parquet row group, has the rows of consecutive files. An index names the tensors, and says for each group and tensor how
many rows there are, and the smallest box around them. It lies before the seal, with a hash of each group: a reader of some
groups verifies them without the others (docs/format.md, section 3.3). The first group may list tilings, of which the others
have tiles (section 3.4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.lazy import lazy
from bytecheckpoint.representation.arrow_columns import read_lists, read_numbers
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import MAX_DIMS, VALUES_SLOT, Catalog, row_order
from bytecheckpoint.representation.catalog_footer import (
    FOOTER_KEY,
    TILED,
    Footer,
    damaged,
    decode_footer,
    read_locator,
    tail_start,
)
from bytecheckpoint.representation.catalog_rows import (
    catalog_of_rows,
    decoding,
    open_parquet,
    ranges,
    read_tensors,
)
from bytecheckpoint.representation.tilings import Tilings

__all__ = ["CatalogGroups", "GroupPlaces"]

_MOST_PART_BYTES = 1 << 30  # of the index, and of one group
_MOST_ROWS = 1 << 22  # that the tiles of a small catalog may stand for
_ROWS_PER_BYTE = 64
_TAIL_BYTES = 1 << 20  # read at once: most footers, with the names of some thousands of files, are shorter

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class GroupPlaces(msgspec.Struct):
    """The place of each group in the file: first byte, length and xxh3_128."""

    offsets: list[_Natural]
    lengths: list[_Natural]
    hashes: list[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]]


msgspec.json.Decoder(GroupPlaces)  # see `catalog_footer`


class _TilingTensors(NamedTuple):
    """The tensors of the first group, which lists tilings, and how many of its rows each has."""

    tensor: Int64s
    rows: Int64s


class _Contents(NamedTuple):
    """The file of a catalog in groups: its Parquet file, its footer, size and place of each group, and its tilings."""

    parquet: Any
    footer: Footer
    sizes: Int64s
    places: GroupPlaces
    tilings: _TilingTensors | None  # None before version 3


class CatalogGroups:
    """A catalog in groups.

    Attributes:
        tail: end of the file, which has hashes of all the rest.
        hulls: smallest box around the boxes of each tensor in each group, sorted by tensor, then by group; none for the
            group that lists tilings.
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
            places = msgspec.json.decode(parquet.metadata.metadata[FOOTER_KEY], type=GroupPlaces)
            parquet_file = open_parquet(memory)
            footer = decode_footer(parquet_file)
            count = parquet_file.num_row_groups
            sizes = np.array([parquet_file.metadata.row_group(i).num_rows for i in range(count)], np.int64)
            sound = len(places.offsets) == len(places.lengths) == len(places.hashes) == count
            for column, limit in ((self.group, count), (self.file, footer.files.count)):
                sound &= bool((column >= 0).all() and (column < limit).all())
            tiled = footer.version in TILED
            sound &= bool((self._rows >= (0 if tiled else 1)).all() and (self._rows <= sizes.sum()).all())
            listed = np.bincount(self.group, self._rows, count) if sound else sizes - 1
            # Tiles are listed by no tensor. The first group lists tilings, and has none.
            if not (listed == sizes)[: 1 if tiled else None].all() or (listed > sizes).any() or not sound:
                raise damaged("its index and its groups do not match")
            slots = self._tensors["slot"]
            tilings = None
            if tiled:
                first, others = np.flatnonzero(self.group == 0), np.flatnonzero(self.group)
                tilings = _TilingTensors(self.hulls.tensor[first], self._rows[first])
                self.hulls, self._rows = self.hulls.take(others), self._rows[others]
                self.group, self.file = self.group[others], self.file[others]
            values = (slots.codes == slots.code_of(VALUES_SLOT))[self.hulls.tensor]
            self._contents = _Contents(parquet_file, footer, sizes, places, tilings)
            self.value_groups: Int64s = np.unique(self.group[values]).astype(np.int64)

    @property
    def head_groups(self) -> Int64s:
        """Groups that every reader needs: those of plain values, and the one that lists tilings."""
        return np.union1d(self.value_groups, np.arange(int(self._contents.tilings is not None)))

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

    def catalog(self, groups: Int64s | None = None, near: BoxTable | None = None) -> Catalog:
        """Return the catalog with the rows of some groups, which are loaded, or of all, if the whole file is here.

        Args:
            groups: numbers of the groups.
            near: boxes by the tensors' numbers; rows of tiles that are far from them may be left out.

        Raises:
            CorruptCheckpointError: the content contradicts itself.
        """
        contents = self._contents
        wanted = np.arange(contents.parquet.num_row_groups) if groups is None else np.unique(groups)
        assert groups is None or self._here.issuperset(wanted.tolist())
        columns = ["offsets", "lengths", "file", "byte_offset", "byte_length", "sums", "view"]
        if contents.tilings is not None:
            wanted = wanted[wanted > 0]
            columns += ["tiling", "place"]
        if contents.footer.version == 4:
            columns.append("strides")
        with decoding():
            table = contents.parquet.read_row_groups(wanted.tolist(), columns=columns, use_threads=False)
            table.validate(full=True)
            # The rows of each group are sorted by tensor, its tiles follow; rows of the catalog by tensor, then by offsets.
            hull = np.flatnonzero(np.isin(self.group, wanted))
            count = self._rows[hull]
            in_file = np.argsort(self.group[hull], kind="stable")
            begin = np.empty_like(count)
            begin[in_file] = np.cumsum(count[in_file]) - count[in_file]
            place = np.searchsorted(wanted, self.group[hull])
            tiles = contents.sizes[wanted] - np.bincount(place, count, len(wanted)).astype(np.int64)
            begin += (np.cumsum(tiles) - tiles)[place]
            order = ranges(begin, count)
            is_tile = np.ones(len(table), bool)
            is_tile[order] = False
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
            tilings = self._tiles(table, is_tile) if contents.tilings is not None else None
            runs = np.concatenate([order, np.flatnonzero(is_tile)])
            whole = groups is None
            catalog = catalog_of_rows(
                self._tensors, sorted_boxes, table, contents.footer, runs, tilings=tilings, whole=whole
            )
            # Tiles of few bytes stand for many rows.
            if tilings is not None and tilings.counts().sum() > max(_MOST_ROWS, _ROWS_PER_BYTE * self.size):
                raise damaged(
                    f"it stands for {tilings.counts().sum()} rows, for which its {self.size} bytes are too few"
                )
            return catalog.expanded(near)

    def _tiles(self, table: Any, is_tile: NDArray[np.bool_]) -> Tilings:
        """Return all tilings, and those rows of a table that are tiles."""
        tiling = read_numbers(table, "tiling", pa.int32())
        if not np.array_equal(tiling >= 0, is_tile):
            raise damaged("its tiles are not where its index says")
        places, _ = read_lists(table, "place", 0)
        tilings = self._tilings
        axes = int(tilings.axes.max(initial=-1)) + 1
        return replace(
            tilings,
            of_tile=tiling[is_tile].astype(np.int64),
            file=read_numbers(table, "file", pa.int32())[is_tile],
            byte_offset=read_numbers(table, "byte_offset", pa.int64())[is_tile],
            byte_length=read_numbers(table, "byte_length", pa.int64())[is_tile],
            places=np.pad(places[is_tile], ((0, 0), (0, max(axes - places.shape[1], 0)))),
        )

    @lazy
    def _tilings(self) -> Tilings:
        """All tilings, without tiles."""
        hulls = self._contents.tilings
        assert hulls is not None
        columns = ["offsets", "lengths", "byte_offset", "byte_length", "tiling", "axes"]
        table = self._contents.parquet.read_row_groups([0], columns=columns, use_threads=False)
        table.validate(full=True)
        tensor = np.repeat(hulls.tensor, hulls.rows)
        ndims = self._tensors["ndims"][tensor]
        lists = [read_lists(table, name, fill) for name, fill in (("offsets", 0), ("lengths", 1), ("axes", -1))]
        if not all(np.array_equal(dims, ndims) for _, dims in lists):
            raise damaged("a box has another number of dimensions than its tensor")
        if lists[2][0].max(initial=-1) >= MAX_DIMS:
            raise damaged("a tiling has too many axes")
        width = self.hulls.ndim
        offsets, lengths, axes = (
            np.pad(column, ((0, 0), (0, width - column.shape[1])), constant_values=fill)
            for (column, _), fill in zip(lists, (0, 1, -1), strict=True)
        )
        tiling = read_numbers(table, "tiling", pa.int32()).astype(np.int64)
        order = np.argsort(tiling, kind="stable")
        none = np.zeros(0, np.int64)
        return Tilings(
            tiling=tiling[order],
            boxes=BoxTable(tensor, offsets, lengths).take(order),
            axes=axes[order],
            box_offset=read_numbers(table, "byte_offset", pa.int64())[order],
            box_bytes=read_numbers(table, "byte_length", pa.int64())[order],
            of_tile=none,
            file=none.astype(np.int32),
            byte_offset=none,
            byte_length=none,
            places=none[:, None],
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
