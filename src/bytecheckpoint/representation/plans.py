"""Plans: what planning hands to the engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .boxes import Int64s, Mask

__all__ = ["Copies", "ExchangePlan", "ReadPlan"]


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
class ExchangePlan:
    """Which chunks are read by one rank for several, and what this rank does with them.

    Attributes:
        private: ranges of this rank's read plan that nobody else wants; it reads them itself.
        file: file of each shared item, int64 [s].
        start, stop: bytes of the file's data section, block-aligned, [s].
        reader: the rank that reads it, [s].
        my_range: ranges of this rank's read plan that shared items cover, [m].
        my_item: the item that covers each of them, [m].
        pairs: (item, rank) for every rank that wants the item, sorted, [p, 2].
    """

    private: Int64s
    file: Int64s
    start: Int64s
    stop: Int64s
    reader: Int64s
    my_range: Int64s
    my_item: Int64s
    pairs: Int64s

    @staticmethod
    def nothing(private: Int64s) -> ExchangePlan:
        """The plan in which every rank reads for itself."""
        none = np.zeros(0, np.int64)
        return ExchangePlan(private, none, none, none, none, none, none, none.reshape(0, 2))
