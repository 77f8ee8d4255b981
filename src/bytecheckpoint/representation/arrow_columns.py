"""Catalog columns as Arrow arrays and back.

The functions work on Arrow's buffers, since `pa.array` and `to_numpy` import pandas, which takes a second, and `flatten`
imports `pyarrow.compute`, which takes 0.1 s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import MAX_DIMS
from bytecheckpoint.representation.names import escape, unescape
from bytecheckpoint.representation.string_column import StringColumn

__all__ = [
    "ColumnError",
    "as_numpy",
    "dictionary_array",
    "flat_list_array",
    "list_array",
    "number_array",
    "read_codes",
    "read_flat_lists",
    "read_lists",
    "read_numbers",
    "read_strings",
    "string_array",
]


#: Cells of a small matrix, which may be padding for the most part.
_MOST_CELLS = 1 << 22


class ColumnError(ValueError):
    """A column does not have the form that the format demands."""


def number_array(values: NDArray[Any], arrow_type: Any) -> Any:
    """Return an Arrow array that shares the memory of `values`; booleans are packed into bits instead."""
    data = np.packbits(values, bitorder="little") if pa.types.is_boolean(arrow_type) else np.ascontiguousarray(values)
    return pa.Array.from_buffers(arrow_type, len(values), [None, pa.py_buffer(data)])


def string_array(column: StringColumn, rows: Int64s) -> Any:
    """Return the strings of `column` at `rows` as a dictionary array, escaped."""
    used, codes = np.unique(column.codes[rows], return_inverse=True)  # a part of a catalog has few of its strings
    return dictionary_array(codes, [escape(column.values[code]) for code in used.tolist()])


def dictionary_array(codes: NDArray[Any], strings: Iterable[str]) -> Any:
    """Return the dictionary array whose row i holds `strings[codes[i]]`; the strings differ."""
    encoded = [string.encode() for string in strings]
    ends = np.fromiter(itertools.accumulate(map(len, encoded), initial=0), np.int32, len(encoded) + 1)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    values = pa.Array.from_buffers(pa.string(), len(encoded), buffers)
    return pa.DictionaryArray.from_arrays(number_array(codes.astype(np.int32), pa.int32()), values)


def list_array(padded: Int64s, lengths: Int64s) -> Any:
    """Return an Arrow array of lists: list i holds the first `lengths[i]` numbers of row i."""
    mask = np.arange(padded.shape[1]) < lengths[:, None]
    return flat_list_array(number_array(padded[mask], pa.int64()), lengths)


def flat_list_array(values: Any, lengths: Int64s) -> Any:
    """Return an Arrow array that cuts `values` into lists of the given lengths, one after the other."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(number_array(offsets, pa.int32()), values)


def read_numbers(table: Any, name: str, arrow_type: Any) -> NDArray[Any]:
    """Return a column of numbers or booleans, which must be of type `arrow_type` and without nulls."""
    column = _joined_chunks(table[name])
    _check(name, not column.null_count and column.type == arrow_type)
    return as_numpy(column)


def read_strings(table: Any, name: str) -> StringColumn:
    """Return a dictionary column of strings, unescaped."""
    codes, dictionary = read_codes(table, name)
    values = list(map(unescape, dictionary.to_pylist()))
    if len(set(values)) != len(values):
        raise ColumnError(f"its column {name!r} has one string twice in its dictionary")
    return StringColumn(codes, values)


def read_codes(table: Any, name: str) -> tuple[Int64s, Any]:
    """Return the codes of a dictionary column of strings, and its dictionary, an Arrow array."""
    column = _joined_chunks(table[name].unify_dictionaries())
    _check(name, not column.null_count and column.type == pa.dictionary(pa.int32(), pa.string()))
    return as_numpy(column.indices).astype(np.int64), column.dictionary


def read_lists(table: Any, name: str, fill: int) -> tuple[Int64s, Int64s]:
    """Return a column of int64 lists as a matrix padded on the right with `fill`, and the lengths of the lists."""
    values, lengths = read_flat_lists(table, name, pa.int64())
    width = max(int(lengths.max(initial=0)), 1)
    if width > MAX_DIMS:
        raise ColumnError(f"a tensor of {width} dimensions is not possible")
    if len(values) == width * len(lengths):  # the usual case: lists of one length need no padding
        return values.reshape(-1, width), lengths
    if len(lengths) * width > _MOST_CELLS + 64 * len(values):
        raise ColumnError(f"lists of {len(values)} numbers do not fill {len(lengths)} rows of {width}")
    padded = np.full((len(lengths), width), fill, np.int64)
    padded[np.arange(width) < lengths[:, None]] = values
    return padded, lengths


def read_flat_lists(table: Any, name: str, arrow_type: Any) -> tuple[NDArray[Any], Int64s]:
    """Return the elements of all lists of a column, one list after the other, and the lengths of the lists."""
    column = _joined_chunks(table[name])
    _check(name, not column.null_count and pa.types.is_list(column.type) and column.type.value_type == arrow_type)
    offsets = as_numpy(column.offsets)
    values = column.values[offsets[0] : offsets[-1]]
    _check(name, not values.null_count)
    return as_numpy(values), np.diff(offsets).astype(np.int64)


def _check(name: str, sound: bool) -> None:
    if not sound:
        raise ColumnError(f"its column {name!r} has nulls or another type")


def _joined_chunks(column: Any) -> Any:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def as_numpy(array: Any) -> NDArray[Any]:
    """Return a read-only view of an Arrow array of numbers without nulls (of booleans: a copy)."""
    data, count = array.buffers()[1], len(array)
    if data is None:
        return np.zeros(0, array.type.to_pandas_dtype())
    if pa.types.is_boolean(array.type):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return bits[array.offset : array.offset + count].astype(np.bool_)
    dtype = np.dtype(array.type.to_pandas_dtype())
    return np.frombuffer(data, dtype, count, array.offset * dtype.itemsize)
