"""Read documents from Parquet files: the values of one column, by row groups."""

from __future__ import annotations

import bisect
import copy
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bytecheckpoint.dataloader.permutation import Permutation, order_key
from bytecheckpoint.dataloader.sources.base import Cursor, Document, OrderedCursor, Source, checked_taken
from bytecheckpoint.dataloader.sources.files import SourceFiles
from bytecheckpoint.dataloader.sources.paths import Paths
from bytecheckpoint.errors import StorageError, UsageError, listed

__all__ = ["ParquetSource"]

_WINDOW_BYTES: Final = 32 * 1024 * 1024


class ParquetSource(Source):
    """Values of one column: text, bytes, lists of integers (which become arrays of tokens), or structs (dicts).

    A row group is read as a whole, so rows are not shuffled over all files. In each epoch the row groups have a random
    order, and are laid end to end. Each stream has its even share of this row of rows, one section of it. It reads the
    section window by window, and the rows of a window, which come from several row groups, in a random order.

    Each stream holds one window in memory; streams of one process share the row groups that they both need.

    Args:
        paths: Parquet files.
        name: name of the source; None for the last component of the (first) path.
        column: name of the column.
        shuffle: True for the random order above, False for the order of the files, of which each stream reads one section.
        window_bytes: uncompressed bytes of the column in a window: whole row groups, at least one.
        cache: local folder for copies of files behind a URL, as for `TextSource`.

    Raises:
        UsageError: a file is missing, is no Parquet file, or lacks the column; there are no rows. A null raises it when it
            is read.
    """

    def __init__(
        self,
        paths: Paths,
        name: str | None = None,
        *,
        column: str = "text",
        shuffle: bool = True,
        window_bytes: int = _WINDOW_BYTES,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        self._files = SourceFiles(paths, cache)
        self.name = self._files.name if name is None else name
        self.shuffle = shuffle
        self._column = column
        self._window_bytes = window_bytes
        groups = [group for file, path in enumerate(self._files.paths) for group in _row_groups(file, path, column)]
        # Of each row group: its file, its number there, its first row there, its rows, bytes of the column.
        self._groups = np.array(groups, np.int64).reshape(-1, 5)
        self._fed = range(len(self._groups))  # numbers of the row groups that are fed
        self._shared: weakref.WeakValueDictionary[int, pa.ChunkedArray] = weakref.WeakValueDictionary()
        if not len(self):
            raise UsageError(f"the source {self.name!r} has no documents: {self._files.paths[0]} has no rows")

    def __len__(self) -> int:
        return int(self._groups[self._fed, 3].sum())

    def describe_first(self, saved: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the description of the first rows; see `Source`."""
        files = self._files.first(saved)
        if files is None:
            return None
        before = self.section(0, saved["documents"])
        before._files = files
        return before.describe()

    def section(self, first: int, stop: int) -> Self:
        """Return the row groups between two numbers of rows, as a source that shares what is read."""
        ends = np.cumsum(self._groups[:, 3])
        begin, end = np.searchsorted(ends, (first, stop), side="right").tolist()
        other = copy.copy(self)
        other._fed, other._shared = range(begin, end), self._shared
        return other

    def describe(self) -> dict[str, Any]:
        """Return the rows and row groups, the column, the size of a window, the sizes and samples of the files."""
        return {
            "kind": "parquet",
            "documents": len(self),
            "column": self._column,
            "shuffle": self.shuffle,
            "window_bytes": self._window_bytes,
            **self._files.describe(),
        }

    def sampled_files(self) -> dict[str, str]:
        """Return the hash of each file in "files" of the description, by path."""
        return self._files.sampled

    def cursor(self, stream: int, streams: int, epoch: int, seed: int, state: Any = None) -> Cursor:
        """Return a cursor; its state is the number of documents that were taken."""
        key = order_key(seed, epoch, self.name)
        order = np.arange(len(self._fed))
        if self.shuffle:
            order = Permutation(len(order), key).at(order)
        order += self._fed.start
        start, stop = len(self) * stream // streams, len(self) * (stream + 1) // streams
        taken = checked_taken(self.name, state, stop - start)
        keys = (lambda number: order_key(key, stream, f"window {number}")) if self.shuffle else None
        return _ParquetCursor(self, self._windows(order, start, stop), keys, taken)

    def _windows(self, order: np.ndarray[Any, Any], start: int, stop: int) -> list[list[tuple[int, int, int]]]:
        """Cut a section of the rows, in an order of row groups, into windows of (row group, first row, last row + 1)."""
        rows = self._groups[order, 3]
        ends = np.cumsum(rows)
        windows: list[list[tuple[int, int, int]]] = []
        room = 0
        for place in range(int(ends.searchsorted(start, "right")), int(ends.searchsorted(stop, "left")) + 1):
            first = int(ends[place] - rows[place])
            inside = max(start - first, 0), min(stop - first, int(rows[place]))
            if inside[0] < inside[1]:
                size = int(self._groups[order[place], 4])
                if not windows or size > room:
                    windows.append([])
                    room = self._window_bytes
                windows[-1].append((int(order[place]), *inside))
                room -= size
        return windows

    def read_group(self, group: int) -> pa.ChunkedArray:
        """Return the column of a row group, which lives as long as it is in use.

        Raises:
            StorageError: the file vanished, was cut short or replaced.
        """
        found = self._shared.get(group)
        if found is None:
            file, number, _, rows, _ = self._groups[group].tolist()
            self._files.check(file)
            path = self._files.paths[file]
            try:
                with pq.ParquetFile(path) as opened:
                    found = opened.read_row_group(number, columns=[self._column], use_threads=False).column(0)
            except (OSError, pa.ArrowException, KeyError, IndexError) as error:
                raise StorageError(f"{path} cannot be read: {error}") from error
            if len(found) != rows:
                raise StorageError(
                    f"{path} has {len(found)} rows in row group {number}, and had {rows}: it was replaced"
                )
            self._shared[group] = found
        return found

    def document(self, column: pa.ChunkedArray, group: int, row: int) -> Document:
        """Return the value of a row of a row group."""
        value = column[row]
        if not value.is_valid:
            raise UsageError(f"{self.place(group, row)} is null: remove such rows")
        is_list = isinstance(value, (pa.ListScalar, pa.LargeListScalar, pa.FixedSizeListScalar))
        if is_list and pa.types.is_integer(value.type.value_type):
            return value.values.to_numpy(zero_copy_only=False)
        return value.as_py()

    def place(self, group: int, row: int) -> str:
        """Return where a row of a row group is, in words, for messages."""
        file, _, first, _, _ = self._groups[group].tolist()
        return f"{self._files.paths[file]}: row {first + row} of column {self._column!r}"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_shared"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _shared=weakref.WeakValueDictionary())


class _Window:
    """The rows of a window, in memory, under numbers from 0 on.

    Args:
        source: source of the documents.
        parts: (row group, first row, last row + 1) of each part.
    """

    def __init__(self, source: ParquetSource, parts: list[tuple[int, int, int]]) -> None:
        self._source = source
        self._ends = list(itertools.accumulate(stop - start for _, start, stop in parts))
        # Of each part: its row group, that row group's column, and the row of number 0.
        self._parts = [
            (group, source.read_group(group), stop - end)
            for (group, _, stop), end in zip(parts, self._ends, strict=True)
        ]

    def __getitem__(self, number: int) -> Document:
        group, column, shift = self._parts[bisect.bisect_right(self._ends, number)]
        return self._source.document(column, group, number + shift)

    def place(self, number: int) -> str:
        group, _, shift = self._parts[bisect.bisect_right(self._ends, number)]
        return self._source.place(group, number + shift)


class _ParquetCursor:
    """The documents of some windows.

    Args:
        source: source of the documents.
        windows: parts of each window.
        keys: function number of a window -> key of its order; None for the order of the files.
        taken: number of documents before the first one.
    """

    def __init__(
        self,
        source: ParquetSource,
        windows: list[list[tuple[int, int, int]]],
        keys: Callable[[int], int] | None,
        taken: int,
    ) -> None:
        self._source = source
        self._windows = windows
        self._keys = keys
        self._taken = taken
        self._number = 0  # of the next window
        self._skipped = taken  # documents of the next windows that come before the first one
        while windows[self._number :] and self._skipped >= _rows(windows[self._number]):
            self._skipped -= _rows(windows[self._number])
            self._number += 1
        self._current: OrderedCursor | None = None

    def __next__(self) -> Document:
        while True:
            if self._current is None:
                self._current = self._open_window()
            try:
                document = next(self._current)
            except StopIteration:
                self._current = None
            else:
                self._taken += 1
                return document

    def skip(self) -> None:
        if self._current is not None:
            self._current.skip()
            self._taken += 1

    def state(self) -> int:
        return self._taken

    def place(self) -> str:
        return "a document of the next window" if self._current is None else self._current.place()

    def _open_window(self) -> OrderedCursor:
        """Read the next window.

        Raises:
            StopIteration: there is no further window.
        """
        if self._number == len(self._windows):
            raise StopIteration
        parts = self._windows[self._number]
        rows = _rows(parts)
        order = Permutation(rows, self._keys(self._number)) if self._keys else None
        cursor = OrderedCursor(_Window(self._source, parts), range(rows), order, self._skipped)
        self._number, self._skipped = self._number + 1, 0
        return cursor


def _rows(parts: list[tuple[int, int, int]]) -> int:
    return sum(stop - start for _, start, stop in parts)


def _row_groups(file: int, path: str, column: str) -> Iterator[tuple[int, int, int, int, int]]:
    """Iterate over the row groups of a file that have rows: file, number, first row, rows, bytes of the column."""
    try:
        metadata = pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"{path} is not a Parquet file that can be read: {error}") from error
    names = metadata.schema.to_arrow_schema().names
    if column not in names:
        raise UsageError(f"{path} has no column {column!r}, but {listed(names)}")
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    leaves = [i for i, leaf in enumerate(paths) if leaf == column or leaf.startswith(f"{column}.")]
    first = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if group.num_rows:
            size = sum(group.column(leaf).total_uncompressed_size for leaf in leaves)
            yield file, number, first, group.num_rows, size
        first += group.num_rows
