"""Lay packed rows of tokens out in memory that processes may share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["PackedRows", "shared_tensor"]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Memory for packed rows.

    Attributes:
        tokens: int64 [n, context length].
        documents: number of the document within its row, int32 [n, context length].
        positions: position within the part of the document that is in the row, int32 [n, context length].
        numbers: number of each row in the run, int64 [n]; row r of stream s of S is number r * S + s.
    """

    tokens: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor
    numbers: torch.Tensor

    @staticmethod
    def empty(count: int, length: int, *, pinned: bool = False) -> PackedRows:
        """Allocate memory for `count` rows of `length` tokens."""
        return PackedRows(
            torch.empty(count, length, dtype=torch.int64, pin_memory=pinned),
            torch.empty(count, length, dtype=torch.int32, pin_memory=pinned),
            torch.empty(count, length, dtype=torch.int32, pin_memory=pinned),
            torch.empty(count, dtype=torch.int64, pin_memory=pinned),
        )

    @staticmethod
    def over(memory: torch.Tensor, count: int, length: int) -> PackedRows:
        """Lay rows out in `memory`, int64 [`words(count, length)`]."""
        tokens, documents, positions, numbers = memory.split(
            [count * length, count * length // 2 + 1, count * length // 2 + 1, count]
        )
        shape = (count, length)
        return PackedRows(tokens.view(shape), _narrow(documents, shape), _narrow(positions, shape), numbers)

    @staticmethod
    def words(count: int, length: int) -> int:
        """Return the size of the memory that `over` takes."""
        return count * length + 2 * (count * length // 2 + 1) + count

    def part(self, first: int, stop: int) -> PackedRows:
        """Return some of the rows, in the same memory."""
        part = slice(first, stop)
        return PackedRows(self.tokens[part], self.documents[part], self.positions[part], self.numbers[part])

    def copy_from(self, other: PackedRows) -> None:
        """Copy all rows of `other`, which has the same number of rows."""
        for field in fields(PackedRows):
            getattr(self, field.name).copy_(getattr(other, field.name))

    def mark(self, begins: NDArray[np.bool_]) -> None:
        """Fill `documents` and `positions`.

        Args:
            begins: True at the first token of each piece of a document, [n, context length].
        """
        begins[:, 0] = True
        starts = np.flatnonzero(begins).astype(np.int32)
        lengths = np.diff(starts, append=begins.size)
        rows = np.arange(0, begins.size, begins.shape[1], dtype=np.int32)
        before = np.searchsorted(starts, rows).astype(np.int32)  # pieces before each row
        numbers = np.arange(len(starts), dtype=np.int32) - np.repeat(before, np.diff(before, append=len(starts)))
        self.documents.numpy().reshape(-1)[:] = np.repeat(numbers, lengths)
        places = np.arange(begins.size, dtype=np.int32)
        np.subtract(places, np.repeat(starts, lengths), out=self.positions.numpy().reshape(-1))


def _narrow(memory: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return memory.view(torch.int32)[: math.prod(shape)].view(shape)


def shared_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor in memory that other processes can map."""
    if not math.prod(shape):
        return torch.empty(*shape, dtype=dtype)
    # As torch's own workers do for their batches: `share_memory_` would touch the pages once more, to copy nothing.
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage).view(*shape)
