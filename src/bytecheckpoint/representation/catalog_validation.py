"""Checks of a catalog's content, asserted before a catalog is written and applied to every catalog that is read.

The seal of the catalog's file detects accidents; these checks detect buggy and hostile writers.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.errors import UsageError
from bytecheckpoint.representation.catalog import MAX_DIMS, Catalog, row_order
from bytecheckpoint.representation.checksums import is_block_size
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.names import check_file_name, is_uri
from bytecheckpoint.representation.storage_file import MAX_HEADER_BYTES

__all__ = ["catalog_problem"]

_MAX_BYTES = 1 << 62
_MOST_HEADER_BYTES = 8 + MAX_HEADER_BYTES
_GENERATION = re.compile(r"[0-9a-f]{24}|")


def catalog_problem(catalog: Catalog) -> str | None:
    """Return the first fault of `catalog`, in words, or None for a sound catalog."""
    return _files_problem(catalog) or _tensors_problem(catalog) or _rows_problem(catalog)


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
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    if catalog.files_read is None and not np.array_equal(numbers[starts], np.arange(catalog.count)):
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
    if (catalog.owner < -1).any():
        return "a tensor has an impossible owner"
    return None


def _rows_problem(catalog: Catalog) -> str | None:
    boxes, file = catalog.boxes, catalog.file
    if len(boxes) == 0:
        whole = catalog.files_read is None
        return "it has files and no rows" if whole and any(f.size > f.data_offset for f in catalog.files) else None
    if (file < 0).any() or (file >= len(catalog.files)).any():
        return "a row lies in a file that is not listed"
    outside = np.zeros(len(boxes), np.bool_)
    elements = np.ones(len(boxes), np.float64)
    for offset, length, extents in zip(boxes.offsets.T, boxes.lengths.T, catalog.shapes.T, strict=True):
        extent = extents[boxes.tensor]
        outside |= (offset < 0) | (length < 0) | (offset > extent) | (length > extent - offset)
        elements *= length
    if (row := _first(outside)) is not None:
        return f"a box of tensor '{catalog.key(int(boxes.tensor[row]))}' lies outside its shape"
    sizes = np.array([itemsize(name) for name in catalog.dtype.values], np.int64)[catalog.dtype.codes][boxes.tensor]
    if (row := _first((elements * sizes > _MAX_BYTES) | (boxes.volumes() * sizes != catalog.byte_length))) is not None:
        return f"a box of tensor '{catalog.key(int(boxes.tensor[row]))}' has another size than its bytes"
    first = np.array([f.data_offset for f in catalog.files], np.int64)[file]
    size = np.array([f.size for f in catalog.files], np.int64)[file]
    begin, length = catalog.byte_offset, catalog.byte_length
    if (row := _first((begin < first) | (begin > size) | (length > size - begin))) is not None:
        return f"bytes of tensor '{catalog.key(int(boxes.tensor[row]))}' lie outside file {catalog.files[file[row]].name!r}"
    return _tiling_problem(catalog)


def _tiling_problem(catalog: Catalog) -> str | None:
    """Check that the rows tile each file of the checkpoint; a file elsewhere may be used in part."""
    for number in np.flatnonzero(catalog.untiled).tolist():
        if not is_uri(catalog.files[number].name):
            return f"the rows of file {catalog.files[number].name!r} do not cover it exactly once"
    return None


def _first(wrong: NDArray[np.bool_]) -> int | None:
    return int(wrong.argmax()) if wrong.any() else None
