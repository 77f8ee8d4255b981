"""Rebuilding a lost or damaged catalog from the headers of the storage files, which describe themselves."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from .._version import __version__
from ..engine.catalogs import read_catalog
from ..errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from ..representation.catalog import VALUES_SLOT, Catalog, StorageFile
from ..representation.catalog_file import encode
from ..representation.names import CATALOG_NAME, file_stem, generation_of
from ..representation.storage_file import StorageHeader, header_needs, parse_header
from ..storage import Storage
from ..storage.limited import limited
from .rebuild import catalog_of
from .verify import Finding, Progress, verify_catalog

__all__ = ["GenerationReport", "RepairReport", "repair_checkpoint"]

_PART = re.compile(r"/(rank|values)-([0-9]+)(?:-p([0-9]+))?(?=\.|$)")


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """The files of one save that were found.

    Attributes:
        generation: what their names carry.
        files: their number.
        nbytes: their size in bytes.
        modified: when the newest was written, seconds since 1970.
        complete: whether they are a whole checkpoint, as far as they themselves can tell.
        problems: what is wrong with them, in words.
    """

    generation: str
    files: int
    nbytes: int
    modified: float
    complete: bool
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What `repair_checkpoint` did.

    Attributes:
        path: the checkpoint.
        written: whether a catalog was written.
        generation: of the files that it names, "" when none was written.
        generations: all that were found, newest first.
        findings: damage within the chosen files (only with `force`).
        notes: what a person should know.
    """

    path: str
    written: bool
    generation: str
    generations: tuple[GenerationReport, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def repair_checkpoint(storage: Storage, *, force: bool = False, progress: Progress | None = None) -> RepairReport:
    """Write a new catalog for storage files that have lost theirs.

    Only the files of one save are used, never a mixture: of the saves whose files are complete, the newest. Before
    the catalog is written every byte is verified. Complete means that every tensor that the files speak of is covered
    exactly once, that nothing they refer to is missing, and that of each rank that left a file all files are there.
    A rank all of whose files are gone cannot be told from one that had nothing to write, so the report names the ranks
    of which nothing was found.

    Args:
        storage: where the files are.
        force: rebuild although the present catalog is sound; write it although blocks are damaged or a file of the
            save cannot be read, if the rest is complete.
        progress: as in `verify_checkpoint`.

    Raises:
        CheckpointNotFoundError: there are no storage files.
        CorruptCheckpointError: no save's files are complete, or bytes are damaged; nothing was written.
        IncompatibleCheckpointError: a newer version wrote the catalog or the files.
        StorageError: the catalog cannot be written.
    """
    sound = _present_catalog(storage)
    if sound and not force:
        return RepairReport(storage.url, False, "", (), (), ("the catalog is sound; nothing was changed",))
    found = _generations(storage)
    if not found:
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


def _choice_notes(chosen: _Generation, reports: Sequence[GenerationReport]) -> Iterable[str]:
    for report in reports:
        if report.generation != chosen.name:
            state = "complete, but older" if report.complete else f"incomplete: {report.problems[0]}"
            yield f"the files of save {report.generation} were left alone ({state}); the next save here removes them"


def _present_catalog(storage: Storage) -> bool:
    """Whether there is a sound catalog."""
    try:
        read_catalog(storage)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return False
    return True


@dataclass(slots=True)
class _Generation:
    """The files of one save."""

    name: str
    files: list[StorageFile] = field(default_factory=list)
    headers: list[StorageHeader] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    nbytes: int = 0
    modified: float = 0.0
    catalog: Catalog | None = None

    def report(self, storage: Storage, force: bool) -> GenerationReport:
        """Judge the files, and make the catalog when they are complete."""
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
        """Files that must have been there, because others of the same rank say so."""
        present = {file_stem(name) for name in self.names}
        stated: dict[int, set[str]] = {}
        counted: dict[int, int] = {}
        for file, header in zip(self.files, self.headers, strict=True):
            stated.setdefault(file.rank, set()).update(header.siblings, _parts_before(file.name))
            counted[file.rank] = max(counted.get(file.rank, 0), header.files)
        lost = []
        for rank, stems in sorted(stated.items()):
            lost += [f"{stem} is missing, which other files of rank {rank} name" for stem in sorted(stems - present)]
            own = {stem for stem in present if _rank_of(stem) == rank}
            if (more := counted[rank] - len(own | stems)) > 0:
                lost.append(
                    f"{more} of the {counted[rank]} files that rank {rank} wrote are missing, with plain values"
                )
        return lost

    def _build(self) -> list[str]:
        """Make the catalog; returns what keeps it from being one."""
        worlds = {h.world_size for h in self.headers}
        if len(worlds) > 1:
            return [f"its files tell of different world sizes ({', '.join(map(str, sorted(worlds)))})"]
        made = catalog_of(self.files, self.headers, self._info())
        if isinstance(made, Catalog):
            self.catalog = made
            return []
        return made

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
        """What plain values and param groups name, and no file holds."""
        from ..opening.checkpoint import Checkpoint

        catalog = self.catalog
        assert catalog is not None
        lost: dict[str, None] = {}
        for kind in catalog.kinds():
            slots = {catalog.slot[i] for i in catalog.of_kind(kind).tolist()}
            if VALUES_SLOT not in slots and slots - {""}:
                lost[f"{kind} has states of parameters but no settings: the file of its plain values is missing"] = None
        with Checkpoint(storage, catalog) as view:
            for rank in (None, *view.ranks):
                try:
                    keys = set(view.for_rank(rank))
                except CorruptCheckpointError as error:
                    lost[str(error)] = None
                    continue
                groups = [view[key] for key in keys if key.endswith("/param_groups")] if rank is None else []
                params = [name for group in groups for one in group for name in one["params"]]
                absent = [name for name in params if f"model/{name}" not in keys]
                if "model" in view.kinds and 0 < len(absent) < len(params):
                    lost[f"{len(absent)} parameters of the optimizer are in no file, such as {absent[0]}"] = None
        return list(lost)

    def notes(self) -> list[str]:
        """What the catalog was made of."""
        catalog = self.catalog
        assert catalog is not None
        world = self.headers[0].world_size
        by_kind: dict[str, set[int]] = {}
        for file in self.files:
            by_kind.setdefault(file.kind, set()).add(file.rank)
        found = [
            f"{kind}: {_count(catalog, kind)} tensors in files of {len(ranks)} of {world} ranks"
            for kind, ranks in by_kind.items()
        ]
        silent = sorted(set(range(world)) - {_rank_of(file_stem(name)) for name in self.names})
        if silent:
            found.append(
                f"no file of {len(silent)} of {world} ranks was found ({_listed(silent)}): either they had nothing to "
                f"write, or all of their files are lost; check the numbers of tensors"
            )
        if not all(header.files for header in self.headers):
            found.append("an early version wrote the files: a lost one none of whose tensors is named leaves no trace")
        return [
            *found,
            "layout, framework and user metadata of the save are lost",
            *(f"left out: {problem}" for problem in self.unreadable),
        ]


def _rank_of(stem: str) -> int:
    """The rank in a storage file's name."""
    match = _PART.search(stem)
    assert match is not None
    return int(match[2])


def _parts_before(name: str) -> list[str]:
    """The stems of the earlier parts of the series that a file belongs to."""
    match = _PART.search(name)
    assert match is not None
    if match[3] is None or match[1] == "values":  # a values file that was written late counts from 1, maybe alone
        return []
    first = name[: match.end(2)]
    return [first if part == 0 else f"{first}-p{part:03d}" for part in range(int(match[3]))]


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{', '.join(map(str, ranks[:8]))}{more}"


def _count(catalog: Catalog, kind: str) -> int:
    """Number of tensors of a kind, plain values not counted."""
    return sum(1 for i in catalog.of_kind(kind).tolist() if catalog.slot[i] != VALUES_SLOT)


def _generations(storage: Storage) -> list[_Generation]:
    """The saves whose files are in the folder, the newest first."""
    storage = limited(storage)  # one for all, so that a file system that hangs is waited for once
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
                name, header.kind, header.rank, size, header.data_offset, header_sum, header.block_bytes, generation
            )
        )
    return sorted(found.values(), key=lambda g: (g.modified, g.name), reverse=True)


def _read_header(storage: Storage, name: str, size: int) -> tuple[StorageHeader, int]:
    reader = storage.open(name)
    try:
        data = bytearray(0)
        needs = header_needs(bytes(data), file=name)
        while len(data) < needs:
            more = bytearray(min(needs, size) - len(data))
            got = reader.read_into(len(data), [memoryview(more)])
            data += more[:got]
            if not got:
                raise CorruptCheckpointError(f"{name} ends inside its header")
            needs = header_needs(bytes(data[:8]), file=name)
    finally:
        reader.close()
    header = parse_header(bytes(data), file=name)
    if header.data_offset + header.data_length != size:
        raise CorruptCheckpointError(
            f"{name} has {size} bytes, its header says {header.data_offset + header.data_length}"
        )
    return header, xxhash.xxh3_64_intdigest(data)
