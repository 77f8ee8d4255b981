"""Write the row groups of a catalog's file, and the index of a large one (docs/format.md, sections 3, 3.3 and 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from bytecheckpoint.representation.arrow_columns import dictionary_array, flat_list_array, list_array, number_array
from bytecheckpoint.representation.boxes import BoxTable, Int64s, row_major
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog
from bytecheckpoint.representation.catalog_footer import FOOTER_KEY
from bytecheckpoint.representation.catalog_groups import GroupPlaces
from bytecheckpoint.representation.catalog_rows import WRITE_OPTIONS, ranges, sums_of_rows, tensor_columns
from bytecheckpoint.representation.tilings import Tilings
from bytecheckpoint.tuning import tuning

__all__ = ["divide", "encode_index", "sums_column", "table_of", "tilings_table"]

_COLUMNS: Final = (
    *("kind", "fqn", "slot", "dtype", "device", "global_shape", "offsets", "lengths", "file", "byte_offset"),
    *("byte_length", "owner", "requires_grad", "sums", "view"),
)
_TILE_COLUMNS: Final = ("tiling", "axes", "place")
_ROW_BYTES = 32  # of a row in memory and file, about
_TILE_ROW_BYTES = 8  # of a row that a tile stands for: it is quicker to make than to read
_SUM_BYTES = 8


def sums_column(catalog: Catalog) -> Callable[[Int64s], Any]:
    """Return a function that makes the column of checksums of some `Catalog.runs`, by their numbers."""
    first, counts = sums_of_rows(catalog)
    all_sums = np.concatenate([np.zeros(0, np.uint64), *catalog.file_sums])

    def column(runs: Int64s) -> Any:
        found = all_sums[ranges(first[runs], counts[runs])]
        return flat_list_array(number_array(found, pa.uint64()), counts[runs])

    return column


def table_of(catalog: Catalog, runs: Int64s, sums: Callable[[Int64s], Any]) -> Any:
    """Return the table of some rows and tiles.

    Args:
        catalog: the catalog.
        runs: their numbers among `Catalog.runs`, ascending.
        sums: function of `sums_column`.
    """
    count = len(catalog.boxes)
    rows, tiles = runs[runs < count], runs[runs >= count] - count
    columns = tensor_columns(catalog, catalog.boxes.take(rows))
    file, byte_offset, byte_length = catalog.runs
    columns["file"] = number_array(file[rows], pa.int32())
    columns["byte_offset"] = number_array(byte_offset[rows], pa.int64())
    columns["byte_length"] = number_array(byte_length[rows], pa.int64())
    columns["sums"] = sums(rows)
    columns["view"] = pa.nulls(len(rows), pa.string())
    if catalog.is_foreign:
        columns["strides"] = _strides(catalog, rows)
        return _table(columns, (*_COLUMNS, "strides"))
    if catalog.tilings is None:
        return _table(columns, _COLUMNS)
    none = np.zeros(len(rows), np.int64)
    columns["tiling"] = number_array(np.full(len(rows), -1, np.int32), pa.int32())
    columns["axes"] = columns["place"] = list_array(none[:, None], none)
    table = _table(columns, (*_COLUMNS, *_TILE_COLUMNS))
    return pa.concat_tables([table, _tiles(catalog.tilings, tiles, sums(tiles + count))]).unify_dictionaries()


def _strides(catalog: Catalog, rows: Int64s) -> Any:
    """Return the column of strides, with an empty list for each row-major row."""
    strides, lengths = catalog.strides, catalog.boxes.lengths[rows]
    if strides is None:
        return list_array(lengths, np.zeros(len(rows), np.int64))
    moves = ((strides[rows] != row_major(lengths)) & (lengths != 1)).any(axis=1)
    return list_array(strides[rows], np.where(moves, catalog.ndims[catalog.boxes.tensor[rows]], 0))


def _tiles(tilings: Tilings, tiles: Int64s, sums: Any) -> Any:
    """Return the rows of some tiles. They have no tensor: what describes one is empty."""
    count = len(tiles)
    none = np.zeros(count, np.int64)
    nothing = list_array(none[:, None], none)
    columns = {
        **dict.fromkeys(("kind", "fqn", "slot", "dtype", "device"), dictionary_array(none, [""] if count else [])),
        **dict.fromkeys(("global_shape", "offsets", "lengths", "axes"), nothing),
        "file": number_array(tilings.file[tiles], pa.int32()),
        "byte_offset": number_array(tilings.byte_offset[tiles], pa.int64()),
        "byte_length": number_array(tilings.byte_length[tiles], pa.int64()),
        "owner": number_array(np.full(count, -1, np.int32), pa.int32()),
        "requires_grad": number_array(np.zeros(count, bool), pa.bool_()),
        "sums": sums,
        "view": pa.nulls(count, pa.string()),
        "tiling": number_array(tilings.of_tile[tiles].astype(np.int32), pa.int32()),
        "place": list_array(tilings.places[tiles], np.full(count, tilings.places.shape[1])),
    }
    return _table(columns, (*_COLUMNS, *_TILE_COLUMNS))


def tilings_table(catalog: Catalog) -> Any:
    """Return the rows of all boxes of tilings, sorted by tensor. They have no file."""
    tilings = catalog.tilings
    assert tilings is not None
    order = np.lexsort((tilings.tiling, tilings.boxes.tensor))
    boxes = tilings.boxes.take(order)
    ndims = catalog.ndims[boxes.tensor]
    none = np.zeros(len(order), np.int64)
    columns = tensor_columns(catalog, boxes)
    columns["file"] = number_array(np.full(len(order), -1, np.int32), pa.int32())
    columns["byte_offset"] = number_array(tilings.box_offset[order], pa.int64())
    columns["byte_length"] = number_array(tilings.box_bytes[order], pa.int64())
    columns["sums"] = flat_list_array(number_array(np.zeros(0, np.uint64), pa.uint64()), none)
    columns["view"] = pa.nulls(len(order), pa.string())
    columns["tiling"] = number_array(tilings.tiling[order].astype(np.int32), pa.int32())
    columns["axes"] = list_array(tilings.axes[order], ndims)
    columns["place"] = list_array(none[:, None], none)
    return _table(columns, (*_COLUMNS, *_TILE_COLUMNS))


def _table(columns: dict[str, Any], names: tuple[str, ...]) -> Any:
    return pa.Table.from_arrays([columns[name] for name in names], names=names)


def divide(catalog: Catalog) -> list[Int64s]:
    """Divide a large catalog: return the rows and tiles of each group, by their numbers among `Catalog.runs`, ascending.

    All rows of a small catalog are one group. Plain values, which every rank reads first, are in groups of their own.
    """
    size = tuning().catalog_group_bytes
    file = catalog.runs[0]
    rows = np.bincount(file, minlength=len(catalog.files))
    weight = np.bincount(catalog.file, minlength=len(rows)) * _ROW_BYTES
    weight += _SUM_BYTES * np.array([len(sums) for sums in catalog.file_sums], np.int64)
    if catalog.tilings is not None:
        np.add.at(weight, catalog.tilings.file, catalog.tilings.counts() * _TILE_ROW_BYTES)
    if weight.sum() <= 2 * size:
        return [np.arange(len(file))]
    values = np.zeros(len(rows), bool)
    values[catalog.file[(catalog.slot.codes == catalog.slot.code_of(VALUES_SLOT))[catalog.boxes.tensor]]] = True
    part = (np.cumsum(weight) - weight) // size
    new = (np.diff(part, prepend=-1) != 0) | (np.diff(values, prepend=values[:1]) != 0)
    group = np.cumsum(new) - 1
    count = np.zeros(group[-1] + 1, np.int64)
    np.add.at(count, group, rows)
    # Small integers: numpy sorts those of 16 bits several times faster.
    order = np.argsort(group.astype(np.min_scalar_type(len(count)))[file], kind="stable")
    return np.split(order, np.cumsum(count[count > 0])[:-1])


def encode_index(catalog: Catalog, groups: Sequence[Int64s], places: Sequence[int], parquet: memoryview) -> bytes:
    """Return the index of a catalog in groups.

    Args:
        catalog: the catalog.
        groups: the rows and tiles of each group.
        places: first byte of each row group in the file, and the end of the last.
        parquet: the file, without seal.
    """
    hulls = [_hulls(catalog, runs) for runs in groups]
    if catalog.tilings is not None:
        hulls.insert(0, _hulls_of_tilings(catalog.tilings))
    boxes = BoxTable.concat([found.boxes for found in hulls])
    group = np.repeat(np.arange(len(hulls), dtype=np.int32), [len(found.boxes) for found in hulls])
    order = np.argsort(boxes.tensor, kind="stable")
    columns = tensor_columns(catalog, boxes.take(order))
    columns["group"] = number_array(group[order], pa.int32())
    columns["file"] = number_array(np.concatenate([found.file for found in hulls])[order], pa.int32())
    columns["rows"] = number_array(np.concatenate([found.rows for found in hulls])[order], pa.int64())
    table = pa.Table.from_arrays(list(columns.values()), names=list(columns))
    found = GroupPlaces(
        list(places[:-1]),
        np.diff(places).tolist(),
        [xxhash.xxh3_128_hexdigest(parquet[a:b]) for a, b in pairwise(places)],
    )
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **WRITE_OPTIONS) as writer:
        writer.write_table(table, row_group_size=len(table))
        writer.add_key_value_metadata({FOOTER_KEY: msgspec.json.encode(found)})
    return bytes(sink.getvalue())


class _TensorRuns(NamedTuple):
    """For each tensor of a group the smallest box around its boxes, the first of their files, and how many are rows."""

    boxes: BoxTable
    file: NDArray[np.int32]
    rows: Int64s


def _hulls(catalog: Catalog, runs: Int64s) -> _TensorRuns:
    """Return the hulls of some rows and tiles."""
    rows = runs[runs < len(catalog.boxes)]
    found = _TensorRuns(catalog.boxes.take(rows), catalog.file[rows], np.ones(len(rows), np.int64))
    tiles = runs[len(rows) :] - len(catalog.boxes)
    return _merged([found, *(_hulls_of_tiles(catalog.tilings, tiles) if catalog.tilings is not None else ())])


def _hulls_of_tiles(tilings: Tilings, tiles: Int64s) -> Iterator[_TensorRuns]:
    """Yield for the tiles of each tiling the smallest box around each box of the tiling. None is a row."""
    for number in np.unique(tilings.of_tile[tiles]).tolist():
        chosen = tiles[tilings.of_tile[tiles] == number]
        members = slice(*np.searchsorted(tilings.tiling, [number, number + 1]).tolist())
        lengths, axes = tilings.boxes.lengths[members], tilings.axes[members]
        low, high = (
            np.append(extreme(tilings.places[chosen], axis=0), 0)[axes] * lengths + tilings.boxes.offsets[members]
            for extreme in (np.min, np.max)
        )
        boxes = BoxTable(tilings.boxes.tensor[members], low, high + lengths - low)
        file = np.full(len(boxes), tilings.file[chosen].min(), np.int32)
        yield _TensorRuns(boxes, file, np.zeros(len(boxes), np.int64))


def _hulls_of_tilings(tilings: Tilings) -> _TensorRuns:
    """Return the hulls of the boxes of tilings, without their tiles."""
    file = np.full(len(tilings.boxes), tilings.file.min(), np.int32)
    return _merged([_TensorRuns(tilings.boxes, file, np.ones(len(file), np.int64))])


def _merged(hulls: Sequence[_TensorRuns]) -> _TensorRuns:
    """Join the hulls of each tensor."""
    boxes = BoxTable.concat([found.boxes for found in hulls])
    file, rows = np.concatenate([found.file for found in hulls]), np.concatenate([found.rows for found in hulls])
    if (boxes.tensor[1:] < boxes.tensor[:-1]).any():
        order = np.argsort(boxes.tensor, kind="stable")
        boxes, file, rows = boxes.take(order), file[order], rows[order]
    first = np.flatnonzero(np.diff(boxes.tensor, prepend=-1))
    low = np.minimum.reduceat(boxes.offsets, first)
    high = np.maximum.reduceat(boxes.offsets + boxes.lengths, first)
    return _TensorRuns(
        BoxTable(boxes.tensor[first], low, high - low), np.minimum.reduceat(file, first), np.add.reduceat(rows, first)
    )
