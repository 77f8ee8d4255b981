"""Rebuilding a lost or damaged catalog from the headers of the storage files, which describe themselves."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from .._version import __version__
from ..engine.catalogs import read_catalog
from ..errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from ..planning.coverage import overlapping
from ..representation.boxes import BoxTable
from ..representation.catalog import SHARED, VALUES_SLOT, Catalog, StorageFile
from ..representation.catalog_check import catalog_problem
from ..representation.catalog_file import encode
from ..representation.names import CATALOG_NAME, generation_of
from ..representation.shards import TensorKey
from ..representation.storage_file import StorageHeader, header_needs, parse_header
from ..representation.stored_entries import StoredEntry
from ..storage import Storage
from .verify import Finding, Progress, verify_catalog

__all__ = ["GenerationReport", "RepairReport", "repair_checkpoint"]

_PART = re.compile(r"/(rank|values)-([0-9]+)(?:-p([0-9]+))?\.")


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
    exactly once, and that nothing they refer to is missing; a lost file none of whose tensors is spoken of elsewhere
    cannot be noticed, so the report names the ranks and kinds that were found.

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
    nbytes: int = 0
    modified: float = 0.0
    catalog: Catalog | None = None

    def report(self, storage: Storage, force: bool) -> GenerationReport:
        """Judge the files, and make the catalog when they are complete."""
        suspect = [*self.unreadable, *self._lost_parts()]
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

    def _lost_parts(self) -> list[str]:
        """Files that must have been there because a later part of the same series is."""
        series: dict[str, set[int]] = {}
        for file in self.files:
            match = _PART.search(file.name)
            assert match is not None
            stem = file.name[: match.start()] + f"/{match[1]}-{match[2]}"
            series.setdefault(stem, set()).add(int(match[3] or 0))
        return [
            f"part {part} of {stem} is missing"
            for stem, parts in sorted(series.items())
            for part in sorted(set(range(max(parts))) - parts)
        ]

    def _build(self) -> list[str]:
        """Make the catalog; returns what keeps it from being one."""
        worlds = {h.world_size for h in self.headers}
        if len(worlds) > 1:
            return [f"its files tell of different world sizes ({', '.join(map(str, sorted(worlds)))})"]
        placed = _placed(self.headers)
        if isinstance(placed, str):
            return [placed]
        catalog = _catalog(self.files, self.headers, placed, self._info())
        problem = catalog_problem(catalog)
        if problem is not None:
            return [problem]
        gaps = _gaps(catalog)
        if not gaps:
            self.catalog = catalog
        return gaps

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
        return [
            *found,
            "a lost file none of whose tensors is named elsewhere leaves no trace: check these numbers",
            "layout, framework and user metadata of the save are lost",
            *(f"left out: {problem}" for problem in self.unreadable),
        ]


def _count(catalog: Catalog, kind: str) -> int:
    """Number of tensors of a kind, plain values not counted."""
    return sum(1 for i in catalog.of_kind(kind).tolist() if catalog.slot[i] != VALUES_SLOT)


def _generations(storage: Storage) -> list[_Generation]:
    """The saves whose files are in the folder, the newest first."""
    found: dict[str, _Generation] = {}
    for name, size in storage.list():
        generation = generation_of(name)
        if generation is None:
            continue
        group = found.setdefault(generation, _Generation(generation))
        group.nbytes += size
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
