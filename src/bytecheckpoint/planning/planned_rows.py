"""The global plan of a save as columns: which rank writes which box, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bytecheckpoint.planning.local_table import TensorRecord
from bytecheckpoint.representation.boxes import BoxTable, Int64s, Mask
from bytecheckpoint.representation.tilings import Tilings

__all__ = ["PlannedTiles", "SavePlan"]


@dataclass(frozen=True, slots=True)
class PlannedTiles:
    """The rows of a plan that stand for boxes of many ranks at once.

    Attributes:
        tilings: boxes and tiles; offsets count from the start of a file's data section. Tiles are sorted by rank, then by
            place in the file.
        local: index of each box of a tiling among the shards of every rank that writes a tile of it, int64 [m].
        rank: rank that writes each tile, int64 [i].
        before: number of the plan's other rows that come before each tile, int64 [i].
    """

    tilings: Tilings
    local: Int64s
    rank: Int64s
    before: Int64s


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The plan of all ranks. Its rows are stored shards, sorted by rank, state, part, then place in the file.

    Attributes:
        tensors: every distinct tensor.
        shapes: global shape of each tensor, padded with 1, int64 [t, d].
        ndims: number of dimensions of each tensor, int64 [t].
        boxes: box of each row; `boxes.tensor` numbers `tensors`.
        rank: the rank that writes each row, int64 [n].
        local: index of each row among the shards of the rank that writes it, int64 [n].
        file: number of each row's file, int64 [n].
        offset: byte offset of each row in its file's data section, int64 [n].
        nbytes: bytes of each row, int64 [n].
        file_rank: the rank that writes each file, int64 [f].
        file_state: name of the state of each file, [f].
        file_part: part number of each file (a rank splits a file of very many tensors), int64 [f].
        copied: mask of the shards of each rank that other ranks may hold too; empty if none are copied.
        tiles: rows that stand for boxes of many ranks; None if each box has a row.
    """

    tensors: list[TensorRecord]
    shapes: Int64s
    ndims: Int64s
    boxes: BoxTable
    rank: Int64s
    local: Int64s
    file: Int64s
    offset: Int64s
    nbytes: Int64s
    file_rank: Int64s
    file_state: list[str]
    file_part: Int64s
    copied: Sequence[Mask] = ()
    tiles: PlannedTiles | None = None

    def locals_of(self, rank: int) -> Int64s:
        """Return the indexes of the shards that `rank` writes, in file order."""
        low, high = np.searchsorted(self.rank, [rank, rank + 1]).tolist()  # rows are sorted by rank
        tiles = self.tiles
        if tiles is None:
            return self.local[low:high]
        pieces = []
        for tile in range(*np.searchsorted(tiles.rank, [rank, rank + 1]).tolist()):
            number, end = tiles.tilings.of_tile[tile], int(tiles.before[tile])
            members = slice(*np.searchsorted(tiles.tilings.tiling, [number, number + 1]).tolist())
            pieces += [self.local[low:end], tiles.local[members]]
            low = end
        return np.concatenate([*pieces, self.local[low:high]])

    def copied_of(self, rank: int) -> Int64s:
        """Return the indexes of the shards of `rank` that other ranks may hold too, ascending."""
        return np.flatnonzero(self.copied[rank]) if self.copied else np.zeros(0, np.int64)

    def has_copies(self) -> bool:
        """Return whether several ranks may hold one box. To look for copies takes long where thousands of ranks save."""
        return any(mask.any() for mask in self.copied)

    def total_bytes(self) -> int:
        """Return the number of bytes that all ranks write."""
        return int(self.nbytes.sum()) + (int(self.tiles.tilings.byte_length.sum()) if self.tiles else 0)

    def aliases(self) -> dict[str, dict[str, str]]:
        """Return further names of tied tensors: state -> alias -> FQN."""
        found: dict[str, dict[str, str]] = {}
        for record in self.tensors:
            for alias in record.aliases:
                found.setdefault(record.state, {})[alias] = record.fqn
        return found
