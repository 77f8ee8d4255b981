"""The bytes of one save on one rank: from live tensors to durable files.

A synchronous save streams chunk by chunk through a few small buffers. An asynchronous save copies the image into the
staging pool, which is all that the caller waits for; the helper process or threads write it from there. A synchronous
save does so too if the storage takes whole files only.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from bytecheckpoint.engine.helper import HelperProcess
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.engine.staging import Chunk, Image, chunks_of
from bytecheckpoint.engine.writing import FilesWriter, FileTask, StagedChunk
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.representation.names import escape
from bytecheckpoint.settings import Settings, flat_settings
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.base import call_timeout

__all__ = ["SaveJob"]

#: Numbers of the jobs of helper processes.
_jobs = itertools.count(1)
#: Seconds that the helper gets beyond its own time limits, whose errors name the file.
_GRACE = 5.0


class _StagedWriter(Protocol):
    """Writes files from the staging pool. `write` starts a batch of chunks and returns its number, for `wait`."""

    def write(self, chunks: Sequence[StagedChunk]) -> int: ...

    def wait(self, batch: int) -> None: ...

    def sums(self) -> list[NDArray[np.uint64]]: ...

    def finish(self, headers: Sequence[bytes]) -> None: ...

    def open(self) -> None: ...

    def stop(self, error: CheckpointError) -> None: ...

    def abort(self) -> None: ...


class _ThreadWriter:
    """Writes on threads of this process."""

    def __init__(self, writer: FilesWriter, pool: StagingPool) -> None:
        self._writer = writer
        self._pool = pool
        self._batches: list[list[Future[None]]] = []

    def open(self) -> None:
        self._writer.open()

    def stop(self, error: CheckpointError) -> None:
        self._writer.stop(error)

    def write(self, chunks: Sequence[StagedChunk]) -> int:
        self._batches.append(self._writer.write_staged(chunks, self._pool.view()))
        return len(self._batches) - 1

    def wait(self, batch: int) -> None:
        self._writer.wait(self._batches[batch])

    def sums(self) -> list[NDArray[np.uint64]]:
        return self._writer.sums()

    def finish(self, headers: Sequence[bytes]) -> None:
        self._writer.finish(headers)

    def abort(self) -> None:
        self._writer.abort()


class _HelperWriter:
    """Has the helper process write."""

    def __init__(
        self,
        running_helper: Callable[[], HelperProcess],
        storage: Storage,
        tasks: Sequence[FileTask],
        settings: Settings,
        pool: StagingPool,
        stable: bool,
    ) -> None:
        # The time limit grows with the bytes: a large save may take long, a hanging one must end.
        self._timeout = call_timeout(storage, sum(t.data_bytes for t in tasks)) + _GRACE
        self._helper = running_helper()
        if not self._helper.answers(timeout=self._timeout):
            self._helper = running_helper()  # the first one had died after the last save
        if pool.capacity:
            self._helper.map_pool(pool.fd, pool.capacity, pool.generation, timeout=self._timeout)
        self._helper.follow_environment(timeout=self._timeout)
        self._job = next(_jobs)
        self._request = {
            "job": self._job,
            "url": escape(storage.url),
            "tasks": [msgspec.to_builtins(t) for t in tasks],
            "settings": flat_settings(settings),
            "stable": stable,
        }

    def open(self) -> None:
        self._call("open", **self._request)

    def stop(self, error: CheckpointError) -> None:
        self._helper.stop_job(self._job)

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        return self._helper.call({"op": op, **arguments}, timeout=self._timeout)

    def write(self, chunks: Sequence[StagedChunk]) -> int:
        return int(self._call("write", chunks=chunks)["batch"])

    def wait(self, batch: int) -> None:
        self._call("wait", batch=batch)

    def sums(self) -> list[NDArray[np.uint64]]:
        return [np.frombuffer(s, np.uint64) for s in self._call("sums")["sums"]]

    def finish(self, headers: Sequence[bytes]) -> None:
        self._call("finish", headers=list(headers))

    def abort(self) -> None:
        if self._helper.alive:
            self._call("abort")


class SaveJob:
    """Writes files of one save. Calls: (`write_through` | `stage`, `write_staged`), then `finish`; or `abort`.

    Args:
        image: live tensors and their places.
        tasks: the files, numbered as the image's.
        storage: where they go.
        settings: threads, chunk length, direct I/O.
    """

    def __init__(self, image: Image, tasks: Sequence[FileTask], storage: Storage, settings: Settings) -> None:
        assert len(image.files) == len(tasks)
        self._image = image
        self._tasks = tasks
        self._storage = storage
        self._settings = settings
        self._writer: _StagedWriter | None = None
        self._stopped: CheckpointError | None = None

    def stop(self, error: CheckpointError) -> None:
        """Make all calls in progress and to come fail soon; return at once. `abort` must follow."""
        self._stopped = error
        if (writer := self._writer) is not None:
            writer.stop(error)

    def _open(self, writer: _StagedWriter) -> None:
        """Create the files, unless the job was stopped."""
        self._writer = writer  # first: `stop` may come at any moment
        if self._stopped is not None:
            raise self._stopped
        writer.open()

    @property
    def opened(self) -> bool:
        """Whether the files were created."""
        return self._writer is not None

    def slot_bytes(self) -> int:
        """Return the bytes that `write_through` needs of a pool."""
        longest = max((min(f.nbytes, self._settings.storage.chunk_bytes) for f in self._image.files), default=0)
        return self._settings.storage.write_threads * -(-longest // 4096) * 4096

    def write_through(self, pool: StagingPool) -> list[NDArray[np.uint64]]:
        """Write everything now, from the live tensors.

        Args:
            pool: at least `slot_bytes` large; tensors that cannot be written from their own memory pass through it.

        Returns:
            Block sums of each file.
        """
        settings = self._settings
        writer = FilesWriter(
            self._storage,
            self._tasks,
            direct=settings.storage.direct_io != "off",
            threads=settings.storage.write_threads,
        )
        self._open(_ThreadWriter(writer, pool))
        chunks = chunks_of(self._image.files, settings.storage.chunk_bytes)
        slots: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        size = self.slot_bytes() // settings.storage.write_threads
        for number in range(settings.storage.write_threads if chunks else 0):
            slots.put(pool.tensor()[number * size : (number + 1) * size])
        direct = writer.direct
        # Collected first: later the streaming bytes have pushed this code out of the processor's caches.
        large = {} if direct else self._image.large()

        def write(chunk: Chunk) -> None:
            slot = slots.get()
            try:
                buffers = self._image.fill(chunk, slot, large)
                padded = memoryview(slot.numpy())[: -(-chunk.nbytes // 4096) * 4096] if direct else None
                writer.write(chunk.file, chunk.start, buffers, padded)
            finally:
                slots.put(slot)

        # Not on the writer's threads, whose time limit is the storage's: that would be blamed for a device that hangs.
        self._image.copies.wait_for_caller()
        for chunk in chunks:
            writer.submit(write, chunk)
        return writer.sums()

    def create_files(self, pool: StagingPool, helper: Callable[[], HelperProcess] | None) -> None:
        """Create the files, so that a full or read-only storage shows before anything is staged.

        Args:
            pool: the staging pool that is written from.
            helper: returns the running helper process, which writes; None where threads write.
        """
        settings = self._settings
        # A pool that holds the whole image keeps it until the save ends. A smaller pool is reused for later chunks.
        stable = pool.capacity >= self._image.nbytes
        if helper is not None and self._storage.capabilities.shared:
            self._open(_HelperWriter(helper, self._storage, self._tasks, settings, pool, stable))
        else:
            direct = settings.storage.direct_io != "off"
            threads = settings.storage.write_threads
            writer = FilesWriter(self._storage, self._tasks, direct=direct, threads=threads, stable=stable)
            self._open(_ThreadWriter(writer, pool))

    def stage(self, pool: StagingPool) -> list[StagedChunk]:
        """Copy the image into the pool, which is all that the caller of an asynchronous save waits for.

        When the pool is smaller than the image, chunks pass through its two halves in turn, and the caller waits for
        the storage (back-pressure); `create_files` must then have been called.

        Returns:
            The chunks in the pool that are not written yet, for `write_staged`.
        """
        image, chunk_bytes = self._image, self._settings.storage.chunk_bytes
        chunks = chunks_of(image.files, chunk_bytes)
        if not chunks:
            return []
        if pool.capacity >= image.nbytes:
            image.stage(pool.tensor(), pool.generation)
            return [StagedChunk(c.file, c.start, image.files[c.file].start + c.start, c.nbytes) for c in chunks]
        assert self._writer is not None
        per_half = pool.capacity // chunk_bytes // 2
        assert per_half >= 1, "the pool holds at least two chunks"
        batches: list[int] = []
        batch: list[StagedChunk] = []
        for number, begin in enumerate(range(0, len(chunks), per_half)):
            if number >= 2:
                self._writer.wait(batches[number - 2])
            batch = []
            for place, chunk in enumerate(chunks[begin : begin + per_half]):
                at = (number % 2 * per_half + place) * chunk_bytes
                slot = pool.tensor()[at : at + chunk_bytes]
                image.fill(chunk, slot, {})
                batch.append(StagedChunk(chunk.file, chunk.start, at, chunk.nbytes))
            if begin + per_half < len(chunks):
                batches.append(self._writer.write(batch))
        return batch

    def write_staged(
        self, chunks: list[StagedChunk], meanwhile: Callable[[], None] = lambda: None
    ) -> list[NDArray[np.uint64]]:
        """Write the chunks that `stage` left in the pool; returns the block sums of each file.

        Args:
            chunks: what `stage` returned.
            meanwhile: called while others write.
        """
        assert self._writer is not None
        self._writer.write(chunks)
        meanwhile()
        return self._writer.sums()

    def finish(self, headers: Sequence[bytes]) -> None:
        """Write the headers and make the files durable."""
        assert self._writer is not None
        self._writer.finish(headers)

    def abort(self) -> None:
        """Remove the files that were started; never raises."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
