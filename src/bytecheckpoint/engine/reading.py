"""Read the ranges of a plan from storage, on threads, into the destination tensors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch

from bytecheckpoint.concurrency import Workers, storage_result
from bytecheckpoint.engine.device_copies import DeviceCopies
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.pinning import host_buffer
from bytecheckpoint.engine.scatter import ScatterPlan
from bytecheckpoint.errors import StorageUnavailableError
from bytecheckpoint.tracing.operation import count
from bytecheckpoint.tuning import tuning

__all__ = ["Readers", "ScratchBuffers", "read_all"]

_T = TypeVar("_T")
#: Reads of failed loads that had no answer when the load ended. A late answer writes to the memory of that load.
_unanswered: list[Future[Any]] = []


class ScratchBuffers:
    """A buffer per thread, for ranges that storage cannot read into their destinations.

    Construct it in the caller's thread: copies to devices start after the work that its streams have now.

    Args:
        plan: read plan with its destinations.
        nbytes: length of the longest range.
    """

    def __init__(self, plan: ScatterPlan, nbytes: int) -> None:
        self._plan = plan
        self._nbytes = nbytes
        self._local = threading.local()
        self._copies = DeviceCopies({t.data.device for t in plan.targets}, to_host=False)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of this thread's buffer, at most those of the longest range. The next call overwrites them."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = self.new_buffer()
        buffer: torch.Tensor = self._local.scratch[:nbytes]
        return buffer

    def new_buffer(self) -> torch.Tensor:
        """Allocate a buffer for the longest range, pinned if some destination is on a device."""
        return host_buffer(self._nbytes, self._copies.devices)

    def within_reach(self, data: torch.Tensor) -> torch.Tensor:
        """Return `data` in memory from which `scatter` can copy: on the host, or on a device of some destination."""
        return data if data.is_cpu or data.device in self._copies.devices else data.cpu()

    def scatter(self, index: int, data: torch.Tensor, start: int) -> None:
        """Copy range `index` from `data` to its destinations, as `ScatterPlan.scatter`, and wait for its devices."""
        with self._copies.queued():
            self._plan.scatter(index, data, start)


class Readers:
    """Threads that read storage files into memory. Use as a context manager.

    After the block no thread writes to the memory any more. Reads without an answer are exceptions: later loads wait
    for them first.

    Args:
        files: storage files of the checkpoint.
        threads: number of threads.

    Raises:
        StorageUnavailableError: a read of an earlier load has no answer yet.
    """

    def __init__(self, files: FileSet, threads: int) -> None:
        self._files = files
        self._futures: list[Future[Any]] = []
        self._timed_out = False
        for future in list(_unanswered):
            if not wait([future], files.read_timeout()).done:
                raise StorageUnavailableError(
                    "a read of an earlier load has had no answer yet, and may still fill memory that this load fills; "
                    "restart the process"
                )
            with contextlib.suppress(ValueError):  # another thread has removed it
                _unanswered.remove(future)
        self._workers = Workers(threads, "bytecheckpoint-read")

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        # After a time-out there is no time left to wait; each thread ends after its present read.
        seconds = 0.0 if self._timed_out else self._files.read_timeout()
        if self._files.stopped.done():
            seconds = min(seconds, tuning().stopped_calls)
        if not self._workers.shutdown(cancel=True, seconds=seconds):
            _unanswered.extend(future for future in self._futures if not future.done())

    def submit(self, function: Callable[..., _T], *args: object) -> Future[_T]:
        """Run `function(*args)`, which calls `FileSet.fetch`, on a thread."""
        future: Future[_T] = self._workers.submit(function, *args)
        self._futures.append(future)
        return future

    def result(self, future: Future[_T]) -> _T:
        """Wait for a future of `submit` and return its result.

        Raises:
            StorageUnavailableError: the file system does not answer.
            CheckpointError: the exception of `FileSet.stopped`.
        """
        files = self._files
        try:
            return storage_result(future, files.read_timeout(), f"read {files.url}", stopped=files.stopped)
        except StorageUnavailableError:
            self._timed_out = self._timed_out or not future.done()
            raise


os.register_at_fork(after_in_child=_unanswered.clear)  # they write to the parent's memory


def read_all(
    files: FileSet, scatter_plan: ScatterPlan, ranges: Sequence[int], *, threads: int, chunk_bytes: int
) -> int:
    """Read and verify some ranges of a plan, and copy them to their destinations.

    Args:
        files: storage files of the checkpoint.
        scatter_plan: read plan with its destinations.
        ranges: numbers of the ranges in the plan.
        threads: number of ranges read at the same time; 0: as many as suit the storage.
        chunk_bytes: length of a chunk.

    Returns:
        The number of bytes read.

    Raises:
        CorruptCheckpointError: as `FileSet.fetch`. Destinations may then hold some of the new bytes.
        StorageUnavailableError: a read got no answer in time, or a read of an earlier load has none yet and might
            still write to memory that this load fills.
    """
    plan = scatter_plan.plan
    scratch = ScratchBuffers(scatter_plan, max(chunk_bytes, plan.longest))
    failed = threading.Event()

    def read_range(index: int) -> int:
        if failed.is_set():
            return 0
        start, stop, file = int(plan.start[index]), int(plan.stop[index]), int(plan.file[index])
        try:
            buffers = scatter_plan.direct_buffers(index)
            if buffers is not None:
                files.fetch(file, start, stop, buffers)
                return stop - start
            data = scratch.buffer(stop - start)
            files.fetch(file, start, stop, [memoryview(data.numpy())])
            scratch.scatter(index, data, start)
        except BaseException:
            failed.set()
            raise
        return stop - start

    count("queued chunks", len(ranges))
    if len(ranges) == 1 and files.in_memory:
        return read_range(ranges[0])
    with Readers(files, min(files.threads(threads), len(ranges))) as readers:
        return sum(map(readers.result, [readers.submit(read_range, i) for i in ranges]))
