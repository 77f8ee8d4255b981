"""Stored boxes that thousands of files have in common but for their place: one list of boxes, and a place for each file."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.representation.boxes import BoxTable, Int64s

__all__ = ["TileRows", "Tilings"]


@dataclass(frozen=True, slots=True)
class TileRows:
    """The rows that some tiles stand for.

    Attributes:
        boxes: stored boxes, those of one tensor of one tiling together.
        file: file of each, int32 [n].
        byte_offset: first byte of each, from the start of its file, int64 [n].
        byte_length: number of bytes of each, int64 [n].
    """

    boxes: BoxTable
    file: NDArray[np.int32]
    byte_offset: Int64s
    byte_length: Int64s


@dataclass(frozen=True, eq=False, slots=True)
class Tilings:
    """Tilings and their tiles.

    A *tiling* is a list of boxes. A *tile* is a run of bytes of a file that holds these boxes, each moved: in a dimension
    that lies along an axis, by the place of the tile along this axis times the box's length.

    Attributes:
        tiling: tiling of each box, ascending, int64 [m].
        boxes: boxes at place 0, [m].
        axes: axis of each dimension of each box, -1 for none, int64 [m, d].
        box_offset: first byte of each box, from the start of its tile, int64 [m].
        box_bytes: number of bytes of each box, int64 [m].
        of_tile: tiling of each tile, int64 [i].
        file: file of each tile, int32 [i].
        byte_offset: first byte of each tile, from the start of its file, int64 [i].
        byte_length: number of bytes of each tile, int64 [i].
        places: place of each tile along each axis, int64 [i, a].
    """

    tiling: Int64s
    boxes: BoxTable
    axes: Int64s
    box_offset: Int64s
    box_bytes: Int64s
    of_tile: Int64s
    file: NDArray[np.int32]
    byte_offset: Int64s
    byte_length: Int64s
    places: Int64s

    def shifted(self, by_file: Int64s) -> Tilings:
        """Return the tilings with the tiles of each file moved by a number of bytes."""
        return replace(self, byte_offset=self.byte_offset + by_file[self.file])

    def widened(self, ndim: int) -> Tilings:
        """Return the tilings with boxes of `ndim` columns, at least as many as they have."""
        padding = ((0, 0), (0, ndim - self.boxes.ndim))
        return replace(self, boxes=self.boxes.widened(ndim), axes=np.pad(self.axes, padding, constant_values=-1))

    def counts(self) -> Int64s:
        """Return the number of boxes of each tile, int64 [i]."""
        begin, end = np.searchsorted(self.tiling, [self.of_tile, self.of_tile + 1])
        counts: Int64s = end - begin
        return counts

    def rows(self, tiles: Int64s, wanted: BoxTable | None = None) -> TileRows:
        """Return the rows that some tiles stand for; with `wanted`, only those near these boxes."""
        hulls = (
            None if wanted is None else _hulls(wanted.widened(self.boxes.ndim), int(self.boxes.tensor.max(initial=-1)))
        )
        found = [self._rows(int(number), tiles, hulls) for number in np.unique(self.of_tile[tiles])]
        columns = [(r.file, r.byte_offset, r.byte_length) for r in found]
        file, offset, length = (
            map(np.concatenate, zip(*columns, strict=True)) if found else (np.zeros(0, np.int64),) * 3
        )
        boxes = BoxTable.concat([r.boxes for r in found])
        return TileRows(boxes.widened(max(boxes.ndim, self.boxes.ndim)), file.astype(np.int32), offset, length)

    def _rows(self, number: int, tiles: Int64s, hulls: tuple[Int64s, Int64s] | None) -> TileRows:
        """Return the rows of the tiles that belong to one tiling, those of a box together."""
        tiles = tiles[self.of_tile[tiles] == number]
        member = np.arange(*np.searchsorted(self.tiling, [number, number + 1]))
        if hulls is None:
            box, tile = np.repeat(member, len(tiles)), np.tile(tiles, len(member))
        else:
            member = member[(hulls[0] < hulls[1])[self.boxes.tensor[member]].all(axis=1)]
            of_box, of_tile = self._near(member, tiles, hulls)
            box, tile = member[of_box], tiles[of_tile]
        offsets, lengths = self.boxes.offsets[box], self.boxes.lengths[box]
        for k in range(offsets.shape[1]):
            axis = self.axes[box, k]
            offsets[:, k] += np.where(axis < 0, 0, self.places[tile, axis]) * lengths[:, k]
        return TileRows(
            BoxTable(self.boxes.tensor[box], offsets, lengths),
            self.file[tile],
            self.byte_offset[tile] + self.box_offset[box],
            self.box_bytes[box],
        )

    def _near(self, member: Int64s, tiles: Int64s, hulls: tuple[Int64s, Int64s]) -> tuple[Int64s, Int64s]:
        """Return the pairs of a box and a tile whose row meets the hull of its tensor: their positions in the arguments."""
        low, high = (bound[self.boxes.tensor[member]] for bound in hulls)
        near = np.ones((len(member), len(tiles)), bool)
        for k in range(self.boxes.ndim):
            first, length = self.boxes.offsets[member, k, None], self.boxes.lengths[member, k, None]
            axis = self.axes[member, k]
            if (axis >= 0).any():  # else one column stands for all tiles
                place = np.where(axis < 0, 0, self.places[tiles[:, None], axis])
                first = np.asarray(first + place.T * length, np.int64)
            near &= (first < high[:, k, None]) & (first + length > low[:, k, None])
        of_box, of_tile = np.nonzero(near)
        return of_box, of_tile


def _hulls(boxes: BoxTable, last: int) -> tuple[Int64s, Int64s]:
    """Return the first coordinates and the ends of the smallest box around the boxes of each tensor, up to a number."""
    low = np.full((last + 1, boxes.ndim), 1 << 62, np.int64)
    high = np.zeros((last + 1, boxes.ndim), np.int64)
    known = boxes.take(boxes.tensor <= last)
    np.minimum.at(low, known.tensor, known.offsets)
    np.maximum.at(high, known.tensor, known.offsets + known.lengths)
    return low, high
