"""Repair a checkpoint: write a new catalog from the headers of its storage files."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from bytecheckpoint._version import __version__
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.engine.earlier_files import read_header
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    listed,
)
from bytecheckpoint.representation.catalog import VALUES_SLOT, Catalog, StorageFile
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.representation.header_reader import StorageHeader, parse_header
from bytecheckpoint.representation.names import CATALOG_NAME, file_stem, generation_of
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.tools.progress import Progress
from bytecheckpoint.tools.rebuild import build_catalog
from bytecheckpoint.tools.subject import Subject, refuse_other_programs, storage_of
from bytecheckpoint.tools.verify_files import VerifyFinding, verify_catalog

__all__ = ["GenerationReport", "RepairReport", "generations_of_whole_saves", "repair"]

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


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of a repair.

    Attributes:
        path: the checkpoint.
        written: True if a catalog was written.
        generation: generation of the files that the new catalog names, "" if none was written.
        generations: every generation found, newest first.
        findings: damage in the chosen files (only with `force`).
        notes: remarks for the user.
    """

    path: str
    written: bool
    generation: str
    generations: tuple[GenerationReport, ...]
    findings: tuple[VerifyFinding, ...]
    notes: tuple[str, ...]


def repair(checkpoint: Subject, *, force: bool = False, progress: Progress | None = None) -> RepairReport:
    """Write a new catalog for the storage files of a folder.

    The catalog names the files of one save only, the newest one whose files are complete, with the files of earlier saves
    that it had adopted. Every byte is verified before the catalog is written. A save is complete if every tensor that its
    files mention is covered exactly once, if nothing that the files refer to is missing, and if all files of each rank that
    left any are there. A rank that lost all its files looks like a rank that wrote nothing, so the report names the ranks
    without files.

    Args:
        checkpoint: path, storage or open checkpoint.
        force: replace a sound catalog too; write the catalog even if blocks are damaged or a file cannot be read, as
            long as the rest is complete.
        progress: function, as for `verify`.

    Raises:
        CheckpointNotFoundError: there are no storage files.
        CorruptCheckpointError: no save's files are complete, or bytes are damaged; nothing was written.
        IncompatibleCheckpointError: a newer version wrote the catalog or the files.
        StorageError: the catalog cannot be written.
    """
    storage = storage_of(checkpoint)
    sound = _has_sound_catalog(storage)
    if sound and not force:
        return RepairReport(storage.url, False, "", (), (), ("the catalog is sound; nothing was changed",))
    found = _generations(storage)
    if not found:
        refuse_other_programs(storage, "repair")
        raise CheckpointNotFoundError(
            f"{storage.url} holds no storage files of a checkpoint; give the folder of one step"
        )
    reports = tuple(g.report(storage, force) for g in found)
    chosen = next((g for g, report in zip(found, reports, strict=True) if report.complete), None)
    if chosen is None:
        raise CorruptCheckpointError(
            f"{storage.url}: no save's files are complete; newest: {'; '.join(reports[0].problems[:3])}"
        )
    catalog = chosen.catalog
    assert catalog is not None
    verified = verify_catalog(storage, catalog, progress)
    if verified.findings and not force:
        raise CorruptCheckpointError(
            f"{storage.url}: {len(verified.findings)} damaged places, first: {verified.findings[0].message}; with "
            f"--force the catalog is written all the same, and reading those blocks raises",
            file=verified.findings[0].file,
            block=verified.findings[0].block,
            tensors=verified.findings[0].tensors,
        )
    storage.publish(CATALOG_NAME, encode(catalog))
    notes = [*chosen.notes(), *_choice_notes(chosen, reports)]
    if sound:
        notes.append("a sound catalog was replaced")
    return RepairReport(storage.url, True, chosen.name, reports, verified.findings, tuple(notes))


def generations_of_whole_saves(storage: Storage) -> set[str]:
    """Return the generations of the files in a folder that belong to a complete save, as far as their headers show."""
    whole = [group for group in _generations(storage) if group.report(storage, False).complete]
    return {generation_of(name) or "" for group in whole for name in (*group.names, *group.adopted)}


def _choice_notes(chosen: _Generation, reports: Sequence[GenerationReport]) -> Iterable[str]:
    used = {chosen.name, *map(generation_of, chosen.adopted)}
    for report in reports:
        if report.generation not in used:
            state = "complete, but older" if report.complete else f"incomplete: {report.problems[0]}"
            yield f"the files of save {report.generation} were left alone ({state}); the next save here removes them"


def _has_sound_catalog(storage: Storage) -> bool:
    try:
        read_catalog(storage)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return False
    return True


@dataclass(slots=True)
class _Generation:
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
        suspect = [*self.unreadable, *self._lost_files()]
        fatal = []
        if self.headers:
            fatal = self._build()
            if not fatal:
                suspect += self._lost_references(storage)
        else:
            fatal = ["no file of it can be read"]
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
        catalog_or_problems = build_catalog(files, headers, self._info())
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


def _generations(storage: Storage) -> list[_Generation]:
    """Return the saves whose files are in the folder, newest first."""
    storage = with_time_limits(storage)  # one wrapper for all files: a file system that hangs costs one timeout
    found: dict[str, _Generation] = {}
    for name, size in storage.list():
        generation = generation_of(name)
        if generation is None:
            continue
        group = found.setdefault(generation, _Generation(generation))
        group.nbytes += size
        group.names.append(name)
        try:
            group.modified = max(group.modified, storage.stat(name).modified)
            header, header_sum = _read_header(storage, name, size)
            if header.generation != generation:
                raise CorruptCheckpointError(f"{name} says that it belongs to save {header.generation or 'none'}")
        except FileNotFoundError:
            continue
        except IncompatibleCheckpointError:
            raise
        except (CheckpointError, MemoryError) as error:
            group.unreadable.append(str(error))
            continue
        group.headers.append(header)
        group.files.append(
            StorageFile(
                name, header.state, header.rank, size, header.data_offset, header_sum, header.block_bytes, generation
            )
        )
    _add_adopted(found.values())
    return sorted(found.values(), key=lambda g: (g.modified, g.name), reverse=True)


def _add_adopted(generations: Collection[_Generation]) -> None:
    """Give each save the files of earlier saves that its own files name."""
    every = {f.name: (f, h) for group in generations for f, h in zip(group.files, group.headers, strict=True)}
    for group in generations:
        group.adopted = {name: every.get(name) for header in group.headers for name in header.adopted}


def _read_header(storage: Storage, name: str, size: int) -> tuple[StorageHeader, int]:
    """Return the header of a file and its checksum."""
    data, _ = read_header(storage, name)
    header = parse_header(data, file=name)
    if header.data_offset + header.data_length != size:
        raise CorruptCheckpointError(
            f"{name} has {size} bytes, its header says {header.data_offset + header.data_length}"
        )
    return header, xxhash.xxh3_64_intdigest(data)
