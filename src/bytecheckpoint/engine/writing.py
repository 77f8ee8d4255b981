"""Write storage files: threads compute checksums and write several chunks at the same time, in one pass.

This module runs in the training process for synchronous saves and in the helper process for asynchronous ones. So it
must not import torch, nor anything that does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.concurrency import Workers, call_with_timeout, storage_result
from bytecheckpoint.engine.buffers import block_sums, split_buffers
from bytecheckpoint.errors import StorageUnavailableError
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.representation.fingerprints import FileBoxSums, StoredBox
from bytecheckpoint.storage import FileWriter, NewFile, Storage
from bytecheckpoint.storage.base import call_timeout
from bytecheckpoint.tracing.operation import count, span
from bytecheckpoint.tuning import tuning

__all__ = ["FileTask", "FilesWriter", "StagedChunk", "WrittenSums", "aligned_memory"]


class FileTask(msgspec.Struct, frozen=True):
    """One storage file to write.

    Attributes:
        name: relative name.
        data_offset: first byte of the data section; the header goes before it.
        data_bytes: length of the data section.
        block_bytes: length of a checksum block.
        boxes: boxes in the data section, by their place, if their fingerprints are wanted.
    """

    name: str
    data_offset: int
    data_bytes: int
    block_bytes: int
    boxes: tuple[StoredBox, ...] = ()


class WrittenSums(NamedTuple):
    """Sums of one file's data section.

    Attributes:
        blocks: checksum of each block, uint64 [blocks].
        boxes: fingerprint of each box of the task, uint64 [boxes, 2].
    """

    blocks: NDArray[np.uint64]
    boxes: NDArray[np.uint64]


class StagedChunk(NamedTuple):
    """A chunk of a file that lies in the staging pool.

    Attributes:
        file: index of the file.
        start: byte offset in the file's data section.
        at: byte offset in the pool, a multiple of 4096.
        nbytes: length.
    """

    file: int
    start: int
    at: int
    nbytes: int


class _CreatedFile:
    def __init__(self, task: FileTask, writer: FileWriter) -> None:
        self.task = task
        self.writer = writer
        self.sums: NDArray[np.uint64] = np.zeros(-(-task.data_bytes // task.block_bytes), np.uint64)
        self.fingerprints = FileBoxSums(task.boxes)
        # A step consists of whole blocks.
        self.step = max(writer.preferred_bytes // task.block_bytes, 1) * task.block_bytes


class FilesWriter:
    """Writes the files of one rank's part of one save, on threads of this process.

    The calls come in this order: `open`; `write`, `submit` or `write_staged` any number of times; `sums`; `finish`. `abort`
    may come at any time.

    Args:
        storage: storage that receives the files.
        tasks: files to write.
        direct: True to bypass the page cache where the storage can. Then buffers must be aligned to 4096 bytes, and
            chunks that do not end their file must have lengths that are multiples of 4096.
        threads: number of chunks written at the same time.
        stable: True if the buffers given to `write` keep their contents until `finish` or `abort` has returned. Then a
            storage that takes whole files need not copy them.
        pool: bytes of the staging pool, for `write_staged`.
        cancel: token of the save. A failure of another rank ends all calls, also those that wait for the storage.
    """

    def __init__(
        self,
        storage: Storage,
        tasks: Sequence[FileTask],
        *,
        direct: bool,
        threads: int,
        stable: bool = False,
        pool: memoryview | None = None,
        cancel: Cancellation | None = None,
    ) -> None:
        self._storage = storage
        self._tasks = tasks
        self._request = functools.partial(NewFile, direct=direct, stable=stable)
        self._pool = memoryview(b"") if pool is None else pool
        self._cancel = cancel or Cancellation()
        self._files: dict[int, _CreatedFile] = {}
        self._batches: list[list[Future[None]]] = [[]]  # first single calls, then those of `write_staged`
        self._ended: Literal["", "failed", "timed out"] = ""  # writes that have not begun are skipped
        # Not `call_with_timeout` per chunk: that takes a tenth more processor time, here and in reading.py.
        self._workers = Workers(threads, "bytecheckpoint-write")

    def open(self) -> None:
        """Create the files, unless the save is cancelled."""
        tasks = self._tasks

        def create(number: int) -> None:
            task = tasks[number]
            request = self._request(task.name, task.data_offset + task.data_bytes)
            with span("create", subject=task.name):
                self._files[number] = _CreatedFile(task, self._storage.create(request))

        self._cancel.on_set(lambda _: self._interrupt())
        try:
            self._cancel.raise_if_set()
            if self._storage.capabilities.in_memory:
                for number in range(len(tasks)):
                    create(number)
            else:
                self._wait([self._workers.submit(create, number) for number in range(len(tasks))])
        except BaseException:
            self.abort()
            raise
        self._files = {number: self._files[number] for number in range(len(tasks))}  # in the order of the tasks

    @property
    def direct(self) -> bool:
        """True if some file bypasses the page cache."""
        return any(f.writer.direct for f in self._files.values())

    def submit(self, function: Any, *args: Any) -> Future[None]:
        """Run `function(*args)` on a writer thread; `sums` raises its failure."""
        future: Future[None] = self._workers.submit(function, *args)
        self._batches[0].append(future)
        return future

    def write(self, file: int, start: int, buffers: Sequence[memoryview], padded: memoryview | None = None) -> None:
        """Checksum and write one chunk of a file's data section.

        Args:
            file: index into the tasks.
            start: byte offset in the data section; a multiple of the file's block length.
            buffers: the bytes, one buffer after the other. Their total is a multiple of the block length, or ends the file.
            padded: the single buffer extended to a multiple of 4096 bytes, for the unaligned end of a direct file.
        """
        if self._ended:
            return
        entry = self._files[file]
        task = entry.task
        block = start // task.block_bytes
        nbytes = sum(map(len, buffers))
        try:
            # A storage that takes whole files counts what it writes when `finish` sends it.
            with span("hash" if self._storage.capabilities.whole_files else "write", nbytes, task.name):
                if entry.writer.direct:
                    assert padded is not None
                    entry.fingerprints.add(start, buffers)
                    for value in block_sums(buffers, task.block_bytes):
                        entry.sums[block] = value
                        block += 1
                    entry.writer.write_at(task.data_offset + start, [padded])
                    return
                for position, part in split_buffers(nbytes, entry.step, buffers):
                    entry.fingerprints.add(start + position, part)
                    for value in block_sums(part, task.block_bytes):
                        entry.sums[block] = value
                        block += 1
                    entry.writer.write_at(task.data_offset + start + position, part)
        except BaseException:
            self._ended = self._ended or "failed"
            raise

    def write_staged(self, chunks: Sequence[StagedChunk]) -> int:
        """Write chunks of the staging pool on the writer threads; return the number of the batch, for `wait`."""
        futures = []
        for file, start, at, nbytes in chunks:
            padded = self._pool[at : at + -(-nbytes // 4096) * 4096]
            futures.append(self._workers.submit(self.write, file, start, [padded[:nbytes]], padded))
        self._batches.append(futures)
        return len(self._batches) - 1

    def wait(self, batch: int) -> None:
        """Wait until the chunks of a batch are written, and raise the first failure.

        Raises:
            StorageUnavailableError: a call did not end within the storage's time limit.
        """
        self._wait(self._batches[batch])

    def _wait(self, futures: Sequence[Future[None]], nbytes: int = 0) -> None:
        """Wait for calls in this order, as `wait` does.

        Args:
            futures: results of the calls.
            nbytes: bytes that one call may have to move, beyond a chunk.
        """
        seconds = call_timeout(self._storage, nbytes)
        for future in futures:
            self._cancel.raise_if_set()
            try:
                storage_result(future, seconds, f"write {self._storage.url}", self._cancel.future)
            except StorageUnavailableError:
                if not future.done():
                    self._ended = "timed out"
                raise

    def sums(self) -> list[WrittenSums]:
        """Wait for all writes, and return the sums of each file; raise the first failure."""
        count("queued chunks", sum(map(len, self._batches)))
        for batch in self._batches:
            self._wait(batch)
        self._cancel.raise_if_set()
        return [WrittenSums(f.sums, f.fingerprints.sums) for f in self._files.values()]

    def finish(self, headers: Sequence[bytes]) -> None:
        """Write each file's header, and make the files and their names durable.

        Args:
            headers: one per file, exactly `data_offset` bytes long.
        """
        pairs = zip(self._files.values(), headers, strict=True)
        futures = [self._workers.submit(self._finish_one, entry, header) for entry, header in pairs]
        self._wait(futures, sum(task.data_bytes for task in self._tasks))
        if self._tasks:
            with span("sync"):
                self._storage.sync([task.name for task in self._tasks])
        self._workers.shutdown()
        # From now on a catalog may name the files: `abort` must not remove them any more.
        self._files.clear()
        self._pool = memoryview(b"")  # frees a private pool, although the save still holds this object

    @staticmethod
    def _finish_one(entry: _CreatedFile, header: bytes) -> None:
        assert len(header) == entry.task.data_offset
        with span("finish", entry.task.data_offset, entry.task.name):
            entry.writer.write_at(0, [_aligned_copy(header) if entry.writer.direct else memoryview(header)])
            entry.writer.finish(entry.task.data_offset + entry.task.data_bytes)

    def _interrupt(self) -> None:
        """Skip the writes that have not begun, and interrupt the others."""
        self._ended = self._ended or "failed"
        for entry in list(self._files.values()):
            entry.writer.interrupt()

    def abort(self) -> None:
        """Stop, and remove every file that was created; never raise.

        Where the storage does not answer, a thread removes the files when it does.
        """
        self._interrupt()
        seconds = 0.0 if self._ended == "timed out" else call_timeout(self._storage)
        if self._cancel.failure is not None:
            seconds = min(seconds, tuning().stopped_calls)
        with contextlib.suppress(StorageUnavailableError):
            call_with_timeout(seconds, self._remove_files)

    def _remove_files(self) -> None:
        self._workers.shutdown(cancel=True)  # no file may be closed while a thread is using it
        self._pool = memoryview(b"")
        for entry in self._files.values():
            entry.writer.abort()


def _aligned_copy(data: bytes) -> memoryview:
    """Copy `data` to memory whose address is a multiple of 4096."""
    buffer = aligned_memory(len(data))
    buffer[:] = data
    return buffer


def aligned_memory(nbytes: int) -> memoryview:
    """Allocate memory whose address is a multiple of 4096, as direct I/O needs."""
    raw = np.empty(nbytes + 4096, np.uint8)
    shift = -raw.ctypes.data % 4096
    return memoryview(raw)[shift : shift + nbytes]
