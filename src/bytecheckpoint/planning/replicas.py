"""Recognising copies: rows that stand for the same box of the same tensor on several ranks."""

from __future__ import annotations

import numpy as np

from bytecheckpoint.representation.boxes import BoxTable, Int64s

__all__ = ["group_equal"]


def group_equal(table: BoxTable) -> Int64s:
    """Number of the distinct box that each row is, shape [n].

    Two rows have the same number exactly when tensor, offsets and lengths agree. Numbers run from 0 without gaps, in
    the lexicographic order of (tensor, offsets, lengths).

    The columns are packed into one exact int64 key wherever their ranges allow it, so that the work is one sort of
    one column, and none when the table is sorted already.
    """
    if not len(table):
        return np.zeros(0, np.int64)
    key, size = _digits(table.tensor)
    for columns in (table.offsets, table.lengths):
        for k in range(table.ndim):
            digit, base = _digits(columns[:, k])
            if base == 1:
                continue
            if size * base >= 2**63:
                key = _ranks(key)
                size = int(key.max()) + 1
            if size * base >= 2**63:
                digit = _ranks(digit)
                base = int(digit.max()) + 1
            key *= base
            key += digit
            size *= base
    return _ranks(key)


def _digits(column: Int64s) -> tuple[Int64s, int]:
    """The column counted from its smallest value, and the number of values that its range holds."""
    low, high = int(column.min()), int(column.max())
    return column - low, high - low + 1


def _ranks(key: Int64s) -> Int64s:
    """Position of each value among the distinct values in ascending order."""
    steps = key[1:] != key[:-1]
    if (key[1:] >= key[:-1]).all():
        return _counted(steps)
    order = np.argsort(key)
    key = key[order]
    result = np.empty_like(key)
    result[order] = _counted(key[1:] != key[:-1])
    return result


def _counted(steps: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Int64s:
    result = np.zeros(len(steps) + 1, np.int64)
    np.cumsum(steps, out=result[1:])
    return result
