"""The catalog as a file: Parquet, one row per stored shard, sealed by a hash; docs/format.md specifies it."""

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
from numpy.typing import NDArray

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import Catalog, Names, StorageFile
from bytecheckpoint.representation.catalog_check import MAX_DIMS, catalog_problem, sum_places
from bytecheckpoint.representation.names import escape, unescape

__all__ = ["CATALOG_FORMAT_VERSION", "SEAL_BYTES", "decode", "encode"]

CATALOG_FORMAT_VERSION: Final = 1
SEAL_BYTES: Final = 32

_MAGIC = b"bytecheckpoint01"
_PARQUET = b"PAR1"
_FOOTER_KEY = b"bytecheckpoint"
_STRINGS = ("kind", "fqn", "slot", "dtype", "device")
_LISTS = ("global_shape", "offsets", "lengths")
_ROW_GROUP = 1 << 20
_WRITE_OPTIONS: dict[str, Any] = {
    "compression": {
        **dict.fromkeys([*_STRINGS, "file", "byte_offset", "byte_length", "owner", "requires_grad", "view"], "zstd"),
        **dict.fromkeys([f"{name}.list.element" for name in _LISTS], "zstd"),
        "sums.list.element": "none",  # hashes do not compress
    },
    "use_dictionary": [*_STRINGS, *(f"{name}.list.element" for name in _LISTS), "byte_length"],
    "column_encoding": {"file": "DELTA_BINARY_PACKED", "byte_offset": "DELTA_BINARY_PACKED"},
    "dictionary_pagesize_limit": 1 << 28,
    "write_statistics": [*_STRINGS, "file", "byte_offset", "byte_length", "owner"],
    "store_schema": False,
}

_UNREADABLE = (
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
    """The table of files by columns; a column whose values are all equal is that one value."""

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


def encode(catalog: Catalog) -> bytes:
    """The bytes of the catalog's file; the same catalog gives the same bytes."""
    problem = catalog_problem(catalog)
    assert problem is None, f"this catalog must not be written: {problem}"
    boxes, tensor = catalog.boxes, catalog.boxes.tensor
    ndims = catalog.ndims[tensor]
    counts, places = sum_places(catalog)
    all_sums = np.concatenate([np.zeros(0, np.uint64), *catalog.file_sums])
    columns: dict[str, Any] = {}
    for name in _STRINGS:
        names: Names = getattr(catalog, name)
        codes = _array(names.codes[tensor].astype(np.int32), pa.int32())
        columns[name] = pa.DictionaryArray.from_arrays(codes, _string_array(list(map(escape, names.values))))
    columns["global_shape"] = _lists(catalog.shapes[tensor], ndims)
    columns["offsets"] = _lists(boxes.offsets, ndims)
    columns["lengths"] = _lists(boxes.lengths, ndims)
    columns["file"] = _array(catalog.file, pa.int32())
    columns["byte_offset"] = _array(catalog.byte_offset, pa.int64())
    columns["byte_length"] = _array(catalog.byte_length, pa.int64())
    columns["owner"] = _array(catalog.owner[tensor], pa.int32())
    columns["requires_grad"] = _array(
        np.packbits(catalog.requires_grad[tensor], bitorder="little"), pa.bool_(), len(boxes)
    )
    columns["sums"] = pa.ListArray.from_arrays(_list_offsets(counts), _array(all_sums[places], pa.uint64()))
    columns["view"] = pa.nulls(len(boxes), pa.string())
    table = pa.Table.from_arrays(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **_WRITE_OPTIONS) as writer:
        writer.write_table(table, row_group_size=_ROW_GROUP)
        writer.add_key_value_metadata({_FOOTER_KEY: _footer(catalog)})
    return _seal(memoryview(sink.getvalue()))


def decode(data: bytes) -> Catalog:
    """The catalog in `data`, the whole content of its file.

    Raises:
        CorruptCheckpointError: a byte was changed, cut off or added, or the content contradicts itself.
        IncompatibleCheckpointError: it was written by a newer version of the format.
    """
    _check_seal(data)
    try:
        parquet = pq.ParquetFile(pa.BufferReader(data), read_dictionary=list(_STRINGS), pre_buffer=False)
        footer = _read_footer(parquet)
        table = parquet.read(use_threads=False)
        table.validate(full=True)
        catalog = _from_table(table, footer)
        problem = catalog_problem(catalog)
        if problem is None:
            _place_sums(catalog, table, footer)
    except UsageError as error:  # only from dtypes.itemsize
        raise IncompatibleCheckpointError(f"the catalog cannot be used: {error}") from error
    except _UNREADABLE as error:
        raise _damaged(f"its content cannot be read ({' '.join(str(error).split())[:200]})") from error
    except RecursionError as error:
        raise _damaged("its footer is nested without end") from error
    if problem is not None:
        raise _damaged(problem)
    return catalog


def _seal(parquet: memoryview) -> bytes:
    """The Parquet file with the seal between its pages and its footer, where no offset of the footer is moved by it."""
    (length,) = struct.unpack("<I", parquet[-8:-4])
    pages, footer = parquet[: -8 - length], parquet[-8 - length :]
    return b"".join((pages, _MAGIC, _seal_hash(pages, _MAGIC, footer), footer))


def _seal_hash(*parts: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def _check_seal(data: bytes) -> None:
    view = memoryview(data)
    if data[:4] != _PARQUET:
        raise _damaged("it is not a Parquet file, so not a catalog")
    length = struct.unpack("<I", view[-8:-4])[0] if data[-4:] == _PARQUET and len(data) >= 12 + SEAL_BYTES else None
    if length is None or length > len(data) - 12 - SEAL_BYTES:
        raise _damaged("its end is missing")
    at = len(data) - 8 - length - SEAL_BYTES
    magic = data[at : at + len(_MAGIC)]
    stem = len(_MAGIC) - 2
    if magic[:stem] != _MAGIC[:stem]:
        raise _damaged("it is a Parquet file without a catalog's seal: another program's, or its end is damaged")
    if _seal_hash(view[:at], magic, view[at + SEAL_BYTES :]) != data[at + len(_MAGIC) : at + SEAL_BYTES]:
        raise _damaged("its bytes do not match its seal")
    if magic != _MAGIC:
        raise _newer(magic[stem:].decode("ascii", "replace"))


def _footer(catalog: Catalog) -> bytes:
    files = catalog.files
    columns: dict[str, Any] = {name: [getattr(file, name) for file in files] for name in _Files.__struct_fields__[1:]}
    columns["header_sum"] = [f"{value:016x}" for value in columns["header_sum"]]
    packed = {name: values[0] if len(set(values)) == 1 else values for name, values in columns.items()}
    loose = np.flatnonzero(catalog.untiled).tolist()
    content = {
        "version": CATALOG_FORMAT_VERSION,
        "files": {"count": len(files), **packed},
        "sums": {str(i): catalog.sums(i).astype(">u8").tobytes().hex() for i in loose if files[i].block_bytes},
        "aliases": {kind: dict(names) for kind, names in catalog.aliases.items()},
        "info": dict(catalog.info),
    }
    return json.dumps(content, separators=(",", ":"), sort_keys=True).encode()


def _read_footer(parquet: Any) -> _Footer:
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
    """The catalog in the columns, its checksums all zero as yet."""
    if table["view"].null_count != len(table):
        raise IncompatibleCheckpointError(
            "the catalog describes views of stored tensors, which only a newer version of this package reads: upgrade it"
        )
    strings = {name: _strings(table, name) for name in _STRINGS}
    shapes, ndims = _padded(table, "global_shape", 1)
    offsets, offset_dims = _padded(table, "offsets", 0)
    lengths, length_dims = _padded(table, "lengths", 1)
    if not (np.array_equal(ndims, offset_dims) and np.array_equal(ndims, length_dims)):
        raise _damaged("a box has another number of dimensions than its tensor")
    owner = _numbers(table, "owner", pa.int32())
    grad = _numbers(table, "requires_grad", pa.bool_())
    first = np.ones(len(table), np.bool_)
    first[1:] = False
    for column in (strings["kind"].codes, strings["fqn"].codes, strings["slot"].codes, owner):
        first[1:] |= column[1:] != column[:-1]
    tensor = np.cumsum(first) - 1
    for column in (strings["dtype"].codes, strings["device"].codes, grad, ndims, *shapes.T):
        if not np.array_equal(column[first][tensor], column):
            raise _damaged("the rows of a tensor differ in shape, dtype or another property of the whole")
    files = _files(footer.files)
    blocks = [max(file.blocks, 0) for file in files]
    given = len(_whole(table["sums"]).flatten()) + sum(len(text) // 16 for text in footer.sums.values())
    if sum(blocks) != given:  # before memory is taken for that many
        raise _damaged(f"it holds {given} checksums for {sum(blocks)} blocks")
    return Catalog(
        **{name: Names(column.codes[first], column.values) for name, column in strings.items()},
        shapes=shapes[first],
        ndims=ndims[first],
        owner=owner[first],
        requires_grad=grad[first],
        boxes=BoxTable(tensor, offsets, lengths),
        file=_numbers(table, "file", pa.int32()),
        byte_offset=_numbers(table, "byte_offset", pa.int64()),
        byte_length=_numbers(table, "byte_length", pa.int64()),
        files=tuple(files),
        file_sums=tuple(np.zeros(count, np.uint64) for count in blocks),
        aliases=footer.aliases,
        info=footer.info,
    )


def _place_sums(catalog: Catalog, table: Any, footer: _Footer) -> None:
    """Fill in the checksums of a catalog that was just made, once its rows are known to be sound."""
    counts, places = sum_places(catalog)
    column = _whole(table["sums"])
    values = _elements(column, "sums", pa.uint64())
    if not np.array_equal(np.diff(_numpy(column.offsets)), counts):
        raise _damaged("a row has more or fewer checksums than blocks")
    flat = np.zeros(sum(len(sums) for sums in catalog.file_sums), np.uint64)
    flat[places] = values
    begin = 0
    for sums in catalog.file_sums:
        sums[:] = flat[begin : begin + len(sums)]
        begin += len(sums)
    loose = {i for i in np.flatnonzero(catalog.untiled).tolist() if catalog.files[i].block_bytes}
    if {str(i) for i in loose} != set(footer.sums):
        raise _damaged("its separate checksums belong to other files")
    for i in loose:
        catalog.file_sums[i][:] = np.frombuffer(bytes.fromhex(footer.sums[str(i)]), ">u8")


def _list_offsets(counts: Int64s) -> Any:
    return _array(np.concatenate(([0], np.cumsum(counts))).astype(np.int32), pa.int32())


def _array(values: NDArray[Any], kind: Any, count: int | None = None) -> Any:
    """An Arrow array over `values` as they are; `pa.array` would import pandas, which takes a second."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values) if count is None else count, [None, data])


def _string_array(values: list[str]) -> Any:
    encoded = [value.encode() for value in values]
    ends = _list_offsets(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    return pa.Array.from_buffers(pa.string(), len(values), [None, ends.buffers()[1], pa.py_buffer(b"".join(encoded))])


def _lists(padded: Int64s, ndims: Int64s) -> Any:
    mask = np.arange(padded.shape[1]) < ndims[:, None]
    return pa.ListArray.from_arrays(_list_offsets(ndims), _array(padded[mask], pa.int64()))


def _padded(table: Any, name: str, fill: int) -> tuple[Int64s, Int64s]:
    """A column of lists as a matrix padded on the right, and the lengths of the lists."""
    column = _whole(table[name])
    values = _elements(column, name, pa.int64())
    dims = np.diff(_numpy(column.offsets)).astype(np.int64)
    width = max(int(dims.max(initial=0)), 1)
    if width > MAX_DIMS:
        raise _damaged(f"a tensor of {width} dimensions is not possible")
    if len(values) == width * len(dims):  # all of one length, as ever so often: nothing to pad
        return values.reshape(-1, width), dims
    padded = np.full((len(dims), width), fill, np.int64)
    padded[np.arange(width) < dims[:, None]] = values
    return padded, dims


def _whole(column: Any) -> Any:
    """All chunks of a column as one array; as in `_array`, the obvious calls would import pandas."""
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def _numpy(array: Any) -> NDArray[Any]:
    """A read-only view of an Arrow array of numbers without nulls (of booleans: a copy)."""
    data, count = array.buffers()[1], len(array)
    if data is None:
        return np.zeros(0, str(array.type))
    if pa.types.is_boolean(array.type):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return bits[array.offset : array.offset + count].astype(np.bool_)
    dtype = np.dtype(str(array.type))
    return np.frombuffer(data, dtype, count, array.offset * dtype.itemsize)


def _elements(column: Any, name: str, kind: Any) -> NDArray[Any]:
    values = column.flatten()
    if column.null_count or values.null_count or values.type != kind:
        raise _damaged(f"its column {name!r} has nulls or another type")
    return _numpy(values)


def _numbers(table: Any, name: str, kind: Any) -> NDArray[Any]:
    column = _whole(table[name])
    if column.null_count or column.type != kind:
        raise _damaged(f"its column {name!r} has nulls or another type")
    return _numpy(column)


def _strings(table: Any, name: str) -> Names:
    column = _whole(table[name].unify_dictionaries())
    if column.null_count or column.type != pa.dictionary(pa.int32(), pa.string()):
        raise _damaged(f"its column {name!r} has nulls or another type")
    values = list(map(unescape, column.dictionary.to_pylist()))
    if len(set(values)) != len(values):
        raise _damaged(f"its column {name!r} has one string twice in its dictionary")
    return Names(_numpy(column.indices).astype(np.int64), values)


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
