"""Staging: copies of live shards into the image of a rank's storage files.

A rank's *image* consists of the data sections of its storage files, one after the other, each on a 4096-byte boundary.
A pool as large as the image takes all shards in one copy. Through a smaller pool the image passes chunk by chunk.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import _unflatten_dense_tensors

__all__ = [
    "Chunk",
    "Image",
    "ImageFile",
    "KnownTargets",
    "chunks_of",
    "copy_all",
    "dense",
    "flat_bytes",
    "movable",
    "views_at",
]

#: Pieces of tensors from this length on are written from their own memory, others are gathered in a chunk first.
_LARGE_BYTES = 256 << 10
#: From this length on memcpy takes 0.6 of the time of torch's copy loop, which reads the target before it writes.
_MEMCPY_BYTES = 64 << 10
_COPY_PIECE = 8 << 20
_COPY_THREADS = 4
#: Chunks of more tensors than this keep the interpreter busy; two threads would only take turns at its lock.
_MANY_TENSORS = 64
#: Torch implements copies of these dtypes on every device. Others are copied as integers of the same width.
_COPYABLE = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
}
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """View `tensor` under a dtype that torch copies on every device."""
    return tensor if tensor.dtype in _COPYABLE else tensor.view(_INTEGER[tensor.element_size()])


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` if its elements are in row-major order, else a copy in that order."""
    return movable(tensor).contiguous().view(tensor.dtype)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View the bytes of a contiguous tensor as uint8 of shape [nbytes]."""
    return movable(tensor).reshape(-1).view(torch.uint8)


@dataclass(slots=True)
class ImageFile:
    """One file's data section inside the image.

    Attributes:
        start: first byte in the image; a multiple of 4096.
        nbytes: length of the data section.
        shards: indexes into the image's tensors, in file order; they tile the section.
        starts: byte offset of each shard in the section, ascending, shape [n].
        sizes: bytes of each shard, shape [n].
    """

    start: int
    nbytes: int
    shards: list[int]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [start, start + nbytes) of the data section of file `file`."""

    file: int
    start: int
    nbytes: int


def chunks_of(files: Sequence[ImageFile], chunk_bytes: int) -> list[Chunk]:
    """Return all chunks of an image, in order."""
    return [
        Chunk(index, start, min(chunk_bytes, file.nbytes - start))
        for index, file in enumerate(files)
        for start in range(0, file.nbytes, chunk_bytes)
    ]


@dataclass(slots=True)
class KnownTargets:
    """Views of the pool that the saves of one plan share.

    Attributes:
        files: number of files at the start of the image whose layout stays the same.
        key: address and generation of the pool that the views belong to.
        views: one per tensor of those files, in file order.
    """

    files: int = 0
    key: tuple[int, int] = (0, 0)
    views: list[torch.Tensor] = field(default_factory=list)

    def forget(self) -> None:
        """Drop the views, which keep the pool's memory alive."""
        self.key = (0, 0)
        self.views = []


@dataclass(slots=True)
class Image:
    """The live tensors of one save and where their bytes go.

    Attributes:
        tensors: the live shards' elements.
        files: the data sections that they make up.
        known: places in the pool of the tensors of the first files, reused by the next save.
        filling: the lock of the thread that fills a chunk of many small tensors.
    """

    tensors: list[torch.Tensor]
    files: list[ImageFile]
    known: KnownTargets = field(default_factory=KnownTargets)
    filling: threading.Lock = field(default_factory=threading.Lock)

    def large(self) -> dict[int, memoryview]:
        """Return the memory of the tensors that can be written without a copy, by index."""
        return {
            index: memoryview(flat_bytes(tensor).numpy())
            for index, tensor in enumerate(self.tensors)
            if tensor.nbytes >= _LARGE_BYTES and tensor.device.type == "cpu" and tensor.is_contiguous()
        }

    @property
    def nbytes(self) -> int:
        """The length of the image in bytes."""
        last = self.files[-1] if self.files else None
        return last.start + -(-last.nbytes // 4096) * 4096 if last else 0

    def stage(self, pool: torch.Tensor, generation: int) -> None:
        """Copy all tensors into `pool` (uint8, at least `nbytes` long): the blocking part of an asynchronous save."""
        order = [i for f in self.files for i in f.shards]
        sources = [movable(self.tensors[i]) for i in order]
        key = (pool.data_ptr(), generation)
        if self.known.key != key:
            self.known.key = key
            self.known.views = self._views(pool, sources, self.files[: self.known.files])
        targets = self.known.views
        other_files = self.files[self.known.files :]
        if other_files:
            targets = targets + self._views(pool, sources[len(targets) :], other_files)
        copy_all(targets, sources)

    @staticmethod
    def _views(pool: torch.Tensor, sources: list[torch.Tensor], files: Sequence[ImageFile]) -> list[torch.Tensor]:
        views: list[torch.Tensor] = []
        for file in files:
            section = pool[file.start : file.start + file.nbytes]
            views += views_at(section, sources[len(views) : len(views) + len(file.shards)], file.starts)
        return views

    def fill(self, chunk: Chunk, slot: torch.Tensor, large: Mapping[int, memoryview]) -> list[memoryview]:
        """Gather the bytes of one chunk.

        Args:
            chunk: the bytes.
            slot: memory to gather into, uint8, at least `chunk.nbytes` long.
            large: memory of tensors, by index, whose large pieces are not copied. The result refers to it instead.

        Returns:
            Buffers that hold the chunk, one after the other.
        """
        file = self.files[chunk.file]
        stop = chunk.start + chunk.nbytes
        first = int(np.searchsorted(file.starts + file.sizes, chunk.start, "right"))
        last = int(np.searchsorted(file.starts, stop, "left"))
        slot_view = memoryview(slot.numpy())
        buffers: list[memoryview] = []
        covered = 0  # bytes of the chunk that `buffers` cover
        whole: list[torch.Tensor] = []
        whole_starts: list[int] = []
        for index in range(first, last):
            begin, size = int(file.starts[index]), int(file.sizes[index])
            low, high = max(begin, chunk.start), min(begin + size, stop)
            if low >= high:
                continue
            at = low - chunk.start
            memory = large.get(file.shards[index]) if high - low >= _LARGE_BYTES else None
            if memory is not None:
                if at > covered:
                    buffers.append(slot_view[covered:at])
                buffers.append(memory[low - begin : high - begin])
                covered = at + high - low
                continue
            tensor = self.tensors[file.shards[index]]
            if high - low == size and size < _LARGE_BYTES:
                whole.append(movable(tensor))
                whole_starts.append(at)
                continue
            piece = flat_bytes(dense(tensor))[low - begin : high - begin]
            if piece.device.type == "cpu":
                np.copyto(slot[at : at + high - low].numpy(), piece.numpy())
            else:
                slot[at : at + high - low].copy_(piece)
        if whole:
            with self.filling if len(whole) > _MANY_TENSORS else contextlib.nullcontext():
                copy_all(views_at(slot, whole, whole_starts), whole)
        if chunk.nbytes > covered:
            buffers.append(slot_view[covered : chunk.nbytes])
        return buffers


def views_at(
    section: torch.Tensor, sources: Sequence[torch.Tensor], starts: Sequence[int] | NDArray[np.int64]
) -> list[torch.Tensor]:
    """Return views of `section` (uint8) at byte `starts`, with the shapes and dtypes of `sources`.

    Each start must be a multiple of its dtype's size. In storage files it is, since larger elements come first there.
    """
    views: list[torch.Tensor] = []
    begins = starts.tolist() if isinstance(starts, np.ndarray) else starts
    first = 0
    while first < len(sources):
        # One call makes the views of a run of one dtype without holes, in a third of the time of a call for each.
        dtype = sources[first].dtype
        end, last = begins[first], first
        while last < len(sources) and sources[last].dtype == dtype and begins[last] == end:
            end += sources[last].nbytes
            last += 1
        flat = section[begins[first] : end].view(dtype)
        views += _unflatten_dense_tensors(flat, sources[first:last])
        first = last
    return views


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target. All copies from or to an accelerator are queued, then waited for once."""
    if not targets:
        return
    with torch.no_grad():
        if not (all(t.is_cpu for t in targets) and all(s.is_cpu for s in sources)):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            # By name: the current device of a new thread is the first one, not the one that the process has chosen.
            for device in {t.device for t in (*targets, *sources) if not t.is_cpu}:
                torch.accelerator.synchronize(device)
            return
        large = [
            i
            for i, s in enumerate(sources)
            if s.nbytes >= _MEMCPY_BYTES
            and s.is_contiguous()
            and targets[i].is_contiguous()
            and targets[i].dtype == s.dtype
        ]
        if large:
            _copy_large([(flat_bytes(targets[i]).numpy(), flat_bytes(sources[i]).numpy()) for i in large])
            taken = set(large)
            targets = [t for i, t in enumerate(targets) if i not in taken]
            sources = [s for i, s in enumerate(sources) if i not in taken]
        if targets:
            torch._foreach_copy_(targets, sources)


def _copy_large(pairs: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> None:
    """Copy each (target, source) pair by memcpy, on as many threads as torch itself would use."""
    threads = min(torch.get_num_threads(), _COPY_THREADS, sum(t.nbytes for t, _ in pairs) // _COPY_PIECE)
    if threads < 2:
        for target, source in pairs:
            np.copyto(target, source)
        return
    pieces = [
        (target[start : start + _COPY_PIECE], source[start : start + _COPY_PIECE])
        for target, source in pairs
        for start in range(0, target.nbytes, _COPY_PIECE)
    ]
    with ThreadPoolExecutor(threads, thread_name_prefix="bytecheckpoint-copy") as pool:
        list(pool.map(lambda piece: np.copyto(*piece), pieces))
