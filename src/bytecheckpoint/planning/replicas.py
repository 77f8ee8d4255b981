"""Detection of replicas: rows of several ranks with the same box of the same tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.representation.boxes import BoxTable, Int64s

__all__ = ["all_distinct", "differing_rows", "group_equal", "repeated_rows"]


def group_equal(table: BoxTable) -> Int64s:
    """Assign a number to each distinct box; return the number of each row's box, [n].

    Two rows have the same number exactly when their tensor, offsets and lengths are equal. The numbers are 0, 1, ... in
    the lexicographic order of (tensor, offsets, lengths).

    Where their ranges allow it, the columns are packed into one exact int64 key. One column is then sorted, or none
    when the table is already sorted.
    """
    return _ranks(_packed(table)) if len(table) else np.zeros(0, np.int64)


def all_distinct(table: BoxTable) -> bool:
    """Return whether no two boxes are equal. A sort of values takes a fraction of the time that `group_equal` takes."""
    if not len(table):
        return True
    key = _packed(table)
    if (key[1:] > key[:-1]).all():
        return True
    key.sort(kind="stable")
    return bool((key[1:] != key[:-1]).all())


def _packed(table: BoxTable) -> Int64s:
    """Return an integer for each box: equal for equal boxes, and in the order of (tensor, offsets, lengths)."""
    key, size = _digits(table.tensor)
    for columns in (table.offsets, table.lengths):
        for k in range(table.ndim):
            low, high = int(columns[:, k].min()), int(columns[:, k].max())
            base = high - low + 1
            if base == 1:
                continue
            digit = columns[:, k] - low
            if size * base >= 2**63:
                key = _ranks(key)
                size = int(key.max()) + 1
            if size * base >= 2**63:
                digit = _ranks(digit)
                base = int(digit.max()) + 1
            key *= base
            key += digit
            size *= base
    return key


def repeated_rows(group: Int64s) -> list[tuple[int, int]]:
    """List each row whose box an earlier row has too, as (first row with that box, this row).

    Args:
        group: number of each row's box, as `group_equal` returns it, [n].
    """
    if not len(group) or int(group.max()) + 1 == len(group):
        return []
    _, first = np.unique(group, return_index=True)
    holder = first[group]
    later = np.flatnonzero(holder != np.arange(len(group)))
    return list(zip(holder[later].tolist(), later.tolist(), strict=True))


def differing_rows(group: Int64s, value: NDArray[Any]) -> Int64s:
    """Find the rows whose value differs from that of another row of the same group; of each two such rows, one.

    Args:
        group: number of each row's box, as `group_equal` returns it, [n].
        value: value of each row, [n].
    """
    order = np.argsort(group, kind="stable")
    same_group = group[order][1:] == group[order][:-1]
    found: Int64s = order[1:][same_group & (value[order][1:] != value[order][:-1])]
    return found


def _digits(column: Int64s) -> tuple[Int64s, int]:
    """Return the column minus its smallest value, and the number of integers in its range."""
    low, high = int(column.min()), int(column.max())
    return column - low, high - low + 1


def _ranks(key: Int64s) -> Int64s:
    """Return the position of each value among the distinct values in ascending order."""
    steps = key[1:] != key[:-1]
    if (key[1:] >= key[:-1]).all():
        return _counted(steps)
    order = np.argsort(key, kind="stable")  # ranks' rows are sorted runs, which a stable sort merges
    key = key[order]
    result = np.empty_like(key)
    result[order] = _counted(key[1:] != key[:-1])
    return result


def _counted(steps: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Int64s:
    result = np.zeros(len(steps) + 1, np.int64)
    np.cumsum(steps, out=result[1:])
    return result
