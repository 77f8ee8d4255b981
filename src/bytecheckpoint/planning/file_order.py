"""Order of planned rows in storage files, and where files begin and end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytecheckpoint.planning.local_table import TensorRecord
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.tuning import tuning

__all__ = ["FileOrder", "file_bounds", "lay_out", "parts"]


class FileOrder:
    """The order of a rank's tensors in its files: by state, item size (descending) and dtype.

    Args:
        tensors: tensors of the plan.

    Attributes:
        states: names of the states, sorted.
        state: number of each tensor's state, int64 [t].
        section: number of each tensor's state and item size, int64 [t]; sections lie in a file in this order.
        place: number of each tensor's state, item size and dtype, int64 [t].
    """

    def __init__(self, tensors: Sequence[TensorRecord]) -> None:
        self.states = sorted({t.state for t in tensors})
        self.state = np.array([self.states.index(t.state) for t in tensors], np.int64)
        keys = [(t.state, -itemsize(t.dtype), t.dtype) for t in tensors]
        self.place = _numbered(keys)
        self.section = _numbered([key[:2] for key in keys])


def _numbered(keys: Sequence[tuple[object, ...]]) -> Int64s:
    number = {key: i for i, key in enumerate(sorted(set(keys)))}
    return np.array([number[key] for key in keys], np.int64)


def parts(rank: Int64s, state: Int64s) -> Int64s:
    """Return the part number of each row: files with too many entries are split."""
    new = np.ones(len(rank), bool)
    new[1:] = (rank[1:] != rank[:-1]) | (state[1:] != state[:-1])
    begin = np.flatnonzero(new)
    return (
        np.arange(len(rank)) - np.repeat(begin, np.diff(np.append(begin, len(rank))))
    ) // tuning().max_entries_per_file


def lay_out(rank: Int64s, state: Int64s, part: Int64s, nbytes: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return the file number and offset of each row, and the first row of each file."""
    new = np.ones(len(rank), bool)
    new[1:] = (rank[1:] != rank[:-1]) | (state[1:] != state[:-1]) | (part[1:] != part[:-1])
    start = np.flatnonzero(new)
    file = np.cumsum(new) - 1
    before = np.cumsum(nbytes) - nbytes
    return file, before - before[start][file] if len(rank) else before, start


def file_bounds(states: Sequence[int] | Int64s) -> list[tuple[int, int, int, int]]:
    """Divide the rows of one rank, in the order of the plan, into files.

    Args:
        states: number of each row's state.

    Returns:
        (state, part, first row, end row) of each file.
    """
    most = tuning().max_entries_per_file
    column = np.asarray(states, np.int64)
    bounds: list[tuple[int, int, int, int]] = []
    ends = [*(np.flatnonzero(column[1:] != column[:-1]) + 1).tolist(), len(column)] if len(column) else []
    first = 0
    for end in ends:
        for part, begin in enumerate(range(first, end, most)):
            bounds.append((int(column[first]), part, begin, min(begin + most, end)))
        first = end
    return bounds
