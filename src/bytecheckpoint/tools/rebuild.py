"""The storage files of one save, and the catalog that their headers make."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bytecheckpoint._version import __version__
from bytecheckpoint.errors import CorruptCheckpointError, listed
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog import SHARED, VALUES_SLOT, Catalog, StorageFile, TensorTable
from bytecheckpoint.representation.catalog_validation import catalog_problem
from bytecheckpoint.representation.header_reader import StorageHeader
from bytecheckpoint.representation.names import file_stem
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.representation.storage_file import StoredEntry
from bytecheckpoint.storage import Storage
from bytecheckpoint.tools.verify_files import coverage_findings

__all__ = ["Generation", "GenerationReport"]

_PART = re.compile(r"/(rank|values)-([0-9]+)(?:-p([0-9]+))?(?=\.|$)")


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """The files that one save left in the folder.

    Attributes:
        generation: the generation in their names.
        files: number of files.
        nbytes: their size.
        modified: modification time of the newest file, seconds since 1970.
        complete: True if the files form a whole checkpoint, as far as their headers show.
        problems: the faults, in words.
    """

    generation: str
    files: int
    nbytes: int
    modified: float
    complete: bool
    problems: tuple[str, ...]


@dataclass(slots=True)
class Generation:
    """The files of one save with those of earlier ones that it had adopted, by name, and the catalog that they make."""

    name: str
    files: list[StorageFile] = field(default_factory=list)
    headers: list[StorageHeader] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    adopted: dict[str, tuple[StorageFile, StorageHeader] | None] = field(default_factory=dict)
    nbytes: int = 0
    modified: float = 0.0
    catalog: Catalog | None = None

    def report(self, storage: Storage, force: bool) -> GenerationReport:
        """Judge whether the files are complete, and build the catalog if they are."""
        fatal = self._build() if self.headers else ["no file of it can be read"]
        suspect = [*self.unreadable, *self._lost_files(), *([] if fatal else self._lost_references(storage))]
        complete = not fatal and (force or not suspect)
        if not complete:
            self.catalog = None
        count = len(self.files) + len(self.unreadable)
        return GenerationReport(self.name, count, self.nbytes, self.modified, complete, (*fatal, *suspect))

    def _lost_files(self) -> list[str]:
        """Return, in words, the missing files that other files of the same rank name or count."""
        present = {file_stem(name) for name in (*self.names, *self.adopted)}
        expected: dict[int, set[str]] = {}
        file_counts: dict[int, int] = {}
        for file, header in zip(self.files, self.headers, strict=True):
            expected.setdefault(file.rank, set()).update(header.siblings, _parts_before(file.name))
            file_counts[file.rank] = max(file_counts.get(file.rank, 0), header.files)
        lost = [
            f"{name} is missing, which the save had adopted from an earlier one"
            for name, found in self.adopted.items()
            if found is None
        ]
        for rank, stems in sorted(expected.items()):
            lost += [f"{stem} is missing, which other files of rank {rank} name" for stem in sorted(stems - present)]
            own = {stem for stem in present if _rank_of(stem) == rank}
            if (unnamed := file_counts[rank] - len(own | stems)) > 0:
                lost.append(
                    f"{unnamed} of the {file_counts[rank]} files that rank {rank} wrote are missing, with plain values"
                )
        return lost

    def _build(self) -> list[str]:
        """Build the catalog. Return the problems that prevent it."""
        adopted = [found for found in self.adopted.values() if found is not None]
        files = [*self.files, *(file for file, _ in adopted)]
        headers = [*self.headers, *(header for _, header in adopted)]
        worlds = {h.world_size for h in headers}
        if len(worlds) > 1:
            return [f"its files tell of different world sizes ({', '.join(map(str, sorted(worlds)))})"]
        catalog_or_problems = _catalog_of(files, headers, self._info())
        if isinstance(catalog_or_problems, Catalog):
            self.catalog = catalog_or_problems
            return []
        return catalog_or_problems

    def _info(self) -> dict[str, Any]:
        return {
            "created": self.modified,
            "world_size": self.headers[0].world_size,
            "framework": "",
            "layout": {},
            "versions": {"bytecheckpoint": __version__},
            "metadata": {},
            "rebuilt": {"at": time.time(), "by": f"bytecheckpoint {__version__}", "force": bool(self.unreadable)},
        }

    def _lost_references(self, storage: Storage) -> list[str]:
        """Return, in words, what plain values and param groups refer to but no file holds."""
        from bytecheckpoint.opening.box_reader import BoxReader
        from bytecheckpoint.opening.view import CheckpointView

        catalog = self.catalog
        assert catalog is not None
        lost: dict[str, None] = {}
        for state in catalog.states():
            slots = {catalog.slot[i] for i in catalog.of_state(state).tolist()}
            if VALUES_SLOT not in slots and slots - {""}:
                lost[f"{state} has states of parameters but no settings: the file of its plain values is missing"] = (
                    None
                )
        view = CheckpointView(BoxReader(storage, catalog))
        with view:
            for rank in (None, *view.ranks):
                try:
                    keys = set(view.for_rank(rank))
                except CorruptCheckpointError as error:
                    lost[str(error)] = None
                    continue
                groups = [view[key] for key in keys if key.endswith("/param_groups")] if rank is None else []
                params = [name for group in groups for one in group for name in one["params"]]
                absent = [name for name in params if f"model/{name}" not in keys]
                if "model" in view.states and 0 < len(absent) < len(params):
                    lost[f"{len(absent)} parameters of the optimizer are in no file, such as {absent[0]}"] = None
        return list(lost)

    def notes(self) -> list[str]:
        """Return facts about the files behind the catalog, in words."""
        catalog = self.catalog
        assert catalog is not None
        world = self.headers[0].world_size
        by_state: dict[str, set[int]] = {}
        for file in catalog.files:
            by_state.setdefault(file.state, set()).add(file.rank)
        found = [
            f"{state}: {_count(catalog, state)} tensors in files of {len(ranks)} of {world} ranks"
            for state, ranks in by_state.items()
        ]
        without_files = sorted(set(range(world)) - {_rank_of(file_stem(file.name)) for file in catalog.files})
        if without_files:
            found.append(
                f"no file of {len(without_files)} of {world} ranks was found ({listed(without_files, 8)}): either they "
                f"had nothing to write, or all of their files are lost; check the numbers of tensors"
            )
        return [
            *found,
            "layout, framework and user metadata of the save are lost",
            *(f"left out: {problem}" for problem in self.unreadable),
        ]


def _rank_of(stem: str) -> int:
    """Return the rank in the name of a storage file."""
    match = _PART.search(stem)
    assert match is not None
    return int(match[2])


def _parts_before(name: str) -> list[str]:
    """Return the stems of the earlier parts of the series to which a file belongs."""
    match = _PART.search(name)
    assert match is not None
    if match[3] is None or match[1] == "values":  # a late values file has number 1, even if there is no number 0
        return []
    first = name[: match.end(2)]
    return [first if part == 0 else f"{first}-p{part:03d}" for part in range(int(match[3]))]


def _count(catalog: Catalog, state: str) -> int:
    """Return the number of tensors of a state, without plain values."""
    return sum(1 for i in catalog.of_state(state).tolist() if catalog.slot[i] != VALUES_SLOT)


def _catalog_of(
    files: Sequence[StorageFile], headers: Sequence[StorageHeader], info: dict[str, Any]
) -> Catalog | list[str]:
    """Return the catalog of the tensors and values in the files of one save, or the problems that prevent it, in words."""
    index = _index_entries(headers)
    if isinstance(index, str):
        return [index]
    catalog = _to_catalog(files, headers, index, info)
    problem = catalog_problem(catalog)
    if problem is not None:
        return [problem]
    return [finding.message for finding in itertools.islice(coverage_findings(catalog), 5)] or catalog


@dataclass(slots=True)
class _EntryIndex:
    """All entries of a save, grouped by tensor.

    Attributes:
        tensors: (key, owner) -> number of that tensor, which is its position here, and its first entry.
        number: tensor number of each entry.
        file: file number of each entry.
        entries: all entries.
        aliases: state -> (further name of a tied tensor -> FQN).
    """

    tensors: dict[tuple[TensorKey, int], tuple[int, StoredEntry]] = field(default_factory=dict)
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
    for file, header in enumerate(headers):
        for entry in header.entries:
            # A header names the writer of a value. A single copy means that all ranks share the value.
            owner = SHARED if copies.get(entry.key, 0) <= 1 else entry.owner
            number, first = index.tensors.setdefault((entry.key, owner), (len(index.tensors), entry))
            if (first.dtype, first.global_shape) != (entry.dtype, entry.global_shape):
                return f"its files differ about the dtype or shape of {entry.key}"
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
    firsts = [entry for _, entry in index.tensors.values()]
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
