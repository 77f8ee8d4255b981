"""Read and exchange plans, which planning computes and the engine carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bytecheckpoint.representation.boxes import Int64s, Mask

__all__ = ["Copies", "ExchangePlan", "ReadPlan", "SharedChunks"]


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies from files to wanted boxes; row i of every column belongs to copy i.

    A *flat* copy is one run of elements both in the file and in the (contiguous) destination. Any other copy is a box:
    its source elements begin at `source` and have the strides `source_strides`.

    Attributes:
        wanted: number of the wanted box, [m]; where boxes share one destination, the number of that.
        source: byte offset of the first element in the file's data section, [m].
        elements: number of elements, [m].
        flat: True for flat copies, [m].
        target: row-major number of a flat copy's first element in the destination box, [m].
        source_strides: elements of the file from one source element to the next of each dimension, [m, d].
        target_offsets: first coordinate inside the destination box, [m, d].
        lengths: extent of the copied box, [m, d].
    """

    wanted: Int64s
    source: Int64s
    elements: Int64s
    flat: Mask
    target: Int64s
    source_strides: Int64s
    target_offsets: Int64s
    lengths: Int64s

    def take(self, index: Int64s) -> Copies:
        """Return the copies at `index`, in that order."""
        return Copies(*(getattr(self, name)[index] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Byte ranges to read, each with its copies.

    Attributes:
        file: file of each range, int64 [r]; ranges are sorted by (file, start).
        start: first byte of each range in the file's data section, a multiple of the block size, int64 [r]. The range is
            of the chunk that holds this byte; it may reach a little into the next chunk.
        stop: end of each range, the end of a block, int64 [r].
        first_copy: the copies of range i are `first_copy[i]:first_copy[i + 1]`, int64 [r + 1].
        copies: all copies in file order.
        missing: number of elements of each wanted box that no stored box holds, int64 [wanted].
        overlaps: pairs of stored rows that overlap, int64 [k, 2]; a sound catalog has none.
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
        """Number of bytes that the plan reads."""
        return int((self.stop - self.start).sum())

    @property
    def longest(self) -> int:
        """Length of the longest range in bytes."""
        return int((self.stop - self.start).max(initial=0))


@dataclass(frozen=True, slots=True)
class SharedChunks:
    """The chunks that several ranks want, with the rank that reads each; all ranks compute the same table.

    Attributes:
        file: file of each chunk, int64 [s].
        start, stop: bytes of the file's data section, block-aligned, [s].
        reader: the rank that reads the chunk, [s].
        wanted_by: number of the set of ranks that want the chunk, [s].
        set_ends: end of each set in `set_ranks`, [k].
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
        """Return the ranks of each set, numbered as in `wanted_by`."""
        return [part.tolist() for part in np.split(self.set_ranks, self.set_ends[:-1])] if len(self.set_ends) else []

    def to_columns(self) -> list[bytes]:
        """Return the columns as bytes, for a message."""
        return [getattr(self, name).tobytes() for name in self.__slots__]

    @staticmethod
    def from_columns(columns: Sequence[bytes]) -> SharedChunks:
        """Return the table with the columns from `to_columns`; no columns make an empty table."""
        arrays = [np.frombuffer(c, np.int64) for c in columns or [b""] * 7]
        return SharedChunks(*arrays)


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """One rank's share of the exchange.

    Attributes:
        shared: the shared chunks of all ranks.
        private: numbers of the ranges of this rank's read plan that no other rank wants; this rank reads them alone.
        covered_ranges: numbers of the ranges of this rank's read plan that lie in shared chunks, [m].
        covering_chunks: number of the shared chunk that covers each of these ranges, [m].
    """

    shared: SharedChunks
    private: Int64s
    covered_ranges: Int64s
    covering_chunks: Int64s
