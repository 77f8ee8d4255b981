"""Copy the bytes of a read plan's ranges to the destination tensors."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from bytecheckpoint.engine.peer_memory import read_peer_memory
from bytecheckpoint.engine.runs import elements_of, move_runs
from bytecheckpoint.engine.tensor_bytes import (
    copy_all,
    flat_bytes,
    movable,
    transpose,
    views_at,
)
from bytecheckpoint.representation.boxes import Int64s, Mask
from bytecheckpoint.representation.plans import Copies, ReadPlan
from bytecheckpoint.tuning import tuning

__all__ = ["BoxTarget", "MemoryRuns", "ScatterPlan"]

#: Ranges whose copies are shorter than this on average are quicker read into one buffer and copied from there.
_DIRECT_BYTES = 256 << 10
#: Ranges with more copies than this keep the interpreter busy; two threads would only take turns at its lock.
_MANY_COPIES = 64
#: Copies of fewer bytes go to the kernel by the thousand: the views of source and target take longer than the bytes.
_SHORT_BYTES = 64 << 10


class BoxTarget(msgspec.Struct, frozen=True):
    """The destination of one wanted box.

    Attributes:
        data: tensor to fill, shape of the box, any strides, any device.
        dtype: dtype in the checkpoint; differs from `data.dtype` only when the caller asked for a cast.
        pairs: True if a byte of the checkpoint holds two elements of 4 bits (e2m1), which the last dimension of `data` is
            for, and which the box of the plan lacks.
    """

    data: torch.Tensor
    dtype: torch.dtype
    pairs: bool = False

    @property
    def contiguous(self) -> bool:
        """True if the elements are contiguous in memory."""
        return not self.pairs and self.data.is_contiguous()

    @property
    def address(self) -> int:
        """Address of the elements if bytes of the checkpoint can be read straight into them, else 0."""
        data = self.data
        return data.data_ptr() if self.contiguous and data.is_cpu and data.dtype == self.dtype else 0


@dataclass(frozen=True, slots=True)
class MemoryRuns:
    """The destination of a range as runs that are contiguous both in the file and in memory.

    Attributes:
        source: first byte of each run in the file's data section, int64 [n].
        segments: address and length in bytes of each run, int64 [n, 2].
    """

    source: Int64s
    segments: Int64s


class ScatterPlan:
    """Copies the bytes of a read plan's ranges to their destinations.

    Args:
        plan: ranges with their copies.
        targets: destinations, numbered as the plan's wanted boxes.
    """

    def __init__(self, plan: ReadPlan, targets: Sequence[BoxTarget]) -> None:
        self.plan = plan
        self.targets = targets
        self._many_copies_lock = threading.Lock()
        element = np.array([t.dtype.itemsize for t in targets], np.int64)
        nbytes = plan.copies.elements * element[plan.copies.wanted]
        self._copies = _CopyLists.of(plan.copies, nbytes)
        self._first = plan.first_copy.tolist()
        address = np.array([t.address for t in targets], np.int64)[plan.copies.wanted]
        direct = _direct_ranges(plan, address > 0, nbytes)
        self._direct = direct.tolist()
        # Computed now, since later the loaded bytes push the code for this out of the processor's caches.
        ranges = np.flatnonzero(direct).tolist()
        wanted = {w for r in ranges for w in self._copies.wanted[self._first[r] : self._first[r + 1]]}
        self._memory = {w: memoryview(flat_bytes(targets[w].data).numpy()) for w in wanted}
        short = plan.copies.flat & (address > 0) & (nbytes < _SHORT_BYTES)
        begins = address + plan.copies.target * element[plan.copies.wanted]
        # Memory of the short copies; no bytes for the others.
        self._segments = np.where(short[:, None], np.column_stack((begins, nbytes)), 0)

    def direct_buffers(self, index: int) -> list[memoryview] | None:
        """Return memory to read range `index` into, or None when the range must pass through a scratch buffer."""
        if not self._direct[index]:
            return None
        position, stop = int(self.plan.start[index]), int(self.plan.stop[index])
        buffers: list[memoryview] = []
        for copy in range(self._first[index], self._first[index + 1]):
            source, nbytes = self._copies.source[copy], self._copies.nbytes[copy]
            if source > position:
                buffers.append(memoryview(bytearray(source - position)))
            wanted = self._copies.wanted[copy]
            begin = self._copies.target[copy] * self.targets[wanted].dtype.itemsize
            buffers.append(self._memory[wanted][begin : begin + nbytes])
            position = source + nbytes
        if stop > position:
            buffers.append(memoryview(bytearray(stop - position)))
        return buffers

    def runs(self, index: int) -> MemoryRuns | None:
        """Return the destination of range `index`, or None where it needs a cast or consists of many short runs."""
        parts: list[tuple[Int64s, Int64s, int]] = []
        total = count = 0
        for copy in range(self._first[index], self._first[index + 1]):
            target = self.targets[self._copies.wanted[copy]]
            data = target.data
            if data.device.type != "cpu" or data.dtype != target.dtype or data.is_conj() or data.is_neg():
                return None
            total += self._copies.nbytes[copy]
            count += 1 if self._copies.flat[copy] else self._count_runs(copy, data)
            if total < count * tuning().scatter_run_bytes:
                return None
            if self._copies.flat[copy]:
                begin = np.array([self._copies.target[copy]], np.int64)
                source, length = np.zeros(1, np.int64), self._copies.elements[copy]
            else:
                source, begin, length = self._runs_of_box(copy, data)
            size = target.dtype.itemsize
            parts.append((self._copies.source[copy] + source * size, data.data_ptr() + begin * size, length * size))
        lengths = np.concatenate([np.full(len(source), length, np.int64) for source, _, length in parts])
        addresses = np.concatenate([address for _, address, _ in parts])
        return MemoryRuns(np.concatenate([source for source, _, _ in parts]), np.column_stack((addresses, lengths)))

    def _count_runs(self, copy: int, target: torch.Tensor) -> int:
        """Return how many runs a box consists of that are contiguous in the file and in `target`."""
        copies = self.plan.copies
        lengths = copies.lengths[copy].tolist()[: target.ndim]
        _, run = _last_run(lengths, copies.source_strides[copy].tolist(), target.stride())
        elements: int = math.prod(lengths)
        return elements // max(run, 1)

    def _runs_of_box(self, copy: int, target: torch.Tensor) -> tuple[Int64s, Int64s, int]:
        """Return runs of elements that are contiguous in the file and in `target`: first elements in both, length."""
        copies = self.plan.copies
        lengths = tuple(copies.lengths[copy].tolist()[: target.ndim])
        source, target_at, run = _box_runs(lengths, tuple(copies.source_strides[copy].tolist()), target.stride())
        offsets = copies.target_offsets[copy].tolist()
        return source, target_at + sum(o * s for o, s in zip(offsets, target.stride(), strict=False)), run

    def scatter(self, index: int, data: torch.Tensor, start: int) -> None:
        """Copy range `index` from `data` to its destinations. Copies to devices are only queued.

        Args:
            index: number of the range.
            data: uint8, holds the range's bytes and maybe more; its address is a multiple of 16.
            start: byte offset in the file's data section of the first byte of `data`.
        """
        if self._first[index + 1] - self._first[index] > _MANY_COPIES:
            with self._many_copies_lock:
                self._scatter(index, data, start)
        else:
            self._scatter(index, data, start)

    def _scatter(self, index: int, data: torch.Tensor, start: int) -> None:
        """Pair the source and target views of all copies of a range, then copy them by one call."""
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        whole: list[torch.Tensor] = []
        whole_at: list[int] = []
        copies = self._copies
        first, end = self._first[index], self._first[index + 1]
        rest: Sequence[int] = range(first, end)
        if len(rest) > _MANY_COPIES:
            rest = self._without_short(self._without_runs(first, end, data, start), data, start)
        for copy in rest:
            target = self.targets[copies.wanted[copy]]
            at = copies.source[copy] - start
            destination = target.data
            same = destination.dtype == target.dtype
            if copies.flat[copy]:
                count = copies.elements[copy]
                size = target.dtype.itemsize
                if same and count == destination.numel() and at % size == 0:
                    whole.append(movable(destination))
                    whole_at.append(at)
                    continue
                begin = copies.target[copy]
                destination = destination.view(-1)[begin : begin + count]
                if same and at % size:
                    sources.append(data[at : at + count * size])
                    targets.append(flat_bytes(destination))
                    continue
                source = _typed(data, at, count, target.dtype)
            else:
                left = transpose(*self._box(copy, data, at, target))
                if left is None:
                    continue
                source, destination = left
            if same:
                source, destination = movable(source), movable(destination)
            elif target.pairs or (source.dtype in _BYTE_FLOATS and source.numel() > _FEW):
                _look_up(source, destination)
                continue
            sources.append(source)
            targets.append(destination)
        if whole:
            # One call makes the views of all small tensors that follow each other in the file.
            sources += views_at(data, whole, whole_at)
            targets += whole
        copy_all(targets, sources)

    def _without_short(self, copies: Int64s, data: torch.Tensor, start: int) -> Sequence[int]:
        """Copy the short ones of some copies, a thousand by one call of the kernel; return the other copies."""
        segments = self._segments[copies]
        short = segments[:, 1] > 0
        begins = self.plan.copies.source[copies[short]] - start + data.data_ptr()
        try:
            read_peer_memory(os.getpid(), np.column_stack((begins, segments[short, 1])), segments[short])
        except OSError:  # a container may forbid the call, even for memory of the same process
            short[:] = False
        others: list[int] = copies[~short].tolist()
        return others

    def _without_runs(self, first: int, end: int, data: torch.Tensor, start: int) -> Int64s:
        """Copy those of copies `first` to `end` that fill a target in many short runs; return the other copies."""
        columns = self.plan.copies
        wanted, flat = columns.wanted[first:end], columns.flat[first:end]
        numbers, counts = np.unique(wanted[flat], return_counts=True)
        rest = np.ones(end - first, bool)
        for number in numbers[counts > _MANY_COPIES].tolist():
            target = self.targets[number]
            size = target.dtype.itemsize
            chosen = np.flatnonzero(flat & (wanted == number))
            source = columns.source[first:end][chosen] - start
            if target.data.dtype != target.dtype or (source % size).any():
                continue
            rest[chosen] = False
            destination = movable(target.data).view(-1)
            move_runs(
                elements_of(destination) if destination.is_cpu else destination,
                columns.target[first:end][chosen],
                elements_of(data[: data.numel() // size * size].view(target.dtype)),
                source // size,
                columns.elements[first:end][chosen],
            )
        others: Int64s = first + np.flatnonzero(rest)
        return others

    def _box(self, copy: int, data: torch.Tensor, at: int, target: BoxTarget) -> tuple[torch.Tensor, torch.Tensor]:
        """Return strided views of the source, which begins at byte `at` of `data`, and of the target of a box."""
        copies = self.plan.copies
        ndim = target.data.ndim - target.pairs
        strides = copies.source_strides[copy].tolist()[:ndim]
        lengths = copies.lengths[copy].tolist()[:ndim]
        span = sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True)) + 1
        source = _typed(data, at, span, target.dtype).as_strided(lengths, strides)
        destination = target.data
        for dim, (begin, length) in enumerate(zip(copies.target_offsets[copy].tolist(), lengths, strict=False)):
            destination = destination.narrow(dim, begin, length)
        return source, destination


@dataclass(frozen=True, slots=True)
class _CopyLists:
    """The columns of `Copies` that are read one element at a time, as lists: that takes a fraction of the time."""

    wanted: list[int]
    source: list[int]
    elements: list[int]
    nbytes: list[int]
    flat: list[bool]
    target: list[int]

    @staticmethod
    def of(copies: Copies, nbytes: Int64s) -> _CopyLists:
        columns = (copies.wanted, copies.source, copies.elements, nbytes, copies.flat, copies.target)
        return _CopyLists(*(column.tolist() for column in columns))


def _direct_ranges(plan: ReadPlan, addressable: Mask, nbytes: Int64s) -> Mask:
    """Return whether storage reads each range straight into its destinations.

    Args:
        plan: ranges with their copies.
        addressable: flag of each copy, True if storage can read into its target.
        nbytes: length of each copy.
    """
    copies, first = plan.copies, plan.first_copy[:-1]
    if not len(first):
        return np.zeros(0, bool)
    overlaps_previous = np.zeros(len(nbytes), bool)
    overlaps_previous[1:] = copies.source[1:] < (copies.source + nbytes)[:-1]
    overlaps_previous[first] = False
    direct = np.logical_and.reduceat(copies.flat & addressable & ~overlaps_previous, first)
    long = np.add.reduceat(nbytes, first) >= np.diff(plan.first_copy) * _DIRECT_BYTES
    return direct & long


def _typed(data: torch.Tensor, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """View `count` elements from byte `at` of `data`; copy them where they do not lie at a multiple of their size."""
    found = data[at : at + count * dtype.itemsize]
    return (found.clone() if at % dtype.itemsize else found).view(dtype)


#: The values of 4 bits: a sign, two bits of an exponent, one of a fraction (Open Compute's Microscaling Formats 1.0, e2m1).
_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
_BYTE_FLOATS = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
#: Elements that are looked up at a time. Fewer of them are converted by torch, which takes four times as long.
_LOOKED_UP = 1 << 17
_FEW = 1 << 12


@functools.cache
def _table(stored: torch.dtype, wanted: torch.dtype) -> NDArray[np.generic]:
    """Return the value of each byte of a dtype, uint8 for two elements of 4 bits, as integers of the width of the value."""
    if stored == torch.uint8:
        values = torch.tensor([[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)], dtype=torch.bfloat16)
        return elements_of(values.view(torch.int32))
    return elements_of(torch.arange(256, dtype=torch.uint8).view(stored).to(wanted))


def _look_up(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Convert floats of one byte, or pairs of floats in a byte, which have one more dimension in the destination."""
    pairs = destination.ndim > source.ndim
    table = _table(source.dtype, destination.dtype)
    dim = next((k for k, length in enumerate(source.shape) if length > 1), 0)
    if not source.ndim:
        source, destination = source[None], destination[None]
    step = max(_LOOKED_UP * source.shape[dim] // max(source.numel(), 1), 1)
    with torch.no_grad():
        for begin in range(0, source.shape[dim], step):
            length = min(step, source.shape[dim] - begin)
            piece = source.narrow(dim, begin, length)
            found = torch.from_numpy(np.take(table, piece.view(torch.uint8).numpy(), mode="clip"))
            found = found.view(torch.bfloat16).view(*piece.shape, 2) if pairs else found.view(destination.dtype)
            destination.narrow(dim, begin, length).copy_(found)


def _last_run(lengths: Sequence[int], strides: Sequence[int], target_strides: Sequence[int]) -> tuple[int, int]:
    """Return the number of dimensions along which a box consists of runs, and the elements of a run."""
    run, dims = 1, len(lengths)
    while dims and (lengths[dims - 1] == 1 or strides[dims - 1] == target_strides[dims - 1] == run):
        dims -= 1
        run *= lengths[dims]
    return dims, run


@functools.lru_cache(maxsize=64)  # ranges of one tensor, and layers of a model, have equal shapes
def _box_runs(
    lengths: tuple[int, ...], strides: tuple[int, ...], target_strides: tuple[int, ...]
) -> tuple[Int64s, Int64s, int]:
    """Cut a box into runs of elements that are contiguous in both source and target.

    Args:
        lengths: extent of the box.
        strides: strides of the source; may have more dimensions than the box.
        target_strides: strides of the target.

    Returns:
        The first element of each run in the source and in the target, relative to the box's first; the runs' length.
    """
    dims, run = _last_run(lengths, strides, target_strides)
    source = target = np.zeros(1, np.int64)
    for length, step, target_step in zip(lengths[:dims], strides, target_strides, strict=False):
        numbers = np.arange(length, dtype=np.int64)
        source = np.add.outer(source, numbers * step).reshape(-1)
        target = np.add.outer(target, numbers * target_step).reshape(-1)
    return source, target, run
