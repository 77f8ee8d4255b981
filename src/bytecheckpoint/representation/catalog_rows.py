"""Columns of the catalog's file: tensors with boxes as Arrow columns and back, and the checksums of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.representation.arrow_columns import (
    ColumnError,
    list_array,
    number_array,
    read_codes,
    read_flat_lists,
    read_lists,
    read_numbers,
    read_strings,
    string_array,
)
from bytecheckpoint.representation.boxes import BoxTable, Int64s, row_major, widened
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog, CatalogSummary
from bytecheckpoint.representation.catalog_footer import (
    Footer,
    check_parquet_claims,
    damaged,
    files_of,
    fingerprints_of,
)
from bytecheckpoint.representation.catalog_validation import catalog_problem
from bytecheckpoint.representation.string_column import StringColumn
from bytecheckpoint.representation.tilings import Tilings

__all__ = [
    "WRITE_OPTIONS",
    "catalog_of_rows",
    "cells",
    "decoding",
    "open_parquet",
    "ranges",
    "read_summary",
    "read_tensors",
    "rows_of",
    "sums_of_rows",
    "tensor_columns",
]

#: String columns by their names in `Catalog`, with their names in the file.
_STRINGS: Final = {"state": "kind", "fqn": "fqn", "slot": "slot", "dtype": "dtype", "device": "device"}
_BOX_LISTS = ("global_shape", "offsets", "lengths")
WRITE_OPTIONS: Final[dict[str, Any]] = {
    "compression": {
        **dict.fromkeys(
            [
                *(*_STRINGS.values(), "file", "byte_offset", "byte_length", "owner", "requires_grad", "view", "tiling"),
                *("axes.list.element", "place.list.element", "strides.list.element"),
            ],
            "zstd",
        ),
        **dict.fromkeys([f"{name}.list.element" for name in _BOX_LISTS], "zstd"),
        "sums.list.element": "none",  # hashes do not compress
    },
    "use_dictionary": [*_STRINGS.values(), *(f"{name}.list.element" for name in _BOX_LISTS), "byte_length"],
    "column_encoding": {"file": "DELTA_BINARY_PACKED", "byte_offset": "DELTA_BINARY_PACKED"},
    "dictionary_pagesize_limit": 1 << 28,
    "write_statistics": [*_STRINGS.values(), "file", "byte_offset", "byte_length", "owner"],
    "store_schema": False,
}

#: Errors that unreadable content causes in the libraries that read it.
_READ_ERRORS = (
    pa.ArrowException,
    msgspec.MsgspecError,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OverflowError,
    MemoryError,
)


@contextlib.contextmanager
def decoding() -> Iterator[None]:
    """Translate the errors that bad content causes in the libraries that decode it."""
    try:
        yield
    except UsageError as error:  # an unknown dtype
        raise IncompatibleCheckpointError(f"the catalog cannot be used: {error}") from error
    except ColumnError as error:
        raise damaged(str(error)) from error
    except _READ_ERRORS as error:
        raise damaged(f"its content cannot be read ({' '.join(str(error).split())[:200]})") from error
    except RecursionError as error:
        raise damaged("its footer is nested without end") from error


def open_parquet(data: Any) -> Any:
    """Return the Parquet file whose bytes `data` holds.

    Raises:
        CorruptCheckpointError: it claims more content than its bytes can hold.
    """
    check_parquet_claims(memoryview(data))
    return pq.ParquetFile(pa.BufferReader(data), read_dictionary=list(_STRINGS.values()), pre_buffer=False)


def tensor_columns(catalog: Catalog, boxes: BoxTable) -> dict[str, Any]:
    """Return the Arrow columns that describe `boxes`, and the tensor of each."""
    tensor = boxes.tensor
    ndims = catalog.ndims[tensor]
    columns: dict[str, Any] = {
        stored: string_array(getattr(catalog, name), tensor) for name, stored in _STRINGS.items()
    }
    columns["global_shape"] = list_array(catalog.shapes[tensor], ndims)
    columns["offsets"] = list_array(boxes.offsets, ndims)
    columns["lengths"] = list_array(boxes.lengths, ndims)
    columns["owner"] = number_array(catalog.owner[tensor], pa.int32())
    columns["requires_grad"] = number_array(catalog.requires_grad[tensor], pa.bool_())
    return columns


def read_tensors(table: Any) -> tuple[dict[str, Any], BoxTable]:
    """Return the columns of the tensors in a table, by their names in `Catalog`, and the boxes of its rows.

    Raises:
        ColumnError: a column does not have the form that the format demands.
        CorruptCheckpointError: rows contradict each other.
    """
    strings = {name: read_strings(table, stored) for name, stored in _STRINGS.items()}
    shapes, ndims = read_lists(table, "global_shape", 1)
    offsets, offset_dims = read_lists(table, "offsets", 0)
    lengths, length_dims = read_lists(table, "lengths", 1)
    if not (np.array_equal(ndims, offset_dims) and np.array_equal(ndims, length_dims)):
        raise damaged("a box has another number of dimensions than its tensor")
    owner = read_numbers(table, "owner", pa.int32())
    requires_grad = read_numbers(table, "requires_grad", pa.bool_())
    first = _first_rows(strings["state"].codes, strings["fqn"].codes, strings["slot"].codes, owner)
    tensor = np.cumsum(first) - 1
    for column in (strings["dtype"].codes, strings["device"].codes, requires_grad, ndims, *shapes.T):
        if not np.array_equal(column[first][tensor], column):
            raise damaged("the rows of a tensor differ in shape, dtype or another property of the whole")
    tensors: dict[str, Any] = {name: StringColumn(c.codes[first], c.values) for name, c in strings.items()}
    tensors |= {"shapes": shapes[first], "ndims": ndims[first]}
    tensors |= {"owner": owner[first], "requires_grad": requires_grad[first]}
    return tensors, BoxTable(tensor, offsets, lengths)


def _first_rows(*columns: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the rows in which one of the columns differs from the row before, and the first row, as a mask."""
    first = np.ones(len(columns[0]), np.bool_)
    first[1:] = False
    for column in columns:
        first[1:] |= column[1:] != column[:-1]
    return first


def read_summary(parquet: Any, footer: Footer) -> CatalogSummary:
    """Return the facts of a checkpoint from a few columns of its catalog, which are not compared with the others.

    Raises:
        ColumnError: a column does not have the form that the format demands.
    """
    table = parquet.read(columns=["kind", "fqn", "slot", "owner"], use_threads=False)
    table.validate(full=True)
    state, slot = read_strings(table, "kind"), read_strings(table, "slot")
    fqn, _ = read_codes(table, "fqn")  # thousands of strings, which are not needed
    first = _first_rows(state.codes, fqn, slot.codes, read_numbers(table, "owner", pa.int32()))
    begins = _first_rows(state.codes)
    states = [state.values[code] for code in dict.fromkeys(state.codes[begins].tolist())]
    tensors = int((slot.codes[first] != slot.code_of(VALUES_SLOT)).sum())
    return CatalogSummary(states, tensors, tuple(files_of(footer)), footer.info)


def sums_of_rows(catalog: Catalog) -> tuple[Int64s, Int64s]:
    """Find the checksums that the catalog's file lists in each row: those of the blocks that begin inside the row's bytes.

    Returns:
        first: position of the first sum of each row, then of each tile, among all of `catalog.file_sums`, int64 [n + i].
        counts: number of sums of each, int64 [n + i]; 0 for those of files that are not tiled or have no sums.
    """
    file, byte_offset, byte_length = catalog.runs
    blocks = np.array([len(sums) for sums in catalog.file_sums], np.int64)
    size = np.array([f.block_bytes for f in catalog.files], np.int64)
    size[catalog.untiled] = 0
    block = np.maximum(size, 1)[file]
    begin = byte_offset - np.array([f.data_offset for f in catalog.files], np.int64)[file]
    starts = -(-begin // block)
    counts = -(-(begin + byte_length) // block) - starts
    counts[size[file] == 0] = 0
    return (np.cumsum(blocks) - blocks)[file] + starts, counts


def ranges(starts: Int64s, counts: Int64s) -> Int64s:
    """Return the integers starts[i], ..., starts[i] + counts[i] - 1 for each i in turn."""
    before = np.cumsum(counts) - counts
    return np.asarray(np.arange(int(counts.sum())) + np.repeat(starts - before, counts), np.int64)


def cells(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Return the number of the grid and the index of each cell of some grids, in row-major order.

    Args:
        counts: cells of each grid along each dimension, int64 [n, d].
    """
    total = np.prod(counts, axis=1)
    grid = np.repeat(np.arange(len(total)), total)
    return grid, ranges(np.zeros_like(total), total)[:, None] // row_major(counts)[grid] % counts[grid]


def rows_of(column: Int64s, tensors: Int64s) -> tuple[Int64s, Int64s]:
    """Return the rows of some tensors, and before that the place of each row's tensor among them.

    Args:
        column: tensor of each row, ascending.
        tensors: numbers of the tensors.
    """
    first, stop = (np.searchsorted(column, tensors, side=at) for at in ("left", "right"))
    return np.repeat(np.arange(len(tensors)), stop - first), ranges(first, stop - first)


def catalog_of_rows(
    tensors: dict[str, Any],
    boxes: BoxTable,
    table: Any,
    footer: Footer,
    order: Int64s | None = None,
    *,
    tilings: Tilings | None = None,
    whole: bool = True,
) -> Catalog:
    """Return the catalog of some rows and tiles.

    Args:
        tensors: columns of all tensors, by their names in `Catalog`.
        boxes: boxes of the rows.
        table: the other columns of the rows.
        footer: footer of the catalog's file.
        order: the row of `table` for each box, then for each tile; None: they have one order.
        tilings: tilings and their tiles.
        whole: the rows are all of the catalog's. Otherwise they are all rows of some of its files.

    Raises:
        ColumnError: a column does not have the form that the format demands.
        CorruptCheckpointError: the content contradicts itself.
    """
    if table["view"].null_count != len(table):
        raise IncompatibleCheckpointError(
            "the catalog describes views of stored tensors, which only a newer version of this package reads: upgrade it"
        )
    at: Any = slice(None) if order is None else order[: len(boxes)]
    all_files = read_numbers(table, "file", pa.int32())
    files = files_of(footer)
    read = None
    if not whole:
        if (all_files < 0).any():
            raise damaged("a row lies in a file that is not listed")
        read = np.bincount(all_files, minlength=len(files))[: len(files)] > 0
    blocks = [max(f.blocks, 0) if read is None or read[i] else 0 for i, f in enumerate(files)]
    footer_sums = {int(i): text for i, text in footer.sums.items() if read is None or read[int(i)]}
    sums, sum_counts = read_flat_lists(table, "sums", pa.uint64())
    sum_count = len(sums) + sum(len(text) // 16 for text in footer_sums.values())
    if sum(blocks) != sum_count:  # checked before memory for that many sums is allocated
        raise damaged(f"it holds {sum_count} checksums for {sum(blocks)} blocks")
    strides = None
    if footer.version == 4:
        found, dims = read_lists(table, "strides", 1)
        if dims.any():
            strides = widened(found, boxes.ndim, 1)[at]
            strides = np.where(dims[at][:, None] > 0, strides, row_major(boxes.lengths))
    catalog = Catalog(
        **tensors,
        boxes=boxes,
        file=all_files[at],
        byte_offset=read_numbers(table, "byte_offset", pa.int64())[at],
        byte_length=read_numbers(table, "byte_length", pa.int64())[at],
        files=tuple(files),
        file_sums=tuple(np.zeros(count, np.uint64) for count in blocks),
        aliases=footer.aliases,
        info=footer.info,
        files_read=read,
        tilings=tilings,
        strides=strides,
        fingerprints=fingerprints_of(footer, len(tensors["ndims"])),
    )
    if (problem := catalog_problem(catalog)) is not None:
        raise damaged(problem)
    if order is not None:
        starts = np.cumsum(sum_counts) - sum_counts
        sums, sum_counts = sums[ranges(starts[order], sum_counts[order])], sum_counts[order]
    _fill_sums(catalog, sums, sum_counts, footer_sums)
    return catalog


def _fill_sums(catalog: Catalog, values: NDArray[np.uint64], counts: Int64s, footer_sums: dict[int, str]) -> None:
    """Fill in the checksums of a valid catalog: `counts[i]` of row or tile i, and those of the footer."""
    first, expected_counts = sums_of_rows(catalog)
    if not np.array_equal(counts, expected_counts):
        raise damaged("a row has more or fewer checksums than blocks")
    all_sums = np.zeros(sum(len(sums) for sums in catalog.file_sums), np.uint64)
    all_sums[ranges(first, counts)] = values
    begin = 0
    for sums in catalog.file_sums:
        sums[:] = all_sums[begin : begin + len(sums)]
        begin += len(sums)
    untiled = {i for i in np.flatnonzero(catalog.untiled).tolist() if catalog.files[i].block_bytes}
    if untiled != set(footer_sums):
        raise damaged("its separate checksums belong to other files")
    for i in untiled:
        catalog.file_sums[i][:] = np.frombuffer(bytes.fromhex(footer_sums[i]), ">u8")
