"""Read the catalog of a checkpoint. Torch is not imported, since tools that only list checkpoints do not need it."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import numpy as np

from bytecheckpoint.concurrency import call_with_timeout, parallel_map
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    StorageConflictError,
    StorageUnavailableError,
    UsageError,
)
from bytecheckpoint.formats.detect import find_instead
from bytecheckpoint.formats.foreign_storage import ForeignStorage
from bytecheckpoint.representation.boxes import BoxTable, Int64s
from bytecheckpoint.representation.catalog import Catalog, CatalogSummary
from bytecheckpoint.representation.catalog_file import decode, decode_summary
from bytecheckpoint.representation.catalog_footer import has_seal
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.names import CATALOG_NAME, generation_of
from bytecheckpoint.storage import FileReader, Storage
from bytecheckpoint.storage.base import call_timeout
from bytecheckpoint.tuning import tuning

__all__ = [
    "CatalogHead",
    "CatalogReader",
    "check_rank",
    "is_sealed",
    "open_catalog",
    "read_catalog",
    "read_catalog_file",
    "read_outline",
    "read_summary",
    "refuse_foreign",
]

_T = TypeVar("_T")
#: Attempts to read parts that belong together: another save may replace the catalog between two reads.
_ATTEMPTS = 2
#: Length of the longest catalog without groups: names of tensors take the most of it.
_MOST_WHOLE_BYTES = 256 << 20


def read_catalog(storage: Storage) -> tuple[Catalog, bytes]:
    """Read the catalog of the checkpoint in `storage`; return the catalog and its bytes.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint.
        CorruptCheckpointError: the catalog is damaged.
        IncompatibleCheckpointError: a newer version wrote it.
    """
    with _located(storage):
        data = read_catalog_file(storage)
        return decode(data), data


def refuse_foreign(storage: Storage) -> None:
    """Refuse to replace a file that has the name of a catalog and is none.

    A catalog has a seal; one that has lost its end has storage files beside it.

    Raises:
        StorageConflictError: the file is of another program.
    """
    with contextlib.suppress(FileNotFoundError):
        if is_sealed(storage):
            return
        if not any(generation_of(name) is not None for name, _ in storage.list()):
            raise StorageConflictError(
                f"{storage.url}/{CATALOG_NAME} is no catalog of a checkpoint, and the save would replace it: save to "
                f"another folder, or remove the file"
            )


def is_sealed(storage: Storage) -> bool:
    """Return whether the file with the name of a catalog has a catalog's seal, sound or not.

    Raises:
        FileNotFoundError: there is no such file.
    """
    with contextlib.closing(storage.open(CATALOG_NAME)) as reader:

        def read(start: int, count: int) -> bytes:
            data = bytearray(count)
            return bytes(data[: reader.read_into(start, [memoryview(data)])])

        return has_seal(reader.size, read)


def read_catalog_file(storage: Storage) -> bytes:
    """Read all of the catalog's file, unless it is longer than a catalog can be.

    Raises:
        FileNotFoundError: there is none.
        CorruptCheckpointError, IncompatibleCheckpointError: it is too long.
    """
    if storage.stat(CATALOG_NAME).size > _MOST_WHOLE_BYTES:
        CatalogReader(storage).close()  # refuses a file that has no groups
    return storage.read(CATALOG_NAME)


def _check_whole(size: int) -> None:
    """Refuse a catalog without groups that is longer than this package writes one."""
    if size > _MOST_WHOLE_BYTES:
        raise CorruptCheckpointError(
            f"a catalog of {size} bytes has groups, and this one has none: the file was extended, or another program "
            "wrote it",
            file=CATALOG_NAME,
        )


def read_outline(storage: Storage) -> Catalog:
    """Read the tensors and files of the catalog; of a large one, not all rows.

    Raises:
        CheckpointError: as `read_catalog`.
    """
    with contextlib.closing(CatalogReader(storage)) as reader:
        return reader.catalog


def read_summary(storage: Storage) -> CatalogSummary:
    """Read the facts of a checkpoint that a list of many checkpoints shows.

    Raises:
        CheckpointError: as `read_catalog`.
    """
    with _located(storage):
        if storage.stat(CATALOG_NAME).size * 4 < tuning().catalog_group_bytes:
            return decode_summary(storage.read(CATALOG_NAME))
    return read_outline(storage).summary()


def open_catalog(storage: Storage) -> tuple[Storage, CatalogReader]:
    """Open the catalog of a checkpoint, or that which a reader of foreign formats makes.

    Returns:
        The storage of the checkpoint's files, and the reader of its catalog.

    Raises:
        CheckpointError: as `CatalogReader`.
    """
    try:
        return storage, CatalogReader(storage)
    except CheckpointNotFoundError as error:
        foreign = find_instead(storage, error)
        return foreign, CatalogReader(foreign)


class CatalogHead(msgspec.Struct, frozen=True, array_like=True):
    """The part of a catalog that every rank of a load needs: all of a small one, the head of a large one.

    Attributes:
        whole: all bytes of a small catalog; empty for a large one.
        size: length in bytes of a large catalog.
        pieces: bytes of a large catalog, by their offset.
        versions: versions of the files of another program, by name, as `ForeignStorage` has found them; empty for a
            checkpoint of this package.
    """

    whole: bytes = b""
    size: int = 0
    pieces: dict[int, bytes] = {}
    versions: dict[str, str] = {}


class CatalogReader:
    """Reads only the row groups that a load needs. A small catalog is read whole.

    Args:
        storage: storage of the checkpoint.
        head: head of the catalog, which another rank has read; None: read it from `storage`.

    Attributes:
        catalog: catalog with all tensors and files, and with all rows if it is small; else with those of plain values.
        groups: row groups of a large catalog; None for a small one.
        identity: bytes at the end of the file that no other catalog has: all of a small catalog.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint.
        CorruptCheckpointError: the catalog is damaged.
        IncompatibleCheckpointError: a newer version wrote it.
    """

    def __init__(self, storage: Storage, head: CatalogHead | None = None) -> None:
        self._storage = storage
        self._file: FileReader | None = None
        self._lock = threading.Lock()
        self._given = head is not None
        self._pieces: dict[int, bytes | memoryview] = {} if head is None else {**head.pieces}
        self._in_head = True
        self.groups: CatalogGroups | None = None
        with _located(storage):
            if head is None:
                self._begin_here()
            elif head.whole:
                self.catalog, self.identity = decode(head.whole), head.whole
            else:
                self._begin(head.size)
        self._in_head = False

    def _begin_here(self) -> None:
        """Read the head from the storage."""
        for attempt in range(_ATTEMPTS):
            size = 0
            try:
                size = self._opened().size
                self._begin(size)
            except CorruptCheckpointError:
                self.close()
                self.groups, self._pieces = None, {}
                if attempt + 1 == _ATTEMPTS and size > _MOST_WHOLE_BYTES:
                    raise
            else:
                return
        # The catalog is damaged, or replaced between the reads: one read of the whole file decides.
        self.identity = self._storage.read(CATALOG_NAME)
        self.catalog = decode(self.identity)

    def _begin(self, size: int) -> None:
        if size * 4 >= tuning().catalog_group_bytes:
            self.groups = CatalogGroups.open(size, self._read_into)
        if self.groups is not None:
            self.catalog, self.identity = self.rows(self.groups.head_groups), bytes(self.groups.tail)
            return
        _check_whole(size)
        data = bytearray(size)
        self._read_into(0, memoryview(data))
        self.close()
        self.identity = bytes(data)
        self.catalog = decode(self.identity)

    def again(self) -> CatalogReader:
        """Return a copy with a lock and a file of its own, for a forked process."""
        other = copy.copy(self)
        other._file, other._lock = None, threading.Lock()
        return other

    def replaced(self) -> bool:
        """Return whether another save has replaced the catalog."""
        with contextlib.suppress(CheckpointError), contextlib.closing(CatalogReader(self._storage)) as now:
            return now.identity != self.identity
        return False

    def versions(self) -> dict[str, str]:
        """Return the versions of the files of another program, by name; {} for a checkpoint of this package."""
        return self._storage.versions() if isinstance(self._storage, ForeignStorage) else {}

    def notes(self) -> tuple[str, ...]:
        """Return facts about another program's files, such as values that were left out, if this rank has read them."""
        return self._storage.notes() if isinstance(self._storage, ForeignStorage) and not self._given else ()

    def head(self) -> CatalogHead:
        """Return the part that every rank needs, for other ranks."""
        if self.groups is None:
            return CatalogHead(self.identity, versions=self.versions())
        pieces = {offset: bytes(piece) for offset, piece in self._pieces.items()}
        return CatalogHead(size=self.groups.size, pieces=pieces, versions=self.versions())

    def rows(
        self,
        numbers: Int64s,
        fill: Callable[[int, memoryview], None] | None = None,
        wanted: BoxTable | None = None,
    ) -> Catalog:
        """Return the catalog with the rows of some groups.

        Args:
            numbers: numbers of the groups.
            wanted: boxes for whose sake they are read; None: any may be looked for later.
            fill: function that writes the bytes of a group, by its number, to memory; None: read them from the storage.

        Raises:
            CheckpointError: an error of `fill`, or of the constructor's kinds.
        """
        groups = self.groups
        assert groups is not None

        def load(number: int) -> None:
            groups.load(number, self._read_into if fill is None else lambda _, memory: fill(number, memory))

        with _located(self._storage):
            threads = 1 if self._storage.capabilities.in_memory else self._storage.capabilities.parallel_reads
            parallel_map(load, np.unique(numbers).tolist(), threads, "bytecheckpoint-catalog")
            return groups.catalog(numbers, wanted)

    def group(self, number: int) -> memoryview:
        """Return the bytes of a group, read and verified. Raises as the constructor."""
        assert self.groups is not None
        with _located(self._storage):
            return self.groups.load(number, self._read_into)

    def close(self) -> None:
        """Close the file, until the next read."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(StorageUnavailableError):
                self._timed(file.close)

    def _opened(self) -> FileReader:
        with self._lock:
            if self._file is None:
                self._file = self._timed(lambda: self._storage.open(CATALOG_NAME))
            return self._file

    def _read_into(self, offset: int, memory: memoryview) -> None:
        piece = self._pieces.get(offset)
        if self._given and piece is not None and len(piece) == len(memory):
            memory[:] = piece
            return
        file = self._opened()
        if self._timed(lambda: file.read_into(offset, [memory]), len(memory)) != len(memory):
            raise CorruptCheckpointError(f"it ends before byte {offset + len(memory)}", file=CATALOG_NAME)
        if self._in_head:
            self._pieces[offset] = memory

    def _timed(self, function: Callable[[], _T], nbytes: int = 0) -> _T:
        if self._storage.capabilities.in_memory:
            return function()
        storage = self._storage
        return call_with_timeout(call_timeout(storage, nbytes), function, f"cannot read {storage.url}/{CATALOG_NAME}")


@contextlib.contextmanager
def _located(storage: Storage) -> Iterator[None]:
    """Name the catalog's file in errors."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{storage.url} holds no committed checkpoint (no {CATALOG_NAME}); give the folder of one step "
            f"(an asynchronous save is there after `handle.result()`)"
        ) from None
    except MemoryError as error:
        raise IncompatibleCheckpointError(
            f"{storage.url}/{CATALOG_NAME}: this process lacks the memory that the file takes: {error}"
        ) from None
    except (CorruptCheckpointError, IncompatibleCheckpointError) as error:
        where = f"{storage.url}/{CATALOG_NAME}"
        if where in str(error):  # of a part that another rank has read
            raise
        if isinstance(storage, ForeignStorage):  # no such file is there
            raise
        if isinstance(error, CorruptCheckpointError) and error.file not in ("", CATALOG_NAME):
            raise  # of a file of another program, from which the catalog is made
        if isinstance(error, IncompatibleCheckpointError):
            raise IncompatibleCheckpointError(f"{where}: {error}") from None
        raise CorruptCheckpointError(f"{where}: {error}", file=CATALOG_NAME) from None


def check_rank(url: str, catalog: Catalog, rank: int | None) -> None:
    """Check that a rank saved the checkpoint, with or without values of its own.

    Args:
        url: URL of the checkpoint.
        catalog: catalog of the checkpoint.
        rank: number of the rank; None for no particular rank.

    Raises:
        UsageError: no such rank saved the checkpoint.
    """
    world_size = max(int(catalog.info.get("world_size", 0)), *(file.rank + 1 for file in catalog.files), 1)
    if rank is not None and rank >= world_size:
        has = f"ranks 0 to {world_size - 1}" if world_size > 1 else "rank 0 only"
        raise UsageError(f"{url} has no rank {rank}: it was saved by {has}")
