"""Repair a checkpoint: write a new catalog from the headers of its storage files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.engine.earlier_files import read_header
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from bytecheckpoint.representation.catalog import StorageFile
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.representation.header_reader import StorageHeader, parse_header
from bytecheckpoint.representation.names import CATALOG_NAME, companions, generation_of
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.tools.progress import Progress
from bytecheckpoint.tools.rebuild import Generation, GenerationReport
from bytecheckpoint.tools.subject import Subject, refuse_other_programs, storage_of
from bytecheckpoint.tools.verify_files import VerifyFinding, verify_catalog

__all__ = ["RepairReport", "generations_of_whole_saves", "repair"]


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


def _choice_notes(chosen: Generation, reports: Sequence[GenerationReport]) -> Iterable[str]:
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


def _generations(storage: Storage) -> list[Generation]:
    """Return the saves whose files are in the folder, newest first."""
    storage = with_time_limits(storage)  # one wrapper for all files: a file system that hangs costs one timeout
    found: dict[str, Generation] = {}
    present = storage.list()
    beside = companions(name for name, _ in present)
    for name, size in present:
        generation = generation_of(name)
        if generation is None or name in beside:
            continue
        group = found.setdefault(generation, Generation(generation))
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
    every = {f.name: (f, h) for group in found.values() for f, h in zip(group.files, group.headers, strict=True)}
    for group in found.values():  # which may have adopted files of earlier saves
        group.adopted = {name: every.get(name) for header in group.headers for name in header.adopted}
    return sorted(found.values(), key=lambda g: (g.modified, g.name), reverse=True)


def _read_header(storage: Storage, name: str, size: int) -> tuple[StorageHeader, int]:
    """Return the header of a file and its checksum."""
    data, _ = read_header(storage, name)
    header = parse_header(data, file=name)
    if header.data_offset + header.data_length != size:
        raise CorruptCheckpointError(
            f"{name} has {size} bytes, its header says {header.data_offset + header.data_length}"
        )
    return header, xxhash.xxh3_64_intdigest(data)
