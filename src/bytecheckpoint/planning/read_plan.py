"""Plan the bytes to read, and the destination of each (ByteCheckpoint, section 3.3, load plan).

The plan intersects stored boxes with wanted boxes, for every pair of layouts alike. All data are columns; no loop runs
over shards. Files are read in block-aligned ranges, each inside one chunk of a fixed grid, so that no block is read or
verified twice. `plan_reads` has a worked example.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bytecheckpoint.planning.coverage import missing_volume, overlapping
from bytecheckpoint.planning.intersect import Intersections, intersect
from bytecheckpoint.representation.boxes import BoxTable, Int64s, Mask, is_one_run, row_major, widened
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.catalog_rows import cells, ranges
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.plans import Copies, ReadPlan

__all__ = ["StoredRows", "groups_to_read", "plan_reads", "stored_rows"]

_UNCHECKED_BLOCK = 64 << 10
"""Block length of files without checksums: the shortest gap that is worth two reads is two blocks."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The columns of a catalog that planning needs.

    Attributes:
        boxes: box of each row, numbered by tensor.
        file: file of each row, int64 [n].
        start: byte offset of each row in its file's data section, int64 [n].
        element: bytes per element of each row, int64 [n].
        data_bytes: length of each file's data section, int64 [f].
        block_bytes: checksum block length of each file, int64 [f]; for a file without checksums the length at whose
            multiples reads begin and end.
        strides: elements from one element of a row to the next along each dimension, int64 [n, d]; None: row-major rows.
    """

    boxes: BoxTable
    file: Int64s
    start: Int64s
    element: Int64s
    data_bytes: Int64s
    block_bytes: Int64s
    strides: Int64s | None = None

    def take(self, rows: Int64s) -> StoredRows:
        """Return the rows at `rows`, in that order, with their strides."""
        boxes = self.boxes.take(rows)
        return replace(
            self,
            boxes=boxes,
            file=self.file[rows],
            start=self.start[rows],
            element=self.element[rows],
            strides=row_major(boxes.lengths) if self.strides is None else self.strides[rows],
        )


def stored_rows(catalog: Catalog) -> StoredRows:
    """Return the columns of `catalog` that planning needs."""
    element = np.array([itemsize(name) for name in catalog.dtype.values], np.int64)
    file = catalog.file.astype(np.int64)
    data_offset = np.array([f.data_offset for f in catalog.files], np.int64)
    return StoredRows(
        boxes=catalog.boxes,
        file=file,
        start=catalog.byte_offset - (data_offset[file] if len(file) else 0),
        element=element[catalog.dtype.codes][catalog.boxes.tensor],
        data_bytes=np.array([f.size - f.data_offset for f in catalog.files], np.int64),
        block_bytes=np.array([f.block_bytes or _UNCHECKED_BLOCK for f in catalog.files], np.int64),
        strides=catalog.strides,
    )


def groups_to_read(groups: CatalogGroups, boxes: BoxTable) -> Int64s:
    """Return the groups of a large catalog that may have rows of `boxes`, and those of plain values, ascending."""
    found = groups.group[intersect(groups.hulls, boxes).left]
    return np.unique(np.concatenate([found, groups.value_groups]))


@dataclass(frozen=True, slots=True)
class _Sources:
    """Boxes to read from: stored rows, or boxes cut out of stored rows.

    Attributes:
        boxes: the boxes, [n].
        row: catalog row that holds each box, int64 [n].
        file, element: columns of that row, as in `StoredRows`.
        start: byte offset of each box in its file's data section, int64 [n].
        strides: elements from one element of the box to the next along each dimension, int64 [n, d].
    """

    boxes: BoxTable
    row: Int64s
    file: Int64s
    element: Int64s
    start: Int64s
    strides: Int64s

    def __len__(self) -> int:
        return len(self.boxes)

    def take(self, index: Int64s) -> _Sources:
        """Return the boxes at `index`, in that order."""
        columns = (self.row, self.file, self.element, self.start, self.strides)
        return _Sources(self.boxes.take(index), *(column[index] for column in columns))

    def part(self, index: Int64s, offsets: Int64s, lengths: Int64s) -> _Sources:
        """Return parts of the boxes at `index`, which begin at `offsets` inside of them."""
        found = self.take(index)
        boxes = BoxTable(found.boxes.tensor, found.boxes.offsets + offsets, lengths)
        return replace(found, boxes=boxes, start=found.start + (offsets * found.strides).sum(axis=1) * found.element)


def plan_reads(stored: StoredRows, wanted: BoxTable, contiguous: Mask, chunk_bytes: int) -> ReadPlan:
    """Plan the reads that fill `wanted`.

    Args:
        stored: the catalog's rows.
        wanted: boxes to fill, numbered by the catalog's tensors.
        contiguous: mask of the wanted boxes whose destinations are contiguous, [len(wanted)].
        chunk_bytes: size of a chunk, which is a multiple of every file's block length. A range begins inside of one chunk.
            It reaches into the next by one block at most where an element lies across the border, and by a quarter of a
            chunk where a row has strides.

    Example: columns 0 and 1 (`W`) of a stored matrix of 3 x 8 bytes, in blocks of 2 bytes and chunks of 16 bytes.

        byte      0       8       16      24
        stored    WW......WW......WW......
        sources   [2 x 8         ][1 x 8 ]    the row, cut where a chunk ends
        copies    00      11      22          intersections with the wanted box, split at gaps of whole blocks
        ranges    []      []      []          blocks that hold the copies

    >>> matrix = StoredRows(BoxTable.build([0], [[0, 0]], [[3, 8]]), *np.array([[0], [0], [1], [24], [2]]))
    >>> plan = plan_reads(matrix, BoxTable.build([0], [[0, 0]], [[3, 2]]), np.array([True]), 16)
    >>> plan.start.tolist(), plan.stop.tolist(), plan.copies.target.tolist()
    ([0, 8, 16], [2, 10, 18], [0, 2, 4])
    """
    wanted = wanted.widened(max(stored.boxes.ndim, wanted.ndim))
    rows, found = _rows_to_read(stored, wanted)
    missing = missing_volume(wanted, found)
    overlaps = overlapping(rows.boxes)

    sources = _cut(rows, chunk_bytes)
    if len(sources) != len(rows):
        found = intersect(sources.boxes, wanted)
    found = _split_gaps(found, sources, stored.block_bytes[sources.file])
    copies = _copies(found, sources, wanted, contiguous)

    order = np.lexsort((copies.wanted, copies.source, sources.file[found.left]))
    copies, source_of = copies.take(order), found.left[order]
    copies, first_parts = _merged(copies, sources.file[source_of], sources.element[source_of], chunk_bytes)
    ranges = _ranges(stored, copies, sources, source_of[first_parts], chunk_bytes)
    overlapping_rows = rows.row[np.stack([overlaps.left, overlaps.right], axis=1)]
    return ReadPlan(*ranges, copies=copies, missing=missing, overlaps=overlapping_rows)


def _rows_to_read(stored: StoredRows, wanted: BoxTable) -> tuple[_Sources, Intersections]:
    """Find the stored rows that hold wanted elements, and their intersections with the wanted boxes."""
    is_wanted = np.zeros(max(stored.boxes.tensor.max(initial=-1), wanted.tensor.max(initial=-1)) + 1, bool)
    is_wanted[wanted.tensor] = True
    candidates = np.flatnonzero(is_wanted[stored.boxes.tensor])
    boxes = stored.boxes.take(candidates).widened(wanted.ndim)
    found = intersect(boxes, wanted)
    touched, left = np.unique(found.left, return_inverse=True)
    found = Intersections(left.reshape(-1), found.right, found.offsets, found.lengths)
    boxes, rows = boxes.take(touched), candidates[touched]
    strides = row_major(boxes.lengths) if stored.strides is None else widened(stored.strides[rows], boxes.ndim, 1)
    return _Sources(boxes, rows, stored.file[rows], stored.element[rows], stored.start[rows], strides), found


def _cut(rows: _Sources, chunk_bytes: int) -> _Sources:
    """Cut each row at the multiples of `chunk_bytes`, into boxes; one with strides into slabs of a quarter of that."""
    if not is_one_run(rows.boxes.lengths, rows.strides).all():
        rows = _in_slabs(rows, chunk_bytes)
    nbytes = rows.boxes.volumes() * rows.element
    first = rows.start // chunk_bytes
    count = np.maximum(-(-(rows.start + nbytes) // chunk_bytes) - first, 1)
    count[~is_one_run(rows.boxes.lengths, rows.strides)] = 1
    several = np.flatnonzero(count > 1)
    if not len(several):
        return rows
    row = np.repeat(several, count[several])
    begin = (first[row] + ranges(np.zeros_like(count[several]), count[several])) * chunk_bytes - rows.start[row]
    # An element that lies across a multiple is of the range where it begins.
    low = -(-np.maximum(begin, 0) // rows.element[row])
    high = -(-np.minimum(begin + chunk_bytes, nbytes[row]) // rows.element[row])
    flat = flat_ranges_to_boxes(rows.boxes.lengths[row], low, high)
    return _replaced(rows, several, row[flat.source], flat.offsets, flat.lengths)


def _in_slabs(rows: _Sources, chunk_bytes: int) -> _Sources:
    """Cut rows with strides along the dimensions that reach furthest, until each part spans a quarter of `chunk_bytes`."""
    while True:
        lengths, strides = rows.boxes.lengths, rows.strides
        reach = np.maximum(lengths - 1, 0) * strides
        most = chunk_bytes // 4 // rows.element
        long = np.flatnonzero(
            ~is_one_run(lengths, strides) & (reach.sum(axis=1) >= most) & (reach > 0).any(axis=1) & lengths.all(axis=1)
        )
        if not len(long):
            return rows
        dim = reach[long].argmax(axis=1)
        length = lengths[long, dim]
        step = np.clip(most[long] // strides[long, dim], 1, length - 1)
        count = -(-length // step)
        part, first = np.repeat(np.arange(len(long)), count), ranges(np.zeros_like(count), count)
        first *= step[part]
        offsets, extents = np.zeros((len(part), lengths.shape[1]), np.int64), lengths[long][part]
        each = np.arange(len(part))
        offsets[each, dim[part]] = first
        extents[each, dim[part]] = np.minimum(step[part], length[part] - first)
        rows = _replaced(rows, long, long[part], offsets, extents)


def _replaced(rows: _Sources, gone: Int64s, source: Int64s, offsets: Int64s, lengths: Int64s) -> _Sources:
    """Replace some rows by parts of them; the result is in the order of `rows`."""
    stays = np.ones(len(rows), bool)
    stays[gone] = False
    kept = np.flatnonzero(stays)
    origin = np.concatenate([kept, source])
    order = np.argsort(origin, kind="stable")
    shift = np.concatenate([np.zeros((len(kept), rows.boxes.ndim), np.int64), offsets])[order]
    extent = np.concatenate([rows.boxes.lengths[kept], lengths])[order]
    return rows.part(origin[order], shift, extent)


def _split_gaps(found: Intersections, sources: _Sources, block_bytes: Int64s) -> Intersections:
    """Split intersections whose runs in the file have whole blocks between them, so that these are not read."""
    # Dimensions in the order of their strides in the file.
    strides = np.where(found.lengths > 1, sources.strides[found.left], 1)
    order = np.argsort(-strides, axis=1, kind="stable")
    strides, lengths = (np.take_along_axis(column, order, axis=1) for column in (strides, found.lengths))
    # One index of a dimension spans `inner` elements of the file; the rest of the stride is the gap before the next.
    reach = (lengths - 1) * strides
    inner = np.cumsum(reach[:, ::-1], axis=1)[:, ::-1] - reach + 1
    gap = (strides - inner) * sources.element[found.left][:, None]
    wide = (gap >= 2 * block_bytes[found.left][:, None]) & (lengths > 1)
    if not wide.any():
        return found
    # Each index of the dimensions up to the last one with wide gaps becomes an intersection of its own.
    dims = lengths.shape[1]
    depth = np.where(wide.any(axis=1), dims - np.argmax(wide[:, ::-1], axis=1), 0)
    outer = np.zeros(lengths.shape, bool)
    np.put_along_axis(outer, order, np.arange(dims) < depth[:, None], axis=1)
    origin, index = cells(np.where(outer, found.lengths, 1))
    split = found.take(origin)
    return replace(split, offsets=split.offsets + index, lengths=np.where(outer[origin], 1, split.lengths))


def _copies(found: Intersections, sources: _Sources, wanted: BoxTable, contiguous: Mask) -> Copies:
    """Return the copy of each intersection, from its source to its wanted box."""
    strides = sources.strides[found.left]
    first = ((found.offsets - sources.boxes.offsets[found.left]) * strides).sum(axis=1)
    target_strides = row_major(wanted.lengths)[found.right]
    target_offsets = found.offsets - wanted.offsets[found.right]
    one_run = is_one_run(found.lengths, strides) & is_one_run(found.lengths, target_strides)
    return Copies(
        wanted=found.right,
        source=sources.start[found.left] + first * sources.element[found.left],
        elements=np.prod(found.lengths, axis=1),
        flat=contiguous[found.right] & one_run,
        target=(target_offsets * target_strides).sum(axis=1),
        source_strides=strides,
        target_offsets=target_offsets,
        lengths=found.lengths,
    )


def _merged(copies: Copies, file: Int64s, element: Int64s, chunk_bytes: int) -> tuple[Copies, Int64s]:
    """Merge flat copies of one chunk that follow each other in the file and in the destination.

    Returns:
        The merged copies, and the position in `copies` of the first part of each.
    """
    stop, target_stop = copies.source + copies.elements * element, copies.target + copies.elements
    chunk = copies.source // chunk_bytes
    follows = np.zeros(len(file), bool)
    follows[1:] = (
        copies.flat[1:]
        & copies.flat[:-1]
        & (file[1:] == file[:-1])
        & (copies.wanted[1:] == copies.wanted[:-1])
        & (copies.source[1:] == stop[:-1])
        & (chunk[1:] == chunk[:-1])
        & (copies.target[1:] == target_stop[:-1])
    )
    first = np.flatnonzero(~follows)
    elements = np.add.reduceat(copies.elements, first) if len(first) else copies.elements
    return replace(copies.take(first), elements=elements), first


def _ranges(
    stored: StoredRows, copies: Copies, sources: _Sources, source_of: Int64s, chunk_bytes: int
) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Return the ranges of whole blocks that hold the copies: (file, start, stop, first copy), as in `ReadPlan`.

    Copies are in file order; `source_of` is the position in `sources` of the box that each one reads from.
    """
    file = sources.file[source_of]
    if not len(file):
        return file, file, file, np.zeros(1, np.int64)
    spread = ((copies.lengths - 1) * copies.source_strides).sum(axis=1) + 1
    nbytes = np.where(copies.flat, copies.elements, spread) * sources.element[source_of]
    block = stored.block_bytes[file]
    low = copies.source // block * block
    high = np.minimum(-(-(copies.source + nbytes) // block) * block, stored.data_bytes[file])
    # All files share one number line, where a running maximum finds the gaps in the union of ranges.
    base = (np.cumsum(stored.data_bytes) - stored.data_bytes)[file]
    begins, ends = base + low, np.maximum.accumulate(base + high)
    chunk = copies.source // chunk_bytes
    new = np.ones(len(file), bool)
    new[1:] = (begins[1:] > ends[:-1]) | (chunk[1:] != chunk[:-1]) | (file[1:] != file[:-1])
    first = np.flatnonzero(new)
    return file[first], low[first], np.maximum.reduceat(high, first), np.append(first, len(file))
