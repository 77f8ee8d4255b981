"""Checks of a catalog's content, asserted before a catalog is written and applied to every catalog that is read.

The seal of the catalog's file detects accidents; these checks detect buggy and hostile writers.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.errors import UsageError
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import FOREIGN, MAX_DIMS, VALUES_SLOT, Catalog, row_order
from bytecheckpoint.representation.checksums import is_block_size
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.names import check_file_name, is_uri
from bytecheckpoint.representation.storage_file import MAX_HEADER_BYTES

__all__ = ["catalog_problem"]

_MAX_BYTES = 1 << 62
#: Plans of reads number the coordinates of all tensors.
_MAX_EXTENTS = 1 << 61
_MOST_HEADER_BYTES = 8 + MAX_HEADER_BYTES
_GENERATION = re.compile(r"[0-9a-f]{24}|")


def catalog_problem(catalog: Catalog) -> str | None:
    """Return the first fault of `catalog`, in words, or None for a sound catalog."""
    return (
        _files_problem(catalog)
        or _tensors_problem(catalog)
        or _rows_problem(catalog)
        or _tilings_problem(catalog)
        or _runs_problem(catalog)
    )


def _files_problem(catalog: Catalog) -> str | None:
    names = [file.name for file in catalog.files]
    if len(set(names)) != len(names):
        return "it lists a file twice"
    if len(catalog.file_sums) != len(names):
        return "checksums and files differ in number"
    read = catalog.files_read
    for number, (file, sums) in enumerate(zip(catalog.files, catalog.file_sums, strict=True)):
        try:
            check_file_name(file.name)
        except UsageError as error:
            return str(error)
        if not 0 <= file.data_offset <= min(file.size, _MOST_HEADER_BYTES) or file.size >= _MAX_BYTES:
            return f"file {file.name!r} cannot have {file.size} bytes with data from {file.data_offset}"
        if file.block_bytes and not is_block_size(file.block_bytes):
            return f"file {file.name!r} cannot have blocks of {file.block_bytes} bytes"
        if not _GENERATION.fullmatch(file.generation):
            return f"file {file.name!r} cannot have generation {file.generation!r}"
        if (read is None or read[number]) and sums.shape != (file.blocks,):
            return f"file {file.name!r} has {file.blocks} blocks and {len(sums)} checksums"
    return None


def _tensors_problem(catalog: Catalog) -> str | None:
    numbers = catalog.boxes.tensor
    held = numbers[np.flatnonzero(np.diff(numbers, prepend=-1))]
    if catalog.tilings is not None:
        held = np.unique(np.concatenate([held, catalog.tilings.boxes.tensor]))
    if catalog.files_read is None and not np.array_equal(held, np.arange(catalog.count)):
        return "its rows and its tensors do not match"
    if row_order(catalog.boxes) is not None:
        return "its rows are not in order"
    if catalog.has_duplicates():
        return "it lists a tensor twice"
    dims = catalog.ndims
    if catalog.shapes.shape[1] > MAX_DIMS or (dims < 0).any() or (dims > catalog.shapes.shape[1]).any():
        return "a tensor has an impossible number of dimensions"
    if (catalog.shapes < 0).any():
        return "a tensor has a negative extent"
    extents = catalog.shapes.sum(axis=1, dtype=np.float64)
    if extents.sum() >= _MAX_EXTENTS:
        return f"tensor '{catalog.key(int(extents.argmax()))}' has an impossible shape"
    if (catalog.owner < -1).any():
        return "a tensor has an impossible owner"
    return None


def _rows_problem(catalog: Catalog) -> str | None:
    boxes, file = catalog.boxes, catalog.file
    if len(boxes) == 0:
        return None
    if (file < 0).any() or (file >= len(catalog.files)).any():
        return "a row lies in a file that is not listed"
    # A state without values may be a module's, so values of a changed name would seem never to have been there.
    values = np.flatnonzero((catalog.slot.codes == catalog.slot.code_of(VALUES_SLOT))[boxes.tensor])
    for tensor, number in zip(boxes.tensor[values].tolist(), file[values].tolist(), strict=True):
        if catalog.files[number].state != catalog.state[tensor]:
            return f"'{catalog.key(tensor)}' lies in file {catalog.files[number].name!r}, which is of another state"
    return _boxes_problem(catalog, boxes, boxes.offsets, catalog.byte_length, catalog.strides)


def _boxes_problem(
    catalog: Catalog, boxes: BoxTable, farthest: NDArray[Any], nbytes: Int64s, strides: Int64s | None = None
) -> str | None:
    """Check that boxes lie inside their tensors, and have the bytes from their first to their last element.

    Args:
        catalog: the catalog.
        boxes: boxes of rows, or of tilings.
        farthest: largest offset of each box, [n, d].
        nbytes: number of bytes of each box, [n].
        strides: strides of each box in elements, [n, d]; None: row-major boxes.
    """
    outside = np.zeros(len(boxes), np.bool_)
    elements = np.ones(len(boxes), np.float64)
    columns = (boxes.offsets.T, farthest.T, boxes.lengths.T, catalog.shapes.T)
    for offset, last, length, extents in zip(*columns, strict=True):
        extent = extents[boxes.tensor]
        outside |= (offset < 0) | (length < 0) | (last > extent) | (length > extent - last)
        elements *= length
    if (row := _first(outside)) is not None:
        return f"a box of tensor '{catalog.key(int(boxes.tensor[row]))}' lies outside its shape"
    sizes = np.array([itemsize(name) for name in catalog.dtype.values], np.int64)[catalog.dtype.codes][boxes.tensor]
    spans = boxes.volumes()
    if strides is not None:
        moves = np.maximum(boxes.lengths - 1, 0)
        reach = (moves.astype(np.float64) * strides).sum(axis=1)
        if (row := _first((strides < 0).any(axis=1) | (reach * sizes > _MAX_BYTES))) is not None:
            return f"a box of tensor '{catalog.key(int(boxes.tensor[row]))}' has impossible strides"
        spans = np.where(spans > 0, (moves * strides).sum(axis=1) + 1, 0)
    if (row := _first((elements * sizes > _MAX_BYTES) | (spans * sizes != nbytes))) is not None:
        return f"a box of tensor '{catalog.key(int(boxes.tensor[row]))}' has another size than its bytes"
    return None


def _tilings_problem(catalog: Catalog) -> str | None:
    tiles = catalog.tilings
    if tiles is None:
        return None
    count = int(tiles.tiling.max(initial=-1)) + 1
    begins = np.flatnonzero(np.diff(tiles.tiling, prepend=-1))
    if not np.array_equal(tiles.tiling[begins], np.arange(count)):
        return "its tilings are not numbered one by one"
    if not np.array_equal(np.unique(tiles.of_tile), np.arange(count)) and catalog.files_read is None:
        return "a tiling has no tile"
    if len(tiles.of_tile) and not 0 <= tiles.of_tile.min() <= tiles.of_tile.max() < count:
        return "a tile belongs to no tiling"
    if (tiles.file < 0).any() or (tiles.file >= len(catalog.files)).any():
        return "a tile lies in a file that is not listed"
    axes = tiles.places.shape[1]
    if (tiles.axes < -1).any() or (tiles.axes >= axes).any() or (tiles.places < 0).any():
        return "a tile has an impossible place"
    if tiles.places.astype(np.float64).max(initial=0) > 2.0**53:
        return "a tile has an impossible place"
    # The farthest place of each tiling along each axis, and with it the farthest place of each box.
    farthest = np.zeros((count, axes + 1), np.int64)
    np.maximum.at(farthest[:, :axes], tiles.of_tile, tiles.places)
    moves = np.take_along_axis(farthest[tiles.tiling], tiles.axes, axis=1)
    if (moves.astype(np.float64) * tiles.boxes.lengths > _MAX_BYTES).any():
        return "a tile has an impossible place"
    last = tiles.boxes.offsets + moves * tiles.boxes.lengths
    if problem := _boxes_problem(catalog, tiles.boxes, last, tiles.box_bytes):
        return problem
    order = np.lexsort((tiles.box_bytes > 0, tiles.box_offset, tiles.tiling))
    ends = np.cumsum(tiles.box_bytes[order], dtype=np.float64)
    if ends[-1:].sum() > _MAX_BYTES:
        return "a tiling is too large"
    expected = np.cumsum(tiles.box_bytes[order]) - tiles.box_bytes[order]
    expected -= expected[begins][tiles.tiling]
    if not np.array_equal(expected, tiles.box_offset[order]):
        return "the boxes of a tiling do not cover it exactly once"
    if not np.array_equal(np.add.reduceat(tiles.box_bytes, begins)[tiles.of_tile], tiles.byte_length):
        return "a tile has another size than its boxes"
    return None


def _runs_problem(catalog: Catalog) -> str | None:
    """Check that rows and tiles lie inside their files and tile them; a file elsewhere may be used in part."""
    file, begin, length = catalog.runs
    if len(file) == 0:
        whole = catalog.files_read is None
        return "it has files and no rows" if whole and any(f.size > f.data_offset for f in catalog.files) else None
    first = np.array([f.data_offset for f in catalog.files], np.int64)[file]
    size = np.array([f.size for f in catalog.files], np.int64)[file]
    if (row := _first((begin < first) | (begin > size) | (length < 0) | (length > size - begin))) is not None:
        what = f"tensor '{catalog.key(int(catalog.boxes.tensor[row]))}'" if row < len(catalog.file) else "a tile"
        return f"bytes of {what} lie outside file {catalog.files[file[row]].name!r}"
    for number in np.flatnonzero(catalog.untiled).tolist():
        if not is_uri(catalog.files[number].name) and catalog.files[number].format != FOREIGN:
            return f"the rows of file {catalog.files[number].name!r} do not cover it exactly once"
    return None


def _first(wrong: NDArray[np.bool_]) -> int | None:
    return int(wrong.argmax()) if wrong.any() else None
