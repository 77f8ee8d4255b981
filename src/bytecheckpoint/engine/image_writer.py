"""Write an image to storage files: from a staging pool, through a small pool, or from the live tensors."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from bytecheckpoint.engine.helper import HelperProcess
from bytecheckpoint.engine.pieces import SharedCopy
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.engine.staging import Chunk, Image, ImageFile, chunks_of
from bytecheckpoint.engine.writing import FilesWriter, FileTask, StagedChunk, WrittenSums
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.failures import Cancellation
from bytecheckpoint.representation.names import escape
from bytecheckpoint.settings import Settings, flat_settings
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.base import call_timeout

__all__ = ["HelperWriter", "ImageWriter", "WriteJob", "chunk_slots", "slot_bytes", "stage_image", "stream_image"]

#: Numbers of the jobs of helper processes.
_jobs = itertools.count(1)
#: Seconds that the helper gets beyond its own time limits, whose errors name the file.
_GRACE = 5.0


class ImageWriter(Protocol):
    """Writes files from a staging pool: threads of this process (`FilesWriter`), or the helper process."""

    def open(self) -> None:
        """Create the files."""

    def write_staged(self, chunks: Sequence[StagedChunk]) -> int:
        """Start to write chunks; return the number of the batch, for `wait`."""

    def wait(self, batch: int) -> None:
        """Wait until a batch is written."""

    def sums(self) -> list[WrittenSums]:
        """Wait for all chunks, and return the sums of each file."""

    def finish(self, headers: Sequence[bytes]) -> None:
        """Write the headers and make the files durable."""

    def abort(self) -> None:
        """Stop, and remove the files that are not finished; never raise."""


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Files to write, and how to write them.

    Attributes:
        tasks: files, numbered as those of the image.
        storage: storage that receives them.
        settings: settings of the save: threads, chunk length, direct I/O.
        cancel: token of the save.
    """

    tasks: Sequence[FileTask]
    storage: Storage
    settings: Settings
    cancel: Cancellation

    def on_threads(self, pool: StagingPool | None = None, *, stable: bool = False) -> FilesWriter:
        """Return a writer on threads of this process.

        Args:
            pool: staging pool that holds the chunks; None for chunks of other memory.
            stable: True if the pool holds the whole image until the save ends.
        """
        return FilesWriter(
            self.storage,
            self.tasks,
            direct=self.settings.storage.direct_io != "off",
            threads=self.settings.storage.write_threads,
            stable=stable,
            pool=None if pool is None else pool.view(),
            cancel=self.cancel,
        )


class HelperWriter:
    """Writes files by the helper process.

    Args:
        job: files to write.
        running_helper: function that returns the helper process, started if it does not run.
        pool: staging pool, which the helper maps.
        stable: True if the pool holds the whole image until the save ends.
    """

    def __init__(
        self, job: WriteJob, running_helper: Callable[[], HelperProcess], pool: StagingPool, *, stable: bool
    ) -> None:
        # The time limit grows with the bytes: a large save may take long, a hanging one must end.
        self._timeout = call_timeout(job.storage, sum(t.data_bytes for t in job.tasks)) + _GRACE
        self._helper = running_helper()
        if not self._helper.answers(timeout=self._timeout):
            self._helper = running_helper()  # the first one had died after the last save
        if pool.capacity:
            self._helper.map_pool(pool.fd, pool.capacity, pool.generation, timeout=self._timeout)
        self._helper.follow(timeout=self._timeout)
        self._cancel = job.cancel
        self._number = next(_jobs)
        self._request = {
            "job": self._number,
            "url": escape(job.storage.url),
            "tasks": [msgspec.to_builtins(t) for t in job.tasks],
            "settings": flat_settings(job.settings),
            "stable": stable,
        }

    def open(self) -> None:
        """Create the files."""
        self._cancel.on_set(lambda _: self._helper.stop_job(self._number))
        self._cancel.raise_if_set()
        self._call("open", **self._request)

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        return self._helper.call({"op": op, **arguments}, timeout=self._timeout, cancel=self._cancel)

    def write_staged(self, chunks: Sequence[StagedChunk]) -> int:
        """Start to write chunks; return the number of the batch, for `wait`."""
        return int(self._call("write", chunks=chunks)["batch"])

    def wait(self, batch: int) -> None:
        """Wait until a batch is written."""
        self._call("wait", batch=batch)

    def sums(self) -> list[WrittenSums]:
        """Wait for all chunks, and return the sums of each file."""
        found = ((np.frombuffer(data, np.uint64) for data in file) for file in self._call("sums")["sums"])
        return [WrittenSums(blocks, boxes.reshape(-1, 2)) for blocks, boxes in found]

    def finish(self, headers: Sequence[bytes]) -> None:
        """Write the headers and make the files durable."""
        self._call("finish", headers=list(headers))

    def abort(self) -> None:
        """Remove the files that are not finished; never raise. A helper that does not answer is ended."""
        if self._helper.alive:
            with contextlib.suppress(CheckpointError):
                self._call("abort")


def stage_image(
    image: Image,
    pool: StagingPool,
    chunk_bytes: int,
    writer: ImageWriter | None = None,
    shared: SharedCopy | None = None,
    files: slice = slice(None),
) -> list[StagedChunk]:
    """Copy an image into a pool, which is all that the caller of an asynchronous save waits for.

    Args:
        image: live tensors and their places.
        pool: reserved staging pool. If it is smaller than the image, chunks pass through its two halves in turn, and the
            caller waits for the storage (back-pressure).
        chunk_bytes: length of a chunk.
        writer: open writer of the files, for a pool that is smaller than the image.
        shared: copy in which other threads take part, if the pool holds the image; None if the caller waits.
        files: files whose tensors are copied now, if the pool holds the image.

    Returns:
        The chunks of all files in the pool that are not written yet.
    """
    chunks = chunks_of(image.files, chunk_bytes)
    if not chunks:
        return []
    if pool.capacity >= image.nbytes:
        image.stage(pool.tensor(), pool.generation, shared, files)
        return [StagedChunk(c.file, c.start, image.files[c.file].start + c.start, c.nbytes) for c in chunks]
    assert writer is not None
    per_half = pool.capacity // chunk_bytes // 2
    assert per_half >= 1, "the pool holds at least two chunks"
    batches: list[int] = []
    batch: list[StagedChunk] = []
    for number, begin in enumerate(range(0, len(chunks), per_half)):
        if number >= 2:
            writer.wait(batches[number - 2])
        batch = []
        for place, chunk in enumerate(chunks[begin : begin + per_half]):
            at = (number % 2 * per_half + place) * chunk_bytes
            slot = pool.tensor()[at : at + chunk_bytes]
            image.fill(chunk, slot, {})
            batch.append(StagedChunk(chunk.file, chunk.start, at, chunk.nbytes))
        if begin + per_half < len(chunks):
            batches.append(writer.write_staged(batch))
    return batch


def slot_bytes(files: Sequence[ImageFile], settings: Settings) -> int:
    """Return the bytes of a pool that `stream_image` needs: one chunk for each thread."""
    longest = max((min(f.nbytes, settings.storage.chunk_bytes) for f in files), default=0)
    return settings.storage.write_threads * -(-longest // 4096) * 4096


def chunk_slots(pool: StagingPool, nbytes: int, count: int) -> queue.SimpleQueue[torch.Tensor]:
    """Divide the first `nbytes` of a pool into slots for chunks, of one length."""
    slots: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    size = nbytes // count
    for number in range(count if nbytes else 0):
        slots.put(pool.tensor()[number * size : (number + 1) * size])
    return slots


def stream_image(
    image: Image, pool: StagingPool, writer: FilesWriter, settings: Settings, *, still: bool
) -> list[WrittenSums]:
    """Write an image from the live tensors, chunk by chunk.

    Args:
        image: live tensors and their places.
        pool: staging pool of at least `slot_bytes`. Tensors that cannot be written from their own memory pass through it.
        writer: open writer of the files.
        settings: settings of the save.
        still: True if nobody changes the tensors meanwhile. Else a chunk passes through the pool, so that what is written
            is what was hashed.

    Returns:
        Sums of each file.
    """
    chunks = chunks_of(image.files, settings.storage.chunk_bytes)
    slots = chunk_slots(pool, slot_bytes(image.files, settings), settings.storage.write_threads)
    direct = writer.direct
    # Collected first: later the streaming bytes have pushed this code out of the processor's caches.
    large = image.large() if still and not direct else {}

    def write(chunk: Chunk) -> None:
        slot = slots.get()
        try:
            buffers = image.fill(chunk, slot, large)
            padded = memoryview(slot.numpy())[: -(-chunk.nbytes // 4096) * 4096] if direct else None
            writer.write(chunk.file, chunk.start, buffers, padded)
        finally:
            slots.put(slot)

    # Not on the writer's threads, whose time limit is the storage's: that would be blamed for a device that hangs.
    image.copies.wait_for_caller()
    for chunk in chunks:
        writer.submit(write, chunk)
    return writer.sums()
