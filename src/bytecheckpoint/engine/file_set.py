"""The storage files of a checkpoint: ranges read and every block verified in the same pass."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from ..errors import CheckpointError, CorruptCheckpointError, StorageError, StorageUnavailableError
from ..representation.catalog import Catalog
from ..representation.names import is_uri
from ..storage import FileReader, Storage, open_named, resolve
from ..storage.parallel import within
from .buffers import steps, sums_of

__all__ = ["FileSet", "suiting_reads"]

_log = logging.getLogger("bytecheckpoint")
_MOST_OPEN = 256


def _elsewhere(catalog: Catalog) -> set[str]:
    """Other folders that hold files of the checkpoint, as URLs."""
    return {file.name.rsplit("/", 2)[0] for file in catalog.files if is_uri(file.name)}


def suiting_reads(storage: Storage, catalog: Catalog) -> int:
    """How many reads at the same time suit where the files of a checkpoint are."""
    storages = [storage]
    with contextlib.suppress(CheckpointError):  # which opening the file tells
        storages += [storage.elsewhere(resolve(folder)) for folder in _elsewhere(catalog)]
    return max(storage.reads for storage in storages)


class FileSet:
    """The open storage files of one checkpoint, with their checksums.

    Several threads may use it. Use as a context manager, or `close` it; one that nobody holds any more closes itself.
    """

    def __init__(self, storage: Storage, catalog: Catalog) -> None:
        self._storage = storage
        self._catalog = catalog
        self._readers: dict[int, Future[FileReader]] = {}  # the most recently used last
        self._users: dict[int, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._readers).atexit = False

    def __enter__(self) -> FileSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files, but for those that a thread is inside of: it waits for a file system that does not answer."""
        with self._lock:
            idle = {file: opening for file, opening in self._readers.items() if not self._users.get(file)}
            self._readers.clear()
        if self.in_memory:
            _close_all(idle)
            return
        with contextlib.suppress(StorageUnavailableError):
            within(self.limit(), lambda: _close_all(idle))

    @functools.cached_property
    def in_memory(self) -> bool:
        """Whether no read waits for a device or a server."""
        return self._storage.in_memory and not _elsewhere(self._catalog)

    @functools.cached_property
    def _reads(self) -> int:
        return suiting_reads(self._storage, self._catalog)

    def threads(self, wanted: int) -> int:
        """Reads at the same time: `wanted`, or as many as suit where the files are if that is 0."""
        return wanted or self._reads

    @property
    def url(self) -> str:
        """Of the checkpoint."""
        return self._storage.url

    def limit(self) -> float:
        """Seconds that a read may take."""
        return self._storage.limit()

    @contextlib.contextmanager
    def _lease(self, file: int) -> Iterator[FileReader]:
        """An open file; those not in use are closed beyond `_MOST_OPEN`, since descriptors are few."""
        with self._lock:
            opening = self._readers.pop(file, None)
            first = opening is None
            opening = opening or Future()
            self._readers[file] = opening
            self._users[file] = self._users.get(file, 0) + 1
        try:
            # Not under the lock: on a remote storage this is a request, and many files are wanted at the same time.
            if first:
                self._open(file, opening)
            yield opening.result()
        finally:
            with self._lock:
                self._users[file] -= 1
                if not self._users[file] and self._readers.get(file) is not opening:
                    _close(opening)  # the set was closed meanwhile
                idle = [f for f in self._readers if not self._users[f]] if len(self._readers) > _MOST_OPEN else []
                for other in idle[: len(self._readers) - _MOST_OPEN]:
                    _close(self._readers.pop(other))

    def _open(self, file: int, opening: Future[FileReader]) -> None:
        try:
            opening.set_result(self._opened(file))
        except BaseException as error:  # noqa: BLE001  raised from `result`, also for those who wait for the same file
            with self._lock:
                self._readers.pop(file, None)
            opening.set_exception(error)

    def _opened(self, file: int) -> FileReader:
        entry = self._catalog.files[file]
        try:
            reader = open_named(self._storage, entry.name)
        except FileNotFoundError:
            raise CorruptCheckpointError(
                f"{self._storage.url}: the storage file {entry.name} is missing; use another checkpoint",
                file=entry.name,
            ) from None
        if not reader.fits(entry.size):
            reader.close()
            raise CorruptCheckpointError(
                f"{self._storage.url}: {entry.name} has {reader.size} bytes, the catalog says {entry.size}; "
                f"the file was cut, extended or replaced; use another checkpoint",
                file=entry.name,
            )
        return reader

    def fetch(self, file: int, start: int, stop: int, buffers: Sequence[memoryview]) -> None:
        """Read bytes [start, stop) of a file's data section into `buffers` and verify them.

        Args:
            file: index of the file in the catalog.
            start: a block's first byte.
            stop: a block's end, or the data section's.
            buffers: memory of `stop - start` bytes in all, contents arbitrary.

        Raises:
            CorruptCheckpointError: a checksum differs, or the file is missing, cut or extended.
        """
        with self._lease(file) as reader:
            failed: CorruptCheckpointError | StorageError | None = None
            for copy in itertools.chain([reader], reader.others()):
                try:
                    self._fetch(copy, file, start, stop, buffers)
                except (CorruptCheckpointError, StorageError) as error:
                    failed = failed or error
                else:
                    if failed is not None:
                        _log.warning("%s; another copy was read instead", failed)
                    return
        assert failed is not None
        raise failed

    def _fetch(self, reader: FileReader, file: int, start: int, stop: int, buffers: Sequence[memoryview]) -> None:
        entry = self._catalog.files[file]
        sums = self._catalog.sums(file)
        block = start // entry.block_bytes
        step = max(reader.step_bytes // entry.block_bytes, 1) * entry.block_bytes
        for position, part in steps(stop - start, step, buffers):
            at = entry.data_offset + start + position
            got = reader.read_into(at, part)
            if got != min(step, stop - start - position):
                raise CorruptCheckpointError(
                    f"{self._storage.url}: {entry.name} ends after {at + got} bytes; it "
                    f"was cut while it was being read; use another checkpoint",
                    file=entry.name,
                )
            for value in sums_of(part, entry.block_bytes):
                if value != int(sums[block]):
                    raise self._damaged(file, block)
                block += 1

    def read(self, file: int, start: int, nbytes: int) -> bytes:
        """Any few bytes of a file's data section, verified with the blocks that they touch; raises as `fetch` does."""
        entry = self._catalog.files[file]
        if not nbytes:
            return b""
        low = start // entry.block_bytes * entry.block_bytes
        high = min(-(-(start + nbytes) // entry.block_bytes) * entry.block_bytes, entry.size - entry.data_offset)
        data = bytearray(high - low)
        what = f"cannot read {self._storage.url}"
        within(self.limit(), lambda: self.fetch(file, low, high, [memoryview(data)]), what)
        return bytes(memoryview(data)[start - low : start - low + nbytes])

    def _damaged(self, file: int, block: int) -> CorruptCheckpointError:
        entry = self._catalog.files[file]
        low = entry.data_offset + block * entry.block_bytes
        high = min(low + entry.block_bytes, entry.size)
        catalog = self._catalog
        rows = (catalog.file == file) & (catalog.byte_offset < high) & (catalog.byte_offset + catalog.byte_length > low)
        tensors = tuple(str(catalog.key(int(t))) for t in np.unique(catalog.boxes.tensor[rows]))
        named = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        return CorruptCheckpointError(
            f"{self._storage.url}: checksum mismatch in {entry.name}, block {block} (bytes {low} to {high}), which "
            f"holds {named}; use another checkpoint",
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
