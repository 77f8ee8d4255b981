"""The catalog as a file: Parquet with one row per stored shard, sealed by a hash (docs/format.md, section 3)."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.representation.arrow_columns import (
    ColumnError,
    flat_list_array,
    list_array,
    number_array,
    read_flat_lists,
    read_lists,
    read_numbers,
    read_strings,
    string_array,
)
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import Catalog, StorageFile, StringColumn
from bytecheckpoint.representation.catalog_validation import catalog_problem
from bytecheckpoint.tuning import tuning

__all__ = ["CATALOG_FORMAT_VERSION", "SEAL_BYTES", "decode", "encode"]

CATALOG_FORMAT_VERSION: Final = 1
SEAL_BYTES: Final = 32

_SEAL_MAGIC = b"bytecheckpoint"
_SEAL_VERSION = b"01"
_PARQUET_MAGIC = b"PAR1"
_FOOTER_KEY = b"bytecheckpoint"
_STRINGS = ("kind", "fqn", "slot", "dtype", "device")
_BOX_LISTS = ("global_shape", "offsets", "lengths")
_WRITE_OPTIONS: dict[str, Any] = {
    "compression": {
        **dict.fromkeys([*_STRINGS, "file", "byte_offset", "byte_length", "owner", "requires_grad", "view"], "zstd"),
        **dict.fromkeys([f"{name}.list.element" for name in _BOX_LISTS], "zstd"),
        "sums.list.element": "none",  # hashes do not compress
    },
    "use_dictionary": [*_STRINGS, *(f"{name}.list.element" for name in _BOX_LISTS), "byte_length"],
    "column_encoding": {"file": "DELTA_BINARY_PACKED", "byte_offset": "DELTA_BINARY_PACKED"},
    "dictionary_pagesize_limit": 1 << 28,
    "write_statistics": [*_STRINGS, "file", "byte_offset", "byte_length", "owner"],
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
)

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Sum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class _Files(msgspec.Struct):
    """The table of files by columns; one value stands for a column of equal values."""

    count: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    name: str | list[str]
    kind: str | list[str]
    rank: int | list[int]
    size: _Natural | list[_Natural]
    data_offset: _Natural | list[_Natural]
    header_sum: _Sum | list[_Sum]
    block_bytes: _Natural | list[_Natural]
    generation: str | list[str]
    format: str | list[str]


class _Footer(msgspec.Struct):
    version: int
    files: _Files
    sums: dict[str, str]
    aliases: dict[str, dict[str, str]]
    info: dict[str, Any]


# Makes msgspec analyse the type at import: msgspec (0.22) crashes if two threads use a type for the first time at once.
msgspec.json.Decoder(_Footer)


def encode(catalog: Catalog, *, check: bool = True) -> bytes:
    """Return the bytes of the catalog's file; equal catalogs give equal bytes.

    Args:
        catalog: the catalog to write.
        check: assert that the catalog is sound. Only tests, which need unsound files, turn this off.
    """
    problem = catalog_problem(catalog) if check else None
    assert problem is None, f"this catalog must not be written: {problem}"
    boxes, tensor = catalog.boxes, catalog.boxes.tensor
    ndims = catalog.ndims[tensor]
    sum_counts, sum_places = _sums_of_rows(catalog)
    all_sums = np.concatenate([np.zeros(0, np.uint64), *catalog.file_sums])
    columns: dict[str, Any] = {name: string_array(getattr(catalog, name), tensor) for name in _STRINGS}
    columns["global_shape"] = list_array(catalog.shapes[tensor], ndims)
    columns["offsets"] = list_array(boxes.offsets, ndims)
    columns["lengths"] = list_array(boxes.lengths, ndims)
    columns["file"] = number_array(catalog.file, pa.int32())
    columns["byte_offset"] = number_array(catalog.byte_offset, pa.int64())
    columns["byte_length"] = number_array(catalog.byte_length, pa.int64())
    columns["owner"] = number_array(catalog.owner[tensor], pa.int32())
    columns["requires_grad"] = number_array(catalog.requires_grad[tensor], pa.bool_())
    columns["sums"] = flat_list_array(number_array(all_sums[sum_places], pa.uint64()), sum_counts)
    columns["view"] = pa.nulls(len(boxes), pa.string())
    table = pa.Table.from_arrays(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **_WRITE_OPTIONS) as writer:
        writer.write_table(table, row_group_size=tuning().catalog_rows_per_group)
        writer.add_key_value_metadata({_FOOTER_KEY: _encode_footer(catalog)})
    return _seal(memoryview(sink.getvalue()))


def decode(data: bytes) -> Catalog:
    """Return the catalog in `data`, the whole content of its file.

    Raises:
        CorruptCheckpointError: a byte was changed, removed or added, or the content contradicts itself.
        IncompatibleCheckpointError: a newer version of the format wrote the file.
    """
    _check_seal(data)
    try:
        parquet = pq.ParquetFile(pa.BufferReader(data), read_dictionary=list(_STRINGS), pre_buffer=False)
        footer = _decode_footer(parquet)
        table = parquet.read(use_threads=False)
        table.validate(full=True)
        catalog = _from_table(table, footer)
        problem = catalog_problem(catalog)
        if problem is None:
            _fill_sums(catalog, table, footer)
    except UsageError as error:  # an unknown dtype
        raise IncompatibleCheckpointError(f"the catalog cannot be used: {error}") from error
    except ColumnError as error:
        raise _damaged(str(error)) from error
    except _READ_ERRORS as error:
        raise _damaged(f"its content cannot be read ({' '.join(str(error).split())[:200]})") from error
    except RecursionError as error:
        raise _damaged("its footer is nested without end") from error
    if problem is not None:
        raise _damaged(problem)
    return catalog


def _seal(parquet: memoryview) -> bytes:
    """Insert the seal between the pages and the footer, where it moves no offset that the footer holds."""
    (length,) = struct.unpack("<I", parquet[-8:-4])
    pages, footer = parquet[: -8 - length], parquet[-8 - length :]
    name = _SEAL_MAGIC + _SEAL_VERSION
    return b"".join((pages, name, _seal_hash(pages, name, footer), footer))


def _seal_hash(*parts: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def _check_seal(data: bytes) -> None:
    view = memoryview(data)
    if data[:4] != _PARQUET_MAGIC:
        raise _damaged("it is not a Parquet file, so not a catalog")
    whole = data[-4:] == _PARQUET_MAGIC and len(data) >= 12 + SEAL_BYTES
    footer_length = struct.unpack("<I", view[-8:-4])[0] if whole else 0
    if not whole or footer_length > len(data) - 12 - SEAL_BYTES:
        raise _damaged("its end is missing")
    seal_at = len(data) - 8 - footer_length - SEAL_BYTES
    hash_at = seal_at + len(_SEAL_MAGIC) + len(_SEAL_VERSION)
    name = data[seal_at:hash_at]
    if not name.startswith(_SEAL_MAGIC):
        raise _damaged("it is a Parquet file without a catalog's seal: another program's, or its end is damaged")
    end = seal_at + SEAL_BYTES
    if _seal_hash(view[:seal_at], name, view[end:]) != data[hash_at:end]:
        raise _damaged("its bytes do not match its seal")
    version = name.removeprefix(_SEAL_MAGIC)
    if version != _SEAL_VERSION:
        raise _newer(version.decode("ascii", "replace"))


def _encode_footer(catalog: Catalog) -> bytes:
    files = catalog.files
    columns: dict[str, Any] = {name: [getattr(file, name) for file in files] for name in _Files.__struct_fields__[1:]}
    columns["header_sum"] = [f"{value:016x}" for value in columns["header_sum"]]
    packed = {name: values[0] if len(set(values)) == 1 else values for name, values in columns.items()}
    untiled = np.flatnonzero(catalog.untiled).tolist()
    content = {
        "version": CATALOG_FORMAT_VERSION,
        "files": {"count": len(files), **packed},
        "sums": {str(i): catalog.sums(i).astype(">u8").tobytes().hex() for i in untiled if files[i].block_bytes},
        "aliases": {kind: dict(names) for kind, names in catalog.aliases.items()},
        "info": dict(catalog.info),
    }
    return json.dumps(content, separators=(",", ":"), sort_keys=True).encode()


def _decode_footer(parquet: Any) -> _Footer:
    text = (parquet.metadata.metadata or {}).get(_FOOTER_KEY)
    if text is None:
        raise _damaged("its footer lacks the table of files")
    content = json.loads(text)
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > CATALOG_FORMAT_VERSION:
        raise _newer(str(version))
    return msgspec.convert(content, _Footer)


def _files(table: _Files) -> list[StorageFile]:
    def column(name: str) -> Sequence[Any]:
        values = getattr(table, name)
        return values if isinstance(values, list) else [values] * table.count

    columns = {name: column(name) for name in _Files.__struct_fields__[1:]}
    columns["header_sum"] = [int(text, 16) for text in columns["header_sum"]]
    return [StorageFile(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _from_table(table: Any, footer: _Footer) -> Catalog:
    """Return the catalog that the columns hold, with all checksums still zero."""
    if table["view"].null_count != len(table):
        raise IncompatibleCheckpointError(
            "the catalog describes views of stored tensors, which only a newer version of this package reads: upgrade it"
        )
    strings = {name: read_strings(table, name) for name in _STRINGS}
    shapes, ndims = read_lists(table, "global_shape", 1)
    offsets, offset_dims = read_lists(table, "offsets", 0)
    lengths, length_dims = read_lists(table, "lengths", 1)
    if not (np.array_equal(ndims, offset_dims) and np.array_equal(ndims, length_dims)):
        raise _damaged("a box has another number of dimensions than its tensor")
    owner = read_numbers(table, "owner", pa.int32())
    requires_grad = read_numbers(table, "requires_grad", pa.bool_())
    first = np.ones(len(table), np.bool_)
    first[1:] = False
    for column in (strings["kind"].codes, strings["fqn"].codes, strings["slot"].codes, owner):
        first[1:] |= column[1:] != column[:-1]
    tensor = np.cumsum(first) - 1
    for column in (strings["dtype"].codes, strings["device"].codes, requires_grad, ndims, *shapes.T):
        if not np.array_equal(column[first][tensor], column):
            raise _damaged("the rows of a tensor differ in shape, dtype or another property of the whole")
    files = _files(footer.files)
    blocks = [max(file.blocks, 0) for file in files]
    sums, _ = read_flat_lists(table, "sums", pa.uint64())
    sum_count = len(sums) + sum(len(text) // 16 for text in footer.sums.values())
    if sum(blocks) != sum_count:  # checked before memory for that many sums is allocated
        raise _damaged(f"it holds {sum_count} checksums for {sum(blocks)} blocks")
    return Catalog(
        **{name: StringColumn(column.codes[first], column.values) for name, column in strings.items()},
        shapes=shapes[first],
        ndims=ndims[first],
        owner=owner[first],
        requires_grad=requires_grad[first],
        boxes=BoxTable(tensor, offsets, lengths),
        file=read_numbers(table, "file", pa.int32()),
        byte_offset=read_numbers(table, "byte_offset", pa.int64()),
        byte_length=read_numbers(table, "byte_length", pa.int64()),
        files=tuple(files),
        file_sums=tuple(np.zeros(count, np.uint64) for count in blocks),
        aliases=footer.aliases,
        info=footer.info,
    )


def _fill_sums(catalog: Catalog, table: Any, footer: _Footer) -> None:
    """Fill in the checksums of a catalog from `_from_table` whose rows have been validated."""
    expected_counts, places = _sums_of_rows(catalog)
    values, counts = read_flat_lists(table, "sums", pa.uint64())
    if not np.array_equal(counts, expected_counts):
        raise _damaged("a row has more or fewer checksums than blocks")
    all_sums = np.zeros(sum(len(sums) for sums in catalog.file_sums), np.uint64)
    all_sums[places] = values
    begin = 0
    for sums in catalog.file_sums:
        sums[:] = all_sums[begin : begin + len(sums)]
        begin += len(sums)
    untiled = {i for i in np.flatnonzero(catalog.untiled).tolist() if catalog.files[i].block_bytes}
    if {str(i) for i in untiled} != set(footer.sums):
        raise _damaged("its separate checksums belong to other files")
    for i in untiled:
        catalog.file_sums[i][:] = np.frombuffer(bytes.fromhex(footer.sums[str(i)]), ">u8")


def _sums_of_rows(catalog: Catalog) -> tuple[Int64s, Int64s]:
    """Find the checksums that the catalog file lists in each row: those of the blocks that begin inside the row's bytes.

    Returns:
        counts: number of sums of each row, int64 [n]; 0 for rows of files that are not tiled or have no sums.
        places: positions of these sums in the concatenation of all files' sums, row by row, int64 [counts.sum()].
    """
    file = catalog.file
    blocks = np.array([f.blocks for f in catalog.files], np.int64)
    size = np.array([f.block_bytes for f in catalog.files], np.int64)
    size[catalog.untiled] = 0
    block = np.maximum(size, 1)[file]
    begin = catalog.byte_offset - np.array([f.data_offset for f in catalog.files], np.int64)[file]
    starts = -(-begin // block)
    counts = -(-(begin + catalog.byte_length) // block) - starts
    counts[size[file] == 0] = 0
    return counts, _concatenated_ranges((np.cumsum(blocks) - blocks)[file] + starts, counts)


def _concatenated_ranges(starts: Int64s, counts: Int64s) -> Int64s:
    """Return the integers starts[i], ..., starts[i] + counts[i] - 1 for each i in turn."""
    before = np.cumsum(counts) - counts
    return np.asarray(np.arange(int(counts.sum())) + np.repeat(starts - before, counts), np.int64)


def _newer(version: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"the catalog has format version {version}, this package reads up to {CATALOG_FORMAT_VERSION}: upgrade it"
    )


def _damaged(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"catalog 'metadata.parquet' cannot be trusted: {what}; rebuild it with `bytecheckpoint repair`, "
        "or fall back to an older step",
        file="metadata.parquet",
    )
