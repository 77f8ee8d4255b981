"""Planning of reads: the bytes to read, and the destination of each (ByteCheckpoint, section 3.3, load plan).

The plan intersects stored boxes with wanted boxes, for every pair of layouts alike. All data are columns; no loop runs
over shards. Files are read in block-aligned ranges, each inside one chunk of a fixed grid, so that no block is read or
verified twice. A stored box that crosses chunks is first cut into boxes that lie in one chunk each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bytecheckpoint.planning.coverage import missing_volume, overlapping
from bytecheckpoint.planning.intersect import Intersections, intersect
from bytecheckpoint.representation.boxes import BoxTable, Int64s, Mask
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.decompose import flat_ranges_to_boxes
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.plans import Copies, ReadPlan

__all__ = ["StoredRows", "plan_reads", "stored_rows"]

_SHORT_RUN_RANGE = 2 << 20
"""Largest range whose elements are copied in short runs: a range of this size stays in the second-level cache."""
_LONG_RUN = 1 << 10
"""Shortest run, in bytes, that does not limit the size of its range: here the number of calls determines the cost."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The columns of a catalog that planning needs.

    Attributes:
        boxes: box of each row, numbered by tensor.
        file: file of each row, int64 [n].
        start: byte offset of each row in its file's data section, int64 [n].
        element: bytes per element of each row, int64 [n].
        data_bytes: length of each file's data section, int64 [f].
        block_bytes: checksum block length of each file, int64 [f].
    """

    boxes: BoxTable
    file: Int64s
    start: Int64s
    element: Int64s
    data_bytes: Int64s
    block_bytes: Int64s


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
        block_bytes=np.array([f.block_bytes for f in catalog.files], np.int64),
    )


def plan_reads(stored: StoredRows, wanted: BoxTable, contiguous: Mask, chunk_bytes: int) -> ReadPlan:
    """Plan the reads that fill `wanted`.

    Args:
        stored: the catalog's rows.
        wanted: boxes to fill, numbered by the catalog's tensors.
        contiguous: whether the destination of each wanted box is contiguous, [len(wanted)].
        chunk_bytes: size of a chunk, which is a multiple of every file's block length; no range crosses a multiple of it.
    """
    width = max(stored.boxes.ndim, wanted.ndim)
    wanted = wanted.widened(width)
    asked = np.zeros(max(stored.boxes.tensor.max(initial=-1), wanted.tensor.max(initial=-1)) + 1, bool)
    asked[wanted.tensor] = True
    of_interest = np.flatnonzero(asked[stored.boxes.tensor])
    boxes = stored.boxes.widened(width).take(of_interest)
    hits = intersect(boxes, wanted)
    missing = missing_volume(wanted, hits)
    touched, position = np.unique(hits.left, return_inverse=True)
    boxes = boxes.take(touched)
    rows = of_interest[touched]
    overlaps = overlapping(boxes)

    found = Intersections(position.reshape(-1), hits.right, hits.offsets, hits.lengths)
    piece_bytes = np.full(len(boxes), chunk_bytes, np.int64)
    if chunk_bytes % _SHORT_RUN_RANGE == 0:
        piece_bytes[found.left[_in_short_runs(found, boxes, wanted, contiguous, stored.element[rows])]] = (
            _SHORT_RUN_RANGE
        )
    pieces, base, row = _cut(boxes, stored.start[rows], stored.element[rows], piece_bytes)
    if len(pieces) != len(boxes):
        found = intersect(pieces, wanted)
    piece_bytes = piece_bytes[row]
    source_row = rows[row]
    found, pieces_of = _split_gaps(
        found, pieces, stored.element[source_row], stored.block_bytes[stored.file[source_row]]
    )
    element = stored.element[source_row][pieces_of]
    file = stored.file[source_row][pieces_of]
    copies, file, element, pieces_of = _copies(
        found, pieces.take(pieces_of), base[pieces_of], element, file, wanted, contiguous, chunk_bytes, pieces_of
    )
    ranges = _ranges(stored, copies, file, element, chunk_bytes, piece_bytes[pieces_of])
    return ReadPlan(
        *ranges, copies=copies, missing=missing, overlaps=rows[np.stack([overlaps.left, overlaps.right], axis=1)]
    )


def _in_short_runs(
    found: Intersections, boxes: BoxTable, wanted: BoxTable, contiguous: Mask, element: Int64s
) -> Int64s:
    """Return the intersections that are not copied from file to memory in long runs."""
    lengths = found.lengths
    whole = (lengths == boxes.lengths[found.left]) & (lengths == wanted.lengths[found.right])
    inner = np.ones_like(whole)
    inner[:, :-1] = np.logical_and.accumulate(whole[:, :0:-1], axis=1)[:, ::-1]
    run = np.prod(np.where(inner, lengths, 1), axis=1) * element[found.left]
    return np.flatnonzero(~contiguous[found.right] | (run < _LONG_RUN))


def _cut(boxes: BoxTable, start: Int64s, element: Int64s, piece_bytes: Int64s) -> tuple[BoxTable, Int64s, Int64s]:
    """Cut each row at the multiples of its own `piece_bytes`.

    Returns:
        The pieces as boxes, the byte offset of each piece in its file's data section, and the row of each piece.
    """
    nbytes = boxes.volumes() * element
    first = start // piece_bytes
    count = np.maximum(-(-(start + nbytes) // piece_bytes) - first, 1)
    if not (count > 1).any():
        return boxes, start, np.arange(len(boxes))
    row = np.repeat(np.arange(len(boxes)), count)
    piece = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    low = np.maximum(piece * piece_bytes[row] - start[row], 0) // element[row]
    high = np.minimum((piece + 1) * piece_bytes[row] - start[row], nbytes[row]) // element[row]
    flat = flat_ranges_to_boxes(boxes.lengths[row], low, high)
    row = row[flat.source]
    pieces = BoxTable(boxes.tensor[row], boxes.offsets[row] + flat.offsets, flat.lengths)
    return pieces, start[row] + flat.flat_start * element[row], row


def _strides(shape: Int64s) -> Int64s:
    """Return the row-major strides in elements, [n, d]."""
    strides = np.ones_like(shape)
    if shape.shape[1] > 1:
        strides[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return strides


def _split_gaps(found: Intersections, pieces: BoxTable, element: Int64s, block: Int64s) -> tuple[Intersections, Int64s]:
    """Split intersections whose runs in the file have whole blocks between them, which then are not read.

    Returns:
        The intersections, and the piece of each.
    """
    left = found.left
    strides = _strides(pieces.lengths)[left]
    # `inner` spans the elements of one index of a dimension; the rest of the stride is the gap.
    reach = (found.lengths - 1) * strides
    inner = np.cumsum(reach[:, ::-1], axis=1)[:, ::-1] - reach + 1
    gap = (strides - inner) * element[left][:, None]
    wide = (gap >= 2 * block[left][:, None]) & (found.lengths > 1)
    if not wide.any():
        return found, left
    dims = found.lengths.shape[1]
    depth = np.where(wide.any(axis=1), dims - np.argmax(wide[:, ::-1], axis=1), 0)
    outer = np.arange(dims) < depth[:, None]
    counts = np.where(outer, found.lengths, 1)
    total = np.prod(counts, axis=1)
    source = np.repeat(np.arange(len(left)), total)
    number = np.arange(len(source)) - np.repeat(np.cumsum(total) - total, total)
    index = number[:, None] // _strides(counts)[source] % counts[source]
    lengths = np.where(outer, 1, found.lengths)[source]
    split = Intersections(left[source], found.right[source], found.offsets[source] + index, lengths)
    return split, split.left


def _is_one_run(lengths: Int64s, shape: Int64s) -> Mask:
    """Return whether a box of extent `lengths` is one run of elements inside a box of extent `shape`."""
    partial = lengths != shape
    # A dimension may be partial only when all dimensions before it have extent 1.
    after = np.zeros_like(partial)
    after[:, :-1] = np.logical_or.accumulate(partial[:, :0:-1], axis=1)[:, ::-1]
    runs: Mask = ((lengths == 1) | ~after).all(axis=1)
    return runs


def _copies(
    found: Intersections,
    pieces: BoxTable,
    base: Int64s,
    element: Int64s,
    file: Int64s,
    wanted: BoxTable,
    contiguous: Mask,
    chunk_bytes: int,
    pieces_of: Int64s,
) -> tuple[Copies, Int64s, Int64s, Int64s]:
    """Return the copies in file order, adjacent copies merged, and the file, element size and piece of each."""
    inside = found.offsets - pieces.offsets
    target_shape = wanted.lengths[found.right]
    target_offsets = found.offsets - wanted.offsets[found.right]
    source = base + (inside * _strides(pieces.lengths)).sum(axis=1) * element
    target = (target_offsets * _strides(target_shape)).sum(axis=1)
    elements = np.prod(found.lengths, axis=1)
    flat = (
        contiguous[found.right] & _is_one_run(found.lengths, pieces.lengths) & _is_one_run(found.lengths, target_shape)
    )

    order = np.lexsort((found.right, source, file))
    right, source, elements, target = found.right[order], source[order], elements[order], target[order]
    shape, offsets, lengths = pieces.lengths[order], target_offsets[order], found.lengths[order]
    flat, file, element = flat[order], file[order], element[order]
    joins = np.zeros(len(order), bool)
    joins[1:] = (
        flat[1:]
        & flat[:-1]
        & (file[1:] == file[:-1])
        & (right[1:] == right[:-1])
        & (source[1:] == source[:-1] + (elements * element)[:-1])
        & (source[1:] // chunk_bytes == source[:-1] // chunk_bytes)
        & (target[1:] == target[:-1] + elements[:-1])
    )
    heads = np.flatnonzero(~joins)
    total = np.add.reduceat(elements, heads) if len(heads) else elements
    merged = Copies(
        right[heads], source[heads], total, flat[heads], target[heads], shape[heads], offsets[heads], lengths[heads]
    )
    return merged, file[heads], element[heads], pieces_of[order][heads]


def _ranges(
    stored: StoredRows, copies: Copies, file: Int64s, element: Int64s, chunk_bytes: int, piece_bytes: Int64s
) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Return block-aligned ranges that cover the copies: (file, start, stop, first copy)."""
    spread = ((copies.lengths - 1) * _strides(copies.source_shape)).sum(axis=1) + 1
    span = np.where(copies.flat, copies.elements, spread) * element
    block = stored.block_bytes[file]
    low = copies.source // block * block
    high = np.minimum(-(-(copies.source + span) // block) * block, stored.data_bytes[file])
    # All files share one number line, where a running maximum finds the gaps in the union of ranges.
    base = np.cumsum(stored.data_bytes) - stored.data_bytes
    ends = np.maximum.accumulate(base[file] + high)
    chunk = copies.source // chunk_bytes
    new = np.ones(len(file), bool)
    new[1:] = (base[file] + low)[1:] > ends[:-1]
    new[1:] |= (chunk[1:] != chunk[:-1]) | (file[1:] != file[:-1])
    piece = copies.source // piece_bytes
    apart = (base[file] + low)[1:] >= ends[:-1]
    new[1:] |= apart & (piece[1:] != piece[:-1]) & ~(copies.flat[1:] & copies.flat[:-1])
    first = np.flatnonzero(new)
    if not len(first):
        empty = np.zeros(0, np.int64)
        return empty, empty, empty, np.zeros(1, np.int64)
    stop = np.maximum.reduceat(high, first)
    return file[first], low[first], stop, np.append(first, len(file))
