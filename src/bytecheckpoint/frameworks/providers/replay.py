"""A replay buffer that only grows, whose rows a save reads while the program appends more."""

from __future__ import annotations

import collections
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.providers.base import Piece, PieceReader
from bytecheckpoint.representation.values.numpy_values import TENSOR_DTYPES, array_as_tensor

__all__ = ["ReplayBuffer"]


class ReplayBuffer:
    """An append-only buffer of rows with named fields.

    Rows lie in segments of fixed length, which never move, so those of the call stay as they are while a save reads
    them. Each field is one tensor of the checkpoint: "replay/observation" of shape [rows, ...].

    Args:
        fields: (shape of one row, dtype) by name.
        segment_rows: rows of a segment; memory is allocated by segments.
    """

    def __init__(self, fields: Mapping[str, tuple[Sequence[int], DTypeLike]], *, segment_rows: int = 4096) -> None:
        self._fields = {name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in fields.items()}
        for name, (_, dtype) in self._fields.items():
            if dtype not in TENSOR_DTYPES:
                raise UsageError(f"ReplayBuffer: torch has no dtype {dtype} (field {name!r})")
        if segment_rows < 1 or not self._fields:
            raise UsageError("ReplayBuffer: it needs a field, and at least one row per segment")
        self._segment_rows = segment_rows
        self._segments: list[dict[str, NDArray[Any]]] = []
        self._rows = 0
        self._identity = uuid.uuid4()

    def __len__(self) -> int:
        return self._rows

    def append(self, **rows: Any) -> None:
        """Append rows: for every field an array [n, ...].

        Raises:
            UsageError: fields are missing or unknown, or have another shape or number of rows.
        """
        arrays = {name: np.asarray(values) for name, values in rows.items()}
        counts = {len(array) for array in arrays.values() if array.ndim}
        fit = arrays.keys() == self._fields.keys() and len(counts) == 1
        if not fit or any(arrays[name].shape[1:] != shape for name, (shape, _) in self._fields.items()):
            raise UsageError(f"append: give rows of one number for the fields {self._fields}")
        (count,) = counts
        for done, segment, place, fitting in self._runs(self._rows, count):
            for name, array in arrays.items():
                segment[name][place : place + fitting] = array[done : done + fitting]
        self._rows += count

    def __getitem__(self, numbers: Any) -> dict[str, NDArray[Any]]:
        """Return copies of rows, by their numbers or a slice, for each field."""
        chosen = np.arange(self._rows)[numbers]
        segment, place = np.divmod(chosen.reshape(-1), self._segment_rows)
        found = {}
        for name, (shape, dtype) in self._fields.items():
            rows = np.empty((chosen.size, *shape), dtype)
            for number in np.unique(segment):
                mask = segment == number
                rows[mask] = self._segments[number][name][place[mask]]
            found[name] = rows.reshape((*chosen.shape, *shape))
        return found

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, dict[str, NDArray[Any]], int, int]]:
        """Yield (rows before, segment, place in it, rows) for each segment of a range of rows; make those that lack."""
        done = 0
        while done < count:
            number, place = divmod(first + done, self._segment_rows)
            if number == len(self._segments):
                self._segments.append(
                    {name: np.empty((self._segment_rows, *s), dtype) for name, (s, dtype) in self._fields.items()}
                )
            fitting = min(count - done, self._segment_rows - place)
            yield done, self._segments[number], place, fitting
            done += fitting

    def __bytecheckpoint_pieces__(self) -> Iterator[Piece]:
        """Return a piece for each field, of the rows that there are now."""
        token = f"{self._identity}/{self._rows}".encode()  # rows never change
        for name, (shape, dtype) in self._fields.items():
            read = partial(self._copy, name, to_buffer=True)
            yield Piece(name, (_tensor_dtype(dtype), (self._rows, *shape)), read, stable=True, token=token)

    def _copy(self, name: str, offset: int, buffer: memoryview, *, to_buffer: bool) -> None:
        """Copy bytes of a field, counted from its first row, to or from a buffer."""
        shape, dtype = self._fields[name]
        length = self._segment_rows * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        target, done = np.frombuffer(buffer, np.uint8), 0
        while done < len(target):
            number, place = divmod(offset + done, length)
            data = self._segments[number][name].reshape(-1).view(np.uint8)[place : place + len(target) - done]
            part = target[done : done + len(data)]
            np.copyto(*((part, data) if to_buffer else (data, part)))
            done += len(data)

    def load_pieces(self, pieces: Mapping[str, PieceReader]) -> None:
        """Replace all rows by those of the checkpoint.

        Raises:
            IncompatibleCheckpointError: the checkpoint has other fields.
        """
        wanted = {name: (_tensor_dtype(dtype), shape) for name, (shape, dtype) in self._fields.items()}
        found = {name: (piece.dtype, piece.shape[1:]) for name, piece in pieces.items()}
        counts = {piece.shape[:1] for piece in pieces.values()}
        if found != wanted or len(counts) != 1:
            raise IncompatibleCheckpointError(f"the checkpoint's pieces do not fit the fields {self._fields}")
        new = ReplayBuffer(self._fields, segment_rows=self._segment_rows)
        ((new._rows,),) = counts
        collections.deque(new._runs(0, new._rows), maxlen=0)  # makes the segments
        for name, piece in pieces.items():
            offset = 0
            for chunk in piece:
                new._copy(name, offset, chunk, to_buffer=False)
                offset += len(chunk)
        self._segments, self._rows, self._identity = new._segments, new._rows, new._identity


def _tensor_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return array_as_tensor(np.empty(0, dtype)).dtype
