"""A catalog made from what the headers of storage files say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..planning.coverage import overlapping
from ..representation.boxes import BoxTable
from ..representation.catalog import SHARED, Catalog, StorageFile
from ..representation.catalog_check import catalog_problem
from ..representation.shards import TensorKey
from ..representation.storage_file import StorageHeader
from ..representation.stored_entries import StoredEntry

__all__ = ["catalog_of"]


def catalog_of(
    files: Sequence[StorageFile], headers: Sequence[StorageHeader], info: dict[str, Any]
) -> Catalog | list[str]:
    """The catalog of all that the files of one save hold, or what keeps it from being one, in words.

    Args:
        files: the files.
        headers: the header of each.
        info: facts about the save as a whole.
    """
    placed = _placed(headers)
    if isinstance(placed, str):
        return [placed]
    catalog = _catalog(files, headers, placed, info)
    problem = catalog_problem(catalog)
    if problem is not None:
        return [problem]
    return _gaps(catalog) or catalog


@dataclass(slots=True)
class _Placed:
    """All entries of a save, numbered by tensor."""

    tensors: dict[tuple[TensorKey, int], StoredEntry] = field(default_factory=dict)
    number: list[int] = field(default_factory=list)
    file: list[int] = field(default_factory=list)
    entries: list[StoredEntry] = field(default_factory=list)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)


def _placed(headers: Sequence[StorageHeader]) -> _Placed | str:
    """Entries by tensor, or what contradicts itself."""
    copies: dict[TensorKey, int] = {}
    for header in headers:
        for entry in header.entries:
            if entry.owner != SHARED:
                copies[entry.key] = copies.get(entry.key, 0) + 1
    placed = _Placed()
    numbers: dict[tuple[TensorKey, int], int] = {}
    for file, header in enumerate(headers):
        for entry in header.entries:
            # A header says who wrote a value; that all ranks shared it shows in there being one copy.
            owner = SHARED if copies.get(entry.key, 0) <= 1 else entry.owner
            identity = (entry.key, owner)
            first = placed.tensors.setdefault(identity, entry)
            if (first.dtype, first.global_shape) != (entry.dtype, entry.global_shape):
                return f"its files differ about the dtype or shape of {entry.key}"
            number = numbers.setdefault(identity, len(numbers))
            placed.number.append(number)
            placed.file.append(file)
            placed.entries.append(entry)
            for alias in entry.aliases:
                placed.aliases.setdefault(entry.key.kind, {})[alias] = entry.key.fqn
    return placed


def _catalog(
    files: Sequence[StorageFile], headers: Sequence[StorageHeader], placed: _Placed, info: dict[str, Any]
) -> Catalog:
    keys = [key for key, _ in placed.tensors]
    firsts = list(placed.tensors.values())
    entries = placed.entries
    shapes = BoxTable.build(range(len(firsts)), [e.global_shape for e in firsts], [e.global_shape for e in firsts])
    file = np.array(placed.file, np.int64)
    data_offset = np.array([f.data_offset for f in files], np.int64)
    return Catalog.from_columns(
        kinds=[key.kind for key in keys],
        fqns=[key.fqn for key in keys],
        slots=[key.slot for key in keys],
        dtypes=[e.dtype for e in firsts],
        shapes=shapes.lengths,
        ndims=np.array([len(e.global_shape) for e in firsts], np.int64),
        owner=np.array([owner for _, owner in placed.tensors], np.int32),
        requires_grad=np.array([e.requires_grad for e in firsts], bool),
        boxes=BoxTable.build(placed.number, [e.offsets for e in entries], [e.lengths for e in entries]),
        file=file.astype(np.int32),
        byte_offset=np.array([e.byte_offset for e in entries], np.int64) + (data_offset[file] if len(file) else 0),
        byte_length=np.array([e.byte_length for e in entries], np.int64),
        files=files,
        sums=[h.sums for h in headers],
        aliases=placed.aliases,
        info=info,
    )


def _gaps(catalog: Catalog) -> list[str]:
    """Tensors that the files do not cover exactly once."""
    pairs = overlapping(catalog.boxes)
    if len(pairs):
        name = catalog.key(int(catalog.boxes.tensor[pairs.left[0]]))
        return [f"parts of {name} are stored at two places ({len(pairs)} overlaps in all)"]
    whole = np.prod(catalog.shapes, axis=1, dtype=np.float64)
    have = np.bincount(catalog.boxes.tensor, catalog.boxes.volumes().astype(np.float64), catalog.count)
    short = np.flatnonzero(have != whole)
    if not len(short):
        return []
    name = catalog.key(int(short[0]))
    return [
        f"{len(short)} tensors are incomplete, such as {name}: {have[short[0]]:.0f} of {whole[short[0]]:.0f} elements"
    ]
