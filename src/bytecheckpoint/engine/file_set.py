"""Open the storage files of a checkpoint on demand, and verify every block in the pass that reads it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.engine.buffers import block_sums, split_buffers
from bytecheckpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    StorageError,
    StorageUnavailableError,
    listed,
)
from bytecheckpoint.formats.foreign_storage import ForeignStorage
from bytecheckpoint.lazy import lazy
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.catalog import FOREIGN, Catalog
from bytecheckpoint.representation.names import delta_name, is_uri
from bytecheckpoint.storage import FileReader, Storage, open_differences, open_stored, resolve
from bytecheckpoint.storage.base import call_timeout
from bytecheckpoint.storage.optional import is_cached
from bytecheckpoint.tracing.operation import count_retries, span
from bytecheckpoint.tuning import tuning

if TYPE_CHECKING:
    from bytecheckpoint.storage.deltas.reading import DeltaReader

__all__ = ["FileSet", "other_folders", "parallel_reads"]

#: Number of ranges that `is_cached` looks up in the page cache.
_CACHE_SAMPLES = 64
_log = logging.getLogger("bytecheckpoint")


def other_folders(catalog: Catalog, *, own: bool = False) -> set[str]:
    """Return the URLs of other folders that hold files of the checkpoint; with `own` without adopted files."""
    files = [file for file in catalog.files if is_uri(file.name) and not (own and file.format == FOREIGN)]
    # The names of this package's files have a folder.
    return {file.name.rsplit("/", 1 if file.format == FOREIGN else 2)[0] for file in files}


def parallel_reads(storage: Storage, catalog: Catalog) -> int:
    """Return the number of parallel reads that suits the storages of a checkpoint's files."""
    storages = [storage]
    with contextlib.suppress(CheckpointError):  # opening the file raises it
        storages += [resolve(folder) for folder in other_folders(catalog)]
    return max(storage.capabilities.parallel_reads for storage in storages)


class FileSet:
    """The open storage files of one checkpoint, with their checksums. Several threads may use it.

    Use it as a context manager, or call `close`. A set without references closes itself.

    Args:
        storage: storage of the checkpoint.
        catalog: catalog of the checkpoint, with the checksums of the files that are read.
        stopped: future whose exception ends all reads, those that wait in `Readers` at once.

    Attributes:
        stopped: future whose exception ends all reads.
    """

    def __init__(self, storage: Storage, catalog: Catalog, stopped: Future[NoReturn] | None = None) -> None:
        self._storage = storage
        self._catalog = catalog
        self._readers: dict[int, Future[FileReader]] = {}  # by file, the most recently used last
        self._users: dict[int, int] = {}  # by file: threads inside `_open_file`; of all that were ever opened
        self._lock = threading.Lock()
        self.stopped: Future[NoReturn] = stopped or Future()
        weakref.finalize(self, _close_all, self._readers).atexit = False

    def replace_catalog(self, catalog: Catalog) -> None:
        """Use a catalog with more row groups, and so with the checksums of more of the same files."""
        self._catalog = catalog

    def __enter__(self) -> FileSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files that no thread uses. A thread may wait in one for a file system that does not answer."""
        with self._lock:
            idle = {file: opening for file, opening in self._readers.items() if not self._users.get(file)}
            self._readers.clear()
        if self.in_memory:
            _close_all(idle)
            return
        with contextlib.suppress(StorageUnavailableError):
            call_with_timeout(self.read_timeout(), lambda: _close_all(idle))

    @lazy
    def in_memory(self) -> bool:
        """True if all files are in memory, so that no read waits for a device or a server."""
        return self._storage.capabilities.in_memory and not other_folders(self._catalog)

    def is_cached(self, ranges: Int64s) -> bool:
        """Return whether samples of some ranges are in this machine's memory, so that reads need no device or server.

        Args:
            ranges: (file, start, stop) rows, int64 [n, 3].
        """
        if self.in_memory or not len(ranges):
            return self.in_memory
        sample = ranges[np.unique(np.linspace(0, len(ranges) - 1, _CACHE_SAMPLES).astype(np.int64))]
        for file in np.unique(sample[:, 0]).tolist():
            entry = self._catalog.files[file]
            offsets = entry.data_offset + sample[sample[:, 0] == file, 1:] - (0, 1)  # first and last byte
            try:
                if is_uri(entry.name) or not is_cached(self._storage, entry.name, offsets.reshape(-1).tolist()):
                    return False
            except FileNotFoundError:
                return False
        return True

    @lazy
    def _reads(self) -> int:
        return parallel_reads(self._storage, self._catalog)

    def threads(self, wanted: int) -> int:
        """Return the number of parallel reads: `wanted`, or as many as suit the storage if that is 0."""
        return wanted or self._reads

    @property
    def url(self) -> str:
        """The URL of the checkpoint."""
        return self._storage.url

    def read_timeout(self) -> float:
        """Return the seconds that one read may take."""
        return call_timeout(self._storage)

    def check_stopped(self) -> None:
        """Raise the exception of `stopped` if there is one."""
        if self.stopped.done():
            self.stopped.result()

    @contextlib.contextmanager
    def _open_file(self, file: int) -> Iterator[FileReader]:
        """Open a file, or use the open one. Close unused files beyond `tuning().open_files`: descriptors are few."""
        with self._lock:
            opening = self._readers.pop(file, None)
            first = opening is None
            opening = opening or Future()
            self._readers[file] = opening
            self._users[file] = self._users.get(file, 0) + 1
        try:
            # Without the lock: on a remote storage this is a request, and threads open many files at the same time.
            if first:
                self._open(file, opening)
            yield opening.result()
        finally:
            with self._lock:
                self._users[file] -= 1
                if not self._users[file] and self._readers.get(file) is not opening:
                    _close(opening)  # the set was closed meanwhile
                excess = len(self._readers) - tuning().open_files
                if excess > 0:
                    for other in [f for f in self._readers if not self._users[f]][:excess]:
                        _close(self._readers.pop(other))

    def _open(self, file: int, opening: Future[FileReader]) -> None:
        try:
            opening.set_result(self._new_reader(file))
        except BaseException as error:  # noqa: BLE001  raised from `result`, in all threads that wait for the file
            with self._lock:
                self._readers.pop(file, None)
            opening.set_exception(error)

    def _new_reader(self, file: int) -> FileReader:
        entry = self._catalog.files[file]
        try:
            with span("open", subject=entry.name):
                reader = open_stored(self._storage, entry)
        except FileNotFoundError:
            raise self._missing(entry.name) from None
        if not entry.block_bytes and entry.size > entry.data_offset and entry.format != FOREIGN:
            reader.close()
            raise IncompatibleCheckpointError(
                f"{self._storage.url}: {entry.name} has no checksums, and this version reads only files that have them"
            )
        if not reader.match_size(entry.size):
            reader.close()
            raise CorruptCheckpointError(
                f"{self._storage.url}: {entry.name} has {reader.size} bytes, the catalog says {entry.size}; "
                f"the file was cut, extended or replaced; use another checkpoint",
                file=entry.name,
            )
        return reader

    @property
    def storage(self) -> Storage:
        """The storage of the checkpoint."""
        return self._storage

    @property
    def catalog(self) -> Catalog:
        """The catalog of the files, with the rows that have been read so far."""
        return self._catalog

    def differences(self, file: int) -> DeltaReader:
        """Open a file's differences, its own or those beside it; the caller closes it. Raises as `fetch`."""
        entry = self._catalog.files[file]
        try:
            return open_differences(self._storage, entry)
        except FileNotFoundError:
            raise self._missing(delta_name(entry.name)) from None

    def check_unchanged(self, files: Iterable[int] | None = None) -> None:
        """Prove that bytes read from files of another program belong together; files of this package have checksums.

        Args:
            files: indices of files in the catalog; None: all that have been read.

        Raises:
            CheckpointReplacedError: a file was written to meanwhile.
        """
        if isinstance(self._storage, ForeignStorage):
            read = tuple(self._users) if files is None else files
            self._storage.check_unchanged({self._catalog.files[file].name for file in read} | self._index)

    @lazy
    def _index(self) -> set[str]:
        """Names of the files of another program that have no tensors, and were opened for the catalog."""
        assert isinstance(self._storage, ForeignStorage)
        return self._storage.versions().keys() - {file.name for file in self._catalog.files}

    def _missing(self, name: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._storage.url}: the storage file {name} is missing; use another checkpoint", file=name
        )

    def fetch(self, file: int, start: int, stop: int, buffers: Sequence[memoryview]) -> None:
        """Read bytes [start, stop) of a file's data section into `buffers`, and verify them.

        Args:
            file: index of the file in the catalog.
            start: first byte of a block.
            stop: end of a block, or of the data section.
            buffers: memory of `stop - start` bytes in total, contents arbitrary.

        Raises:
            CorruptCheckpointError: a checksum differs, or the file is missing, cut or extended.
            CheckpointError: the exception of `stopped`.
        """
        with self._open_file(file) as reader:
            failed: CorruptCheckpointError | StorageError | None = None
            for copy in itertools.chain([reader], reader.other_copies()):
                if failed is not None:
                    count_retries()
                try:
                    with span("read", stop - start, self._catalog.files[file].name):
                        self._fetch_copy(copy, file, start, stop, buffers)
                except (CorruptCheckpointError, StorageError) as error:
                    failed = failed or error
                else:
                    if failed is not None:
                        _log.warning("%s; another copy was read instead", failed)
                    return
        assert failed is not None
        raise failed

    def _fetch_copy(self, reader: FileReader, file: int, start: int, stop: int, buffers: Sequence[memoryview]) -> None:
        """Read and verify as `fetch`, from one copy of the file."""
        entry = self._catalog.files[file]
        sums = self._catalog.sums(file)
        size = entry.block_bytes
        block = start // size if size else 0
        step = max(reader.preferred_bytes // size, 1) * size if size else reader.preferred_bytes
        for position, part in split_buffers(stop - start, step, buffers):
            self.check_stopped()
            at = entry.data_offset + start + position
            got = reader.read_into(at, part)
            if got != min(step, stop - start - position):
                raise CorruptCheckpointError(
                    f"{self._storage.url}: {entry.name} ends after {at + got} bytes; it "
                    f"was cut while it was being read; use another checkpoint",
                    file=entry.name,
                )
            for value in block_sums(part, size) if size else ():
                if value != int(sums[block]):
                    raise self._damaged(file, block)
                block += 1

    def read(self, file: int, start: int, nbytes: int) -> bytes:
        """Read a few bytes of a file's data section, and verify the blocks that hold them. Raises as `fetch`."""
        entry = self._catalog.files[file]
        if not nbytes:
            return b""
        block = entry.block_bytes or 1
        low = start // block * block
        high = min(-(-(start + nbytes) // block) * block, entry.size - entry.data_offset)
        data = bytearray(high - low)
        read = functools.partial(self.fetch, file, low, high, [memoryview(data)])
        call_with_timeout(self.read_timeout(), read, f"cannot read {self.url}", stopped=self.stopped)
        return bytes(memoryview(data)[start - low : start - low + nbytes])

    def _damaged(self, file: int, block: int) -> CorruptCheckpointError:
        entry = self._catalog.files[file]
        low = entry.data_offset + block * entry.block_bytes
        high = min(low + entry.block_bytes, entry.size)
        catalog = self._catalog
        rows = (catalog.file == file) & (catalog.byte_offset < high) & (catalog.byte_offset + catalog.byte_length > low)
        tensors = tuple(str(catalog.key(int(t))) for t in np.unique(catalog.boxes.tensor[rows]))
        return CorruptCheckpointError(
            f"{self._storage.url}: checksum mismatch in {entry.name}, block {block} (bytes {low} to {high}), which "
            f"holds {listed(tensors, 3)}; use another checkpoint",
            file=entry.name,
            block=block,
            tensors=tensors,
        )


def _close_all(readers: dict[int, Future[FileReader]]) -> None:
    for opening in readers.values():
        _close(opening)
    readers.clear()


def _close(opening: Future[FileReader]) -> None:
    if opening.done() and opening.exception() is None:
        opening.result().close()
