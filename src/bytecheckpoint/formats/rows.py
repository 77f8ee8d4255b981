"""Rows of a catalog in the making, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.representation.boxes import BoxTable, Int64s, row_major, widened
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes

__all__ = ["RowColumns"]


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Rows of a catalog as columns.

    Attributes:
        boxes: the boxes of the rows.
        file: position of each row's file in the table of files, int32 [n].
        begin: first byte of each row in its file, int64 [n].
        strides: elements between two neighbours, int64 [n, d].
    """

    boxes: BoxTable
    file: NDArray[np.int32]
    begin: Int64s
    strides: Int64s

    def take(self, index: Int64s | NDArray[np.bool_]) -> RowColumns:
        """Return the rows at `index` (positions or a mask), in that order."""
        return RowColumns(self.boxes.take(index), self.file[index], self.begin[index], self.strides[index])

    @staticmethod
    def concat(tables: Sequence[RowColumns]) -> RowColumns:
        """Return all rows, one table after the other."""
        boxes = BoxTable.concat([table.boxes for table in tables])
        return RowColumns(
            boxes,
            np.concatenate([table.file for table in tables]),
            np.concatenate([table.begin for table in tables]),
            np.concatenate([widened(table.strides, boxes.ndim, 1) for table in tables]),
        )

    @staticmethod
    def of_ranges(
        boxes: BoxTable, ranges: tuple[Int64s, Int64s], file: NDArray[np.int32], begin: Int64s, items: Int64s
    ) -> tuple[RowColumns, Int64s]:
        """Return the rows of ranges of elements in boxes, and the number of each row's range.

        Args:
            boxes: the box in which each range lies.
            ranges: row-major number in the box of the first element of each range, and of the one behind it.
            file: file of each range.
            begin: first byte of each range in its file.
            items: bytes of an element of each range.
        """
        found = flat_ranges_to_boxes(boxes.lengths, *ranges)
        of = found.source
        rows = BoxTable(boxes.tensor[of], boxes.offsets[of] + found.offsets, found.lengths)
        first = begin[of] + (found.flat_start - ranges[0][of]) * items[of]
        return RowColumns(rows, file[of], first, row_major(found.lengths)), of
