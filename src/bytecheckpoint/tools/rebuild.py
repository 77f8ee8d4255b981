"""Build a catalog from the headers of storage files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bytecheckpoint.planning.coverage import overlapping
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog import SHARED, Catalog, StorageFile, TensorTable
from bytecheckpoint.representation.catalog_validation import catalog_problem
from bytecheckpoint.representation.header_reader import StorageHeader
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.storage_file import StoredEntry

__all__ = ["build_catalog"]


def build_catalog(
    files: Sequence[StorageFile], headers: Sequence[StorageHeader], info: dict[str, Any]
) -> Catalog | list[str]:
    """Return the catalog of the tensors and values in the files of one save, or the problems that prevent it, in words.

    Args:
        files: the files.
        headers: the header of each.
        info: facts about the save as a whole.
    """
    index = _index_entries(headers)
    if isinstance(index, str):
        return [index]
    catalog = _to_catalog(files, headers, index, info)
    problem = catalog_problem(catalog)
    if problem is not None:
        return [problem]
    return _gaps(catalog) or catalog


@dataclass(slots=True)
class _EntryIndex:
    """All entries of a save, grouped by tensor.

    Attributes:
        tensors: (key, owner) -> the first entry of that tensor; the position in this dict is the tensor's number.
        number: tensor number of each entry.
        file: file number of each entry.
        entries: all entries.
        aliases: state -> (further name of a tied tensor -> FQN).
    """

    tensors: dict[tuple[TensorKey, int], StoredEntry] = field(default_factory=dict)
    number: list[int] = field(default_factory=list)
    file: list[int] = field(default_factory=list)
    entries: list[StoredEntry] = field(default_factory=list)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)


def _index_entries(headers: Sequence[StorageHeader]) -> _EntryIndex | str:
    """Index the entries of all files, or return how they contradict each other."""
    copies: dict[TensorKey, int] = {}
    for header in headers:
        for entry in header.entries:
            if entry.owner != SHARED:
                copies[entry.key] = copies.get(entry.key, 0) + 1
    index = _EntryIndex()
    numbers: dict[tuple[TensorKey, int], int] = {}
    for file, header in enumerate(headers):
        for entry in header.entries:
            # A header names the writer of a value. A single copy means that all ranks share the value.
            owner = SHARED if copies.get(entry.key, 0) <= 1 else entry.owner
            identity = (entry.key, owner)
            first = index.tensors.setdefault(identity, entry)
            if (first.dtype, first.global_shape) != (entry.dtype, entry.global_shape):
                return f"its files differ about the dtype or shape of {entry.key}"
            number = numbers.setdefault(identity, len(numbers))
            index.number.append(number)
            index.file.append(file)
            index.entries.append(entry)
            for alias in entry.aliases:
                index.aliases.setdefault(entry.key.state, {})[alias] = entry.key.fqn
    return index


def _to_catalog(
    files: Sequence[StorageFile], headers: Sequence[StorageHeader], index: _EntryIndex, info: dict[str, Any]
) -> Catalog:
    keys = [key for key, _ in index.tensors]
    firsts = list(index.tensors.values())
    entries = index.entries
    shapes = BoxTable.build(range(len(firsts)), [e.global_shape for e in firsts], [e.global_shape for e in firsts])
    file = np.array(index.file, np.int64)
    data_offset = np.array([f.data_offset for f in files], np.int64)
    return Catalog.build(
        TensorTable.of(
            states=[key.state for key in keys],
            fqns=[key.fqn for key in keys],
            slots=[key.slot for key in keys],
            dtypes=[e.dtype for e in firsts],
            shapes=shapes.lengths,
            ndims=np.array([len(e.global_shape) for e in firsts], np.int64),
            owner=np.array([owner for _, owner in index.tensors], np.int32),
            requires_grad=np.array([e.requires_grad for e in firsts], bool),
        ),
        boxes=BoxTable.build(index.number, [e.offsets for e in entries], [e.lengths for e in entries]),
        file=file.astype(np.int32),
        byte_offset=np.array([e.byte_offset for e in entries], np.int64) + (data_offset[file] if len(file) else 0),
        byte_length=np.array([e.byte_length for e in entries], np.int64),
        files=files,
        sums=[h.sums for h in headers],
        aliases=index.aliases,
        info=info,
    )


def _gaps(catalog: Catalog) -> list[str]:
    """Return the tensors that the files do not cover exactly once, in words."""
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
