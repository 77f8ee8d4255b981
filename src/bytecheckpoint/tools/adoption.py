"""Adopt a checkpoint of another program: write a small checkpoint whose catalog names its files where they lie."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint._version import __version__
from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.engine.file_set import parallel_reads
from bytecheckpoint.errors import UsageError
from bytecheckpoint.formats.detect import find_checkpoint
from bytecheckpoint.formats.files import open_file
from bytecheckpoint.formats.foreign_storage import ForeignStorage
from bytecheckpoint.representation.catalog import Catalog, StorageFile
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.representation.checksums import block_bytes, block_sum, block_sums
from bytecheckpoint.representation.header_writer import build_header
from bytecheckpoint.representation.names import (
    CATALOG_NAME,
    VALUES_NAME,
    check_file_name,
    generation_of,
    new_generation,
    values_file_name,
)
from bytecheckpoint.representation.storage_file import StoredEntry
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import NewFile, Storage, adopted_version, resolve
from bytecheckpoint.storage.posix.storage import LocalStorage
from bytecheckpoint.storage.time_limits import with_time_limits
from bytecheckpoint.storage.wrappers import unwrapped
from bytecheckpoint.tiers.cooldown import file_uri, note_folder
from bytecheckpoint.tools.progress import Counted, Progress
from bytecheckpoint.tools.subject import Subject, storage_of

__all__ = ["AdoptReport", "adopt"]

_CHUNK: Final = 8 << 20
#: Sums of the blocks of a file.
_Sums = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class AdoptReport:
    """The result of an adoption.

    Attributes:
        path: the checkpoint of the other program.
        target: folder of the checkpoint that names its files.
        format: name of the other program's format.
        files: number of the other program's files.
        nbytes: bytes that were read for checksums.
        notes: facts that a user should know about what was read.
    """

    path: str
    target: str
    format: str
    files: int
    nbytes: int
    notes: tuple[str, ...]


def adopt(checkpoint: Subject, target: str, *, hash: bool = True, progress: Progress | None = None) -> AdoptReport:
    """Write a checkpoint that consists of the files of another program's, where they lie.

    It is like any checkpoint, but its tensors stay in those files, which no tool of this package changes or removes. The
    folder (or the file) is noted beside `target`, in the file in which a cooldown notes its own: readers trust it.

    Args:
        checkpoint: path or storage of the other program's checkpoint, a folder or a file.
        target: folder or URL of the new checkpoint; it must not exist or be empty.
        hash: read all files once, for checksums by which each read is verified. False: read headers only; then a file is
            known by its size and its time or version in the storage.
        progress: function of (bytes read, bytes in all), called by one thread at a time.

    Raises:
        UsageError: `target` holds something or lies in the checkpoint; or that is one of this package.
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError, IncompatibleCheckpointError: the checkpoint cannot be read, or is being written to.
        StorageConflictError: another process has saved to `target`.
        StorageError: a storage fails.
    """
    given, destination = storage_of(checkpoint), resolve(target)
    if given.version(CATALOG_NAME):
        raise UsageError(f"{given.url} is a checkpoint of this package: copy it")
    source = find_checkpoint(given)
    _check_target(source, destination)
    if compressed := source.decoded():
        raise UsageError(
            f"{source.url} has {len(compressed)} tensors or chunks that are compressed, whose bytes no catalog can name: "
            "load it, and save it"
        )
    notes = source.notes()
    catalog, _ = read_catalog(source)
    foreign = [number for number, file in enumerate(catalog.files) if not file.name.startswith(VALUES_NAME)]
    counted = Counted(sum(catalog.files[number].size for number in foreign) if hash else 0, progress)
    files, sums = list(catalog.files), list(catalog.file_sums)
    if hash:
        for number, found in _hashed(source, catalog, foreign, counted).items():
            files[number], sums[number] = replace(files[number], block_bytes=block_bytes(files[number].size)), found
    versions = {number: adopted_version(source.inner, files[number].name) for number in foreign}
    source.check_unchanged(source.versions())
    for number in foreign:
        name = check_file_name(file_uri(source.inner, files[number].name))
        files[number] = replace(files[number], name=name, header_sum=0 if hash else versions[number])
    generation = new_generation(secrets.token_hex(16), 0)
    written: list[str] = []
    for number in sorted({*range(len(files))} - {*foreign}):
        data = source.read(files[number].name)
        name = values_file_name(files[number].state, 0, generation, len(written))
        files[number], sums[number], content = _own_file(catalog, number, data, name)
        _write(destination, files[number].name, content)
        written.append(files[number].name)
    if written:
        destination.sync(written)
    offset = np.array([file.data_offset for file in files], np.int64)[catalog.file]
    info = {
        "world_size": 1, "framework": "", **catalog.info, "created": time.time(), "adopted_from": source.url,
        "versions": {"bytecheckpoint": __version__}, "metadata": {},
    }  # fmt: skip
    adopted = replace(
        catalog, files=tuple(files), file_sums=tuple(sums), byte_offset=catalog.byte_offset + offset, info=info
    )
    note_folder(destination, source.url)
    destination.publish(CATALOG_NAME, encode(adopted), expected="")
    return AdoptReport(source.url, destination.url, str(catalog.info["format"]), len(foreign), counted.done, notes)


def _check_target(source: ForeignStorage, destination: Storage) -> None:
    """Refuse a target that holds something, does not last, or lies in the checkpoint or around it."""
    if destination.capabilities.machine_only:
        raise UsageError(f"{destination.url}: give the storage itself, without tier+")
    places = [
        os.path.realpath(storage.url) if isinstance(unwrapped(storage), LocalStorage) else storage.url.rstrip("/")
        for storage in (source, destination)
    ]
    if source.url != source.inner.url:  # a single file, beside which the target may lie
        places[0] = f"{places[0]}/"
    if any(f"{a}/".startswith(f"{b}/") for a, b in (places, places[::-1])):
        raise UsageError(f"{destination.url} lies in {source.url}, or around it: choose a folder beside it")
    held = [name for name, _ in destination.list() if generation_of(name) is None]
    if held or (isinstance(unwrapped(destination), LocalStorage) and os.path.isfile(destination.url)):
        raise UsageError(
            f"{destination.url} is not empty (it holds {held[0] if held else 'a file'}): choose a new folder"
        )
    destination.check_publish(CATALOG_NAME, "")


def _hashed(source: ForeignStorage, catalog: Catalog, numbers: Sequence[int], counted: Counted) -> dict[int, _Sums]:
    """Return the sums of all blocks of some files, by the files' numbers."""
    storage = with_time_limits(source)
    sizes = {number: catalog.files[number].size for number in numbers}
    tasks = [(number, start) for number in numbers for start in range(0, sizes[number], 8 * _CHUNK)]

    def read(task: tuple[int, int]) -> list[_Sums]:
        number, start = task
        found = []
        with open_file(storage, catalog.files[number].name) as file:
            for at in range(start, min(start + 8 * _CHUNK, sizes[number]), _CHUNK):
                data = file.read(at, min(_CHUNK, sizes[number] - at))
                found.append(block_sums(data, block_bytes(sizes[number])))
                counted.add(len(data))
        return found

    threads = settings().storage.read_threads or parallel_reads(source, catalog)
    sums: dict[int, list[_Sums]] = {number: [] for number in numbers}
    for (number, _), found in zip(tasks, parallel_map(read, tasks, threads, "bytecheckpoint-adopt"), strict=True):
        sums[number] += found
    return {number: np.concatenate([np.zeros(0, np.uint64), *found]) for number, found in sums.items()}


def _own_file(catalog: Catalog, number: int, data: bytes, name: str) -> tuple[StorageFile, _Sums, bytes]:
    """Return the storage file for a file that lies in memory, the sums of its blocks, and its content.

    Args:
        catalog: catalog, whose rows of this file follow each other.
        number: position of the file in the catalog.
        data: bytes of the file.
        name: name of the storage file.
    """
    entries = []
    rows = np.flatnonzero(catalog.file == number)
    for row in rows[np.argsort(catalog.byte_offset[rows], kind="stable")].tolist():
        tensor = int(catalog.boxes.tensor[row])
        dims = int(catalog.ndims[tensor])
        entry = StoredEntry(
            catalog.key(tensor),
            catalog.dtype[tensor],
            catalog.shape(tensor),
            tuple(catalog.boxes.offsets[row, :dims].tolist()),
            tuple(catalog.boxes.lengths[row, :dims].tolist()),
            owner=int(catalog.owner[tensor]),
            byte_offset=int(catalog.byte_offset[row]),
            byte_length=int(catalog.byte_length[row]),
        )
        entries.append(entry)
    size, state, generation = block_bytes(len(data)), catalog.files[number].state, generation_of(name) or ""
    sums = block_sums(data, size)
    header = build_header(
        entries, state=state, rank=0, world_size=1, generation=generation, data_length=len(data), block_bytes=size
    ).render(sums)
    file = StorageFile(name, state, 0, len(header) + len(data), len(header), block_sum(header), size, generation)
    return file, sums, header + data


def _write(storage: Storage, name: str, content: bytes) -> None:
    writer = storage.create(NewFile(name, len(content)))
    try:
        writer.write_at(0, [memoryview(content)])
        writer.finish(len(content))
    except BaseException:
        writer.abort()
        raise
