"""Reading the ranges of a plan, and delivering their bytes to the destination tensors."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from ..errors import StorageUnavailableError
from ..representation.boxes import Int64s
from ..representation.plans import ReadPlan
from .file_set import FileSet
from .staging import copy_all, flat_bytes, movable, views_at
from .workers import Workers

__all__ = ["Delivery", "Landing", "Readers", "Runs", "Target", "read_all", "scratch"]

_T = TypeVar("_T")
_DIRECT_BYTES = 256 << 10
#: Ranges with more copies than this keep the interpreter busy; two threads at it would only take turns at its lock.
_MANY = 64
#: Reads without an answer that nobody waits for any more: they fill the memory of a load that failed when they get one.
_given_up: list[Future[Any]] = []
#: Runs of memory shorter than this are quicker copied together and put in their places then.
_SHORT_RUN = 1 << 10


@dataclass(frozen=True, slots=True)
class Target:
    """Where one wanted box goes.

    Attributes:
        data: destination, shape of the box, any strides, any device.
        dtype: dtype that the checkpoint holds; differs from `data.dtype` only when a cast was asked for.
    """

    data: torch.Tensor
    dtype: torch.dtype

    @property
    def contiguous(self) -> bool:
        """Whether the elements are one run of memory."""
        return self.data.is_contiguous()

    @property
    def addressable(self) -> bool:
        """Whether storage can read straight into the memory."""
        return self.contiguous and self.data.device.type == "cpu" and self.data.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class Runs:
    """Bytes of a file as runs of memory that they go to.

    Attributes:
        source: where each run begins in the file's data section, int64 [n].
        pieces: its address and its length in bytes, int64 [n, 2].
    """

    source: Int64s
    pieces: Int64s


class Delivery:
    """Takes the bytes of a plan's ranges to the destinations.

    Args:
        plan: what to deliver.
        targets: destinations, numbered as the plan's wanted boxes.
    """

    def __init__(self, plan: ReadPlan, targets: Sequence[Target]) -> None:
        self.plan = plan
        self.targets = targets
        self._one_at_a_time = threading.Lock()
        copies = plan.copies
        self._wanted = copies.wanted.tolist()
        self._source = copies.source.tolist()
        self._elements = copies.elements.tolist()
        self._flat = copies.flat.tolist()
        self._target = copies.target.tolist()
        self._first = plan.first_copy.tolist()
        element = np.array([t.dtype.itemsize for t in targets], np.int64)
        nbytes = copies.elements * (element[copies.wanted] if len(targets) else 1)
        addressable = np.array([t.addressable for t in targets], bool)
        good = copies.flat & (addressable[copies.wanted] if len(targets) else copies.flat)
        good[1:] &= copies.source[1:] >= (copies.source + nbytes)[:-1]
        self._nbytes = nbytes.tolist()
        starts = plan.first_copy[:-1]
        if len(starts):
            count = np.diff(plan.first_copy)
            total = np.add.reduceat(nbytes, starts)
            good[starts] |= copies.flat[starts] & addressable[copies.wanted[starts]]
            self._direct = (np.logical_and.reduceat(good, starts) & (total >= count * _DIRECT_BYTES)).tolist()
        else:
            self._direct = []
        # Found before the bytes stream through the processor's caches, and push the code for this out of them.
        straight = np.flatnonzero(self._direct)
        into = {w for r in straight.tolist() for w in self._wanted[self._first[r] : self._first[r + 1]]}
        self._memory = {w: memoryview(flat_bytes(targets[w].data).numpy()) for w in into}

    def direct_buffers(self, index: int) -> list[memoryview] | None:
        """Memory to read range `index` straight into, or None when it must pass through a scratch buffer."""
        if not self._direct[index]:
            return None
        position, stop = int(self.plan.start[index]), int(self.plan.stop[index])
        buffers: list[memoryview] = []
        for copy in range(self._first[index], self._first[index + 1]):
            source, nbytes = self._source[copy], self._nbytes[copy]
            if source > position:
                buffers.append(memoryview(bytearray(source - position)))
            wanted = self._wanted[copy]
            begin = self._target[copy] * self.targets[wanted].dtype.itemsize
            buffers.append(self._memory[wanted][begin : begin + nbytes])
            position = source + nbytes
        if stop > position:
            buffers.append(memoryview(bytearray(stop - position)))
        return buffers

    def runs(self, index: int) -> Runs | None:
        """The memory that range `index` goes to, or None where it must be converted or is in many small pieces."""
        parts: list[tuple[Int64s, Int64s, int]] = []
        total = count = 0
        for copy in range(self._first[index], self._first[index + 1]):
            target = self.targets[self._wanted[copy]]
            data = target.data
            if data.device.type != "cpu" or data.dtype != target.dtype or data.is_conj() or data.is_neg():
                return None
            if self._flat[copy]:
                begin = np.array([self._target[copy]], np.int64)
                source, length = np.zeros(1, np.int64), self._elements[copy]
            else:
                source, begin, length = self._runs_of_box(copy, data)
            size = target.dtype.itemsize
            parts.append((self._source[copy] + source * size, data.data_ptr() + begin * size, length * size))
            total += self._nbytes[copy]
            count += len(source)
            if total < count * _SHORT_RUN:
                return None
        lengths = np.concatenate([np.full(len(source), length, np.int64) for source, _, length in parts])
        addresses = np.concatenate([address for _, address, _ in parts])
        return Runs(np.concatenate([source for source, _, _ in parts]), np.column_stack((addresses, lengths)))

    def _runs_of_box(self, copy: int, target: torch.Tensor) -> tuple[Int64s, Int64s, int]:
        """Runs of elements that are one in the file and in `target`: first ones in both, and their length."""
        copies = self.plan.copies
        lengths = tuple(copies.lengths[copy].tolist()[: target.ndim])
        source, target_at, run = _box_runs(lengths, _row_major(copies.source_shape[copy].tolist()), target.stride())
        offsets = copies.target_offsets[copy].tolist()
        return source, target_at + sum(o * s for o, s in zip(offsets, target.stride(), strict=False)), run

    def scatter(self, index: int, data: torch.Tensor, start: int) -> None:
        """Deliver range `index` out of `data`.

        Args:
            index: number of the range.
            data: uint8, holds the range's bytes (and maybe more); its address is a multiple of 16.
            start: byte offset in the file's data section of the first byte of `data`.
        """
        if self._first[index + 1] - self._first[index] > _MANY:
            with self._one_at_a_time:
                self._scatter(index, data, start)
        else:
            self._scatter(index, data, start)

    def _scatter(self, index: int, data: torch.Tensor, start: int) -> None:
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        whole: list[torch.Tensor] = []
        whole_at: list[int] = []
        for copy in range(self._first[index], self._first[index + 1]):
            target = self.targets[self._wanted[copy]]
            at = self._source[copy] - start
            into = target.data
            same = into.dtype == target.dtype
            if self._flat[copy]:
                count = self._elements[copy]
                if same and count == into.numel():
                    whole.append(movable(into))
                    whole_at.append(at)
                    continue
                source = data[at : at + count * target.dtype.itemsize].view(target.dtype)
                begin = self._target[copy]
                into = into.view(-1)[begin : begin + count]
            else:
                source, into = self._box(copy, data, at, target)
            if same:
                source, into = movable(source), movable(into)
            sources.append(source)
            targets.append(into)
        if whole:
            # Small tensors that follow each other in the file become views in one call.
            sources += views_at(data, whole, whole_at)
            targets += whole
        copy_all(targets, sources)

    def _box(self, copy: int, data: torch.Tensor, at: int, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
        copies = self.plan.copies
        ndim = target.data.ndim
        shape = copies.source_shape[copy].tolist()
        lengths = copies.lengths[copy].tolist()[:ndim]
        strides = _row_major(shape)
        size = target.dtype.itemsize
        # The view may reach past the bytes that are there: only elements that the copy names are touched.
        typed = data[at % size : data.numel() - (data.numel() - at % size) % size].view(target.dtype)
        source = typed.as_strided(lengths, strides[:ndim], typed.storage_offset() + at // size)
        into = target.data
        for dim, (begin, length) in enumerate(zip(copies.target_offsets[copy].tolist(), lengths, strict=False)):
            into = into.narrow(dim, begin, length)
        return source, into


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


@functools.lru_cache(maxsize=64)  # the ranges of a tensor, and the layers of a model, look alike
def _box_runs(
    lengths: tuple[int, ...], strides: tuple[int, ...], target_strides: tuple[int, ...]
) -> tuple[Int64s, Int64s, int]:
    """Runs of elements of a box that are one run in two places.

    Args:
        lengths: of the box.
        strides: of its elements in one place; may have more dimensions.
        target_strides: in the other place.

    Returns:
        The first element of each run in both places, counted from the box's first; their length.
    """
    run, dims = 1, len(lengths)
    while dims and (lengths[dims - 1] == 1 or strides[dims - 1] == target_strides[dims - 1] == run):
        dims -= 1
        run *= lengths[dims]
    source = target = np.zeros(1, np.int64)
    for length, step, target_step in zip(lengths[:dims], strides, target_strides, strict=False):
        numbers = np.arange(length, dtype=np.int64)
        source = np.add.outer(source, numbers * step).reshape(-1)
        target = np.add.outer(target, numbers * target_step).reshape(-1)
    return source, target, run


def scratch(nbytes: int, accelerator: bool) -> torch.Tensor:
    """A buffer for one range: pinned where bytes go on to an accelerator; aligned to 4096 bytes."""
    if accelerator:
        buffer = torch.empty(nbytes + 4096, dtype=torch.uint8, pin_memory=True)
    else:
        # numpy asks for huge pages, whose first touch costs a third.
        buffer = torch.from_numpy(np.empty(nbytes + 4096, np.uint8))
    shift = -buffer.data_ptr() % 4096
    return buffer[shift : shift + nbytes]


class Landing:
    """Where bytes stand on their way to destinations that storage cannot read into; one for all threads.

    Attributes:
        accelerator: whether some destination is on one: buffers are then pinned, and each thread has a stream.
    """

    def __init__(self, delivery: Delivery, chunk_bytes: int) -> None:
        self._delivery = delivery
        self._chunk_bytes = chunk_bytes
        self._local = threading.local()
        self._device = next((t.data.device for t in delivery.targets if t.data.device.type != "cpu"), None)
        self.accelerator = self._device is not None

    def buffer(self, nbytes: int) -> torch.Tensor:
        """This thread's buffer, at most `chunk_bytes` of it; its content is lost at the next call."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = scratch(self._chunk_bytes, self.accelerator)
        found: torch.Tensor = self._local.scratch[:nbytes]
        return found

    def deliver(self, index: int, data: torch.Tensor, start: int) -> None:
        """`Delivery.scatter`; returns when the bytes have arrived."""
        if not self.accelerator:
            self._delivery.scatter(index, data, start)
            return
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.Stream(self._device)
        with self._local.stream:
            self._delivery.scatter(index, data, start)
        self._local.stream.synchronize()


class Readers:
    """Threads that read into memory. Use as a context manager: behind it nobody writes there any more, or it is remembered.

    Args:
        files: what is read.
        threads: how many.

    Raises:
        StorageUnavailableError: a read of an earlier load has no answer yet.
    """

    def __init__(self, files: FileSet, threads: int) -> None:
        self._files = files
        self._futures: list[Future[Any]] = []
        self._hangs = False
        for future in list(_given_up):
            if not wait([future], files.limit()).done:
                raise StorageUnavailableError(
                    "a read of an earlier load has had no answer yet, and may still fill memory that this load fills; "
                    "restart the process"
                )
            with contextlib.suppress(ValueError):  # another thread was here
                _given_up.remove(future)
        self._workers = Workers(threads, "bytecheckpoint-read")

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        # One that hangs has been waited for; the others end with what they are at.
        if not self._workers.shutdown(cancel=True, seconds=0.0 if self._hangs else self._files.limit()):
            _given_up.extend(future for future in self._futures if not future.done())

    def submit(self, function: Callable[..., _T], *args: object) -> Future[_T]:
        """Run `function(*args)`, which calls `FileSet.fetch`, on a thread."""
        future: Future[_T] = self._workers.submit(function, *args)
        self._futures.append(future)
        return future

    def result(self, future: Future[_T]) -> _T:
        """What it came to.

        Raises:
            StorageUnavailableError: the file system does not answer.
        """
        seconds = self._files.limit()
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():  # it is the future's own
                raise
            self._hangs = True
            raise StorageUnavailableError(
                f"cannot read {self._files.url}: no answer within {round(seconds, 1):g} s; check the device or mount"
            ) from None


os.register_at_fork(after_in_child=_given_up.clear)  # the memory that they fill is the parent's


def read_all(files: FileSet, delivery: Delivery, ranges: Sequence[int], *, threads: int, chunk_bytes: int) -> int:
    """Read, verify and deliver some ranges of a plan.

    Args:
        files: the checkpoint's files.
        delivery: where the bytes go.
        ranges: numbers of the ranges.
        threads: ranges in flight at the same time; 0: as many as suit the files.
        chunk_bytes: longest range.

    Returns:
        Bytes read.

    Raises:
        CorruptCheckpointError: as `FileSet.fetch`. Destinations may then hold some of the new bytes.
        StorageUnavailableError: no answer, now or to the reads of an earlier load, which might still write into memory
            that this one fills.
    """
    plan = delivery.plan
    landing = Landing(delivery, chunk_bytes)
    stopped = threading.Event()

    def one(index: int) -> int:
        if stopped.is_set():
            return 0
        start, stop, file = int(plan.start[index]), int(plan.stop[index]), int(plan.file[index])
        try:
            buffers = delivery.direct_buffers(index)
            if buffers is not None:
                files.fetch(file, start, stop, buffers)
                return stop - start
            data = landing.buffer(stop - start)
            files.fetch(file, start, stop, [memoryview(data.numpy())])
            landing.deliver(index, data, start)
        except BaseException:
            stopped.set()
            raise
        return stop - start

    if len(ranges) == 1 and files.in_memory:
        return one(ranges[0])
    with Readers(files, min(files.threads(threads), len(ranges))) as readers:
        return sum(map(readers.result, [readers.submit(one, i) for i in ranges]))
