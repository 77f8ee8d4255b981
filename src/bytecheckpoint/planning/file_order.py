"""Order of planned rows in storage files, and where files begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bytecheckpoint.planning.local_table import TensorRecord
from bytecheckpoint.representation.boxes import Int64s, Mask
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.tuning import tuning

__all__ = ["FileOrder", "FilesOfRows", "file_bounds"]


class FilesOfRows(NamedTuple):
    """The files of rows, and the place of each row in them.

    Attributes:
        file: number of each row's file, int64 [n].
        offset: byte offset of each row in its file's data section, int64 [n].
        first: first row of each file, int64 [f].
        state: name of the state of each file, [f].
        part: part number of each file, int64 [f].
    """

    file: Int64s
    offset: Int64s
    first: Int64s
    state: list[str]
    part: Int64s


class FileOrder:
    """The order of a rank's tensors in its files: by state, frozen ones last, by item size (descending) and dtype.

    Args:
        tensors: tensors of the plan.

    Attributes:
        states: names of the states, sorted.
        state: number of each tensor's state, int64 [t].
        frozen: mask of the tensors that lie in files of their own, [t].
        section: number of each tensor's state, file and item size, int64 [t]; sections lie in a file in this order.
        place: number of each tensor's state, file, item size and dtype, int64 [t].
    """

    def __init__(self, tensors: Sequence[TensorRecord]) -> None:
        self.states = sorted({t.state for t in tensors})
        self.state = np.array([self.states.index(t.state) for t in tensors], np.int64)
        self.frozen = np.array([t.frozen for t in tensors], bool)
        keys = [(t.state, t.frozen, -itemsize(t.dtype), t.dtype) for t in tensors]
        self.place = _numbered(keys)
        self.section = _numbered([key[:3] for key in keys])

    def files(
        self, rank: Int64s, tensor: Int64s, nbytes: Int64s, apart: Mask | None = None, inside: Mask | None = None
    ) -> FilesOfRows:
        """Divide rows, which are in this order rank by rank, into files.

        Args:
            rank: rank that writes each row, int64 [n].
            tensor: tensor of each row, int64 [n].
            nbytes: bytes of each row, int64 [n].
            apart: mask of rows that lie in files without others, [n]; None: those of frozen tensors.
            inside: mask of rows that lie in the file of the row before, [n]; None: none need to.
        """
        state = self.state[tensor]
        part = _parts(rank, state, self.frozen[tensor] if apart is None else apart, inside)
        new = _changes(rank, state, part)
        first = np.flatnonzero(new)
        file = np.cumsum(new) - 1
        before = np.cumsum(nbytes) - nbytes
        offset = before - before[first][file] if len(rank) else before
        return FilesOfRows(file, offset, first, [self.states[k] for k in state[first]], part[first])


def _numbered(keys: Sequence[tuple[object, ...]]) -> Int64s:
    number = {key: i for i, key in enumerate(sorted(set(keys)))}
    return np.array([number[key] for key in keys], np.int64)


def _parts(rank: Int64s, state: Int64s, apart: Mask, inside: Mask | None = None) -> Int64s:
    """Return the part number of each row: some rows have their own files, and files of too many entries are split."""
    new_state = _changes(rank, state)
    new_file = new_state | _changes(apart)
    count = _count_from(new_file)
    if inside is not None:  # rows that stay together count as the first of them
        count = count[np.maximum.accumulate(np.where(inside, 0, np.arange(len(count))))]
    full = count // tuning().max_entries_per_file
    new_file[1:] |= full[1:] != full[:-1]
    return np.cumsum(new_file) - np.cumsum(new_file)[new_state][np.cumsum(new_state) - 1]


def _changes(*columns: Int64s | Mask) -> Mask:
    """Return which rows differ from the row before in a column; the first one does."""
    new = np.zeros(len(columns[0]), bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def _count_from(begins: Mask) -> Int64s:
    """Count the rows since the last row that begins something, itself 0."""
    rows = np.arange(len(begins))
    return rows - rows[begins][np.cumsum(begins) - 1]


def file_bounds(state: Int64s, apart: Mask, inside: Mask | None = None) -> list[tuple[int, int, int, int]]:
    """Divide the rows of one rank, in the order of the plan, into files.

    Args:
        state: number of each row's state.
        apart: mask of the rows that lie in files without others, such as those of frozen tensors.
        inside: mask of the rows that lie in the file of the row before; None: none need to.

    Returns:
        (state, part, first row, end row) of each file.
    """
    part = _parts(np.zeros_like(state), state, apart, inside)
    starts = np.flatnonzero(_changes(state, part)) if len(state) else state
    ends = [*starts[1:].tolist(), len(state)]
    return list(zip(state[starts].tolist(), part[starts].tolist(), starts.tolist(), ends, strict=False))
