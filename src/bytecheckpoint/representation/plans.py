"""Plans: what planning hands to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .boxes import Int64s, Mask

__all__ = ["Copies", "ExchangePlan", "ReadPlan", "SharedChunks"]


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies from file ranges to wanted boxes; row i of every column belongs to copy i.

    A *flat* copy is one run of elements both in the file and in the (contiguous) destination. Any other is a box:
    its source elements stand at `source` with strides of the shape `source_shape`.

    Attributes:
        wanted: number of the wanted box, [m].
        source: byte offset of the first element in the file's data section, [m].
        elements: number of elements, [m].
        flat: whether the copy is flat, [m].
        target: for flat copies the first element inside the destination box, counted row-major, [m].
        source_shape: shape whose strides the source elements have, [m, d].
        target_offsets: first coordinate inside the destination box, [m, d].
        lengths: extent of the copied box, [m, d].
    """

    wanted: Int64s
    source: Int64s
    elements: Int64s
    flat: Mask
    target: Int64s
    source_shape: Int64s
    target_offsets: Int64s
    lengths: Int64s


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Ranges to read, each with its copies.

    Attributes:
        file: file of each range, int64 [r], ascending with `start`.
        start: first byte of each range in the file's data section; begins a block.
        stop: end of each range; ends a block or the data section.
        first_copy: copies of range i are `first_copy[i]:first_copy[i + 1]`, int64 [r + 1].
        copies: all copies in file order.
        missing: elements of each wanted box that no stored box holds, int64 [wanted].
        overlaps: pairs of stored rows that overlap, int64 [k, 2]; empty in a sound catalog.
    """

    file: Int64s
    start: Int64s
    stop: Int64s
    first_copy: Int64s
    copies: Copies
    missing: Int64s
    overlaps: Int64s

    @property
    def nbytes(self) -> int:
        """Bytes that the plan reads."""
        return int((self.stop - self.start).sum())


@dataclass(frozen=True, slots=True)
class SharedChunks:
    """The chunks of a checkpoint that several ranks want, and who reads each: one table for all ranks.

    Attributes:
        file: file of each chunk, int64 [s].
        start, stop: bytes of the file's data section, block-aligned, [s].
        reader: the rank that reads it, [s].
        wanted_by: which set of ranks wants it, [s].
        set_ends: where each set ends in `set_ranks`, [k].
        set_ranks: the ranks of all sets, one set after the other, each ascending.
    """

    file: Int64s
    start: Int64s
    stop: Int64s
    reader: Int64s
    wanted_by: Int64s
    set_ends: Int64s
    set_ranks: Int64s

    def __len__(self) -> int:
        return len(self.file)

    def rank_sets(self) -> list[list[int]]:
        """The sets, numbered as in `wanted_by`."""
        return [part.tolist() for part in np.split(self.set_ranks, self.set_ends[:-1])] if len(self.set_ends) else []

    def to_columns(self) -> list[bytes]:
        """For a message."""
        return [getattr(self, name).tobytes() for name in self.__slots__]

    @staticmethod
    def from_columns(columns: Sequence[bytes]) -> SharedChunks:
        """The inverse of `to_columns`; no columns are a table without rows."""
        arrays = [np.frombuffer(c, np.int64) for c in columns or [b""] * 7]
        return SharedChunks(*arrays)


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """What one rank does with the shared chunks.

    Attributes:
        shared: the chunks ("items").
        private: ranges of this rank's read plan that nobody else wants; it reads them itself.
        my_range: ranges of this rank's read plan that shared items cover, [m].
        my_item: the item that covers each of them, [m].
    """

    shared: SharedChunks
    private: Int64s
    my_range: Int64s
    my_item: Int64s
