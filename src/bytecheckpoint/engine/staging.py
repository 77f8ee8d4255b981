"""Copying live shards into the image of the files that they will become.

A rank's *image* is the data sections of its storage files, one after the other, each starting on a 4096-byte
boundary. With a pool as large as the image, all shards are copied at once and the caller is free; with a smaller one
the image passes through the pool chunk by chunk. Both fill chunks from the same table of pieces.
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

_REFERENCE_BYTES = 256 << 10
#: From here on memcpy takes 0.6 of the time of torch's copy loop, which reads the target before it writes it.
_MEMCPY_BYTES = 64 << 10
_COPY_PIECE = 8 << 20
_COPY_THREADS = 4
_MANY = 64
#: Dtypes whose copies torch may not implement are moved as integers of the same width.
_PLAIN = {
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
    """`tensor` under a dtype that every copy kernel knows; the same memory."""
    return tensor if tensor.dtype in _PLAIN else tensor.view(_INTEGER[tensor.element_size()])


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with its elements in row-major order: itself where they are, else a copy."""
    return movable(tensor).contiguous().view(tensor.dtype)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, uint8 of shape [nbytes], the same memory."""
    return movable(tensor).reshape(-1).view(torch.uint8)


@dataclass(slots=True)
class ImageFile:
    """One file's data section inside the image.

    Attributes:
        start: first byte in the image; a multiple of 4096.
        nbytes: length of the data section.
        shards: indexes into the image's tensors, in file order; they tile the section.
        starts: byte offset of each of them inside the section, ascending, shape [n].
        sizes: bytes of each, shape [n].
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
    """All chunks of an image, in order."""
    return [
        Chunk(index, start, min(chunk_bytes, file.nbytes - start))
        for index, file in enumerate(files)
        for start in range(0, file.nbytes, chunk_bytes)
    ]


@dataclass(slots=True)
class KnownTargets:
    """Views of the pool that stay the same from save to save.

    Attributes:
        files: the first so many files of the image keep their layout.
        key: address and generation of the pool that the views belong to.
        views: one per tensor of those files, in file order.
    """

    files: int = 0
    key: tuple[int, int] = (0, 0)
    views: list[torch.Tensor] = field(default_factory=list)

    def forget(self) -> None:
        """Let go of the pool's memory."""
        self.key = (0, 0)
        self.views = []


@dataclass(slots=True)
class Image:
    """The live tensors of one save and where their bytes go.

    Attributes:
        tensors: the live shards' elements.
        files: the data sections that they make up.
        known: where the tensors of the first files go in the pool, kept from one save to the next.
        filling: held by the thread that fills a chunk of many small tensors.
    """

    tensors: list[torch.Tensor]
    files: list[ImageFile]
    known: KnownTargets = field(default_factory=KnownTargets)
    filling: threading.Lock = field(default_factory=threading.Lock)

    def large(self) -> dict[int, memoryview]:
        """The memory of those tensors that storage can be written from as they are, by index."""
        return {
            index: memoryview(flat_bytes(tensor).numpy())
            for index, tensor in enumerate(self.tensors)
            if tensor.nbytes >= _REFERENCE_BYTES and tensor.device.type == "cpu" and tensor.is_contiguous()
        }

    @property
    def nbytes(self) -> int:
        """Length of the image in bytes."""
        last = self.files[-1] if self.files else None
        return last.start + -(-last.nbytes // 4096) * 4096 if last else 0

    def stage(self, pool: torch.Tensor, generation: int) -> None:
        """Copy everything into `pool` (uint8, at least `nbytes` long): the blocking part of an asynchronous save."""
        order = [i for f in self.files for i in f.shards]
        sources = [movable(self.tensors[i]) for i in order]
        key = (pool.data_ptr(), generation)
        if self.known.key != key:
            self.known.key = key
            self.known.views = self._views(pool, sources, self.files[: self.known.files])
        targets = self.known.views
        later = self.files[self.known.files :]
        if later:
            targets = targets + self._views(pool, sources[len(targets) :], later)
        copy_all(targets, sources)

    @staticmethod
    def _views(pool: torch.Tensor, sources: list[torch.Tensor], files: Sequence[ImageFile]) -> list[torch.Tensor]:
        views: list[torch.Tensor] = []
        for file in files:
            section = pool[file.start : file.start + file.nbytes]
            views += views_at(section, sources[len(views) : len(views) + len(file.shards)], file.starts)
        return views

    def fill(self, chunk: Chunk, slot: torch.Tensor, large: Mapping[int, memoryview]) -> list[memoryview]:
        """The bytes of one chunk, gathered in `slot` (uint8, at least `chunk.nbytes` long).

        Args:
            chunk: which bytes.
            slot: memory to gather into.
            large: tensors, by index, whose large pieces are not copied: the result refers to this memory instead.

        Returns:
            Buffers which hold the chunk one after the other.
        """
        file = self.files[chunk.file]
        stop = chunk.start + chunk.nbytes
        first = int(np.searchsorted(file.starts + file.sizes, chunk.start, "right"))
        last = int(np.searchsorted(file.starts, stop, "left"))
        slot_view = memoryview(slot.numpy())
        buffers: list[memoryview] = []
        copied = 0  # start, inside the chunk, of the copied bytes that no buffer covers yet
        whole: list[torch.Tensor] = []
        whole_starts: list[int] = []
        for index in range(first, last):
            begin, size = int(file.starts[index]), int(file.sizes[index])
            low, high = max(begin, chunk.start), min(begin + size, stop)
            if low >= high:
                continue
            at = low - chunk.start
            known = large.get(file.shards[index]) if high - low >= _REFERENCE_BYTES else None
            if known is not None:
                if at > copied:
                    buffers.append(slot_view[copied:at])
                buffers.append(known[low - begin : high - begin])
                copied = at + high - low
                continue
            tensor = self.tensors[file.shards[index]]
            if high - low == size and size < _REFERENCE_BYTES:
                whole.append(movable(tensor))
                whole_starts.append(at)
                continue
            piece = flat_bytes(dense(tensor))[low - begin : high - begin]
            if piece.device.type == "cpu":
                np.copyto(slot[at : at + high - low].numpy(), piece.numpy())
            else:
                slot[at : at + high - low].copy_(piece)
        if whole:
            # Many small pieces keep the interpreter busy; two threads at it would only take turns at its lock.
            with self.filling if len(whole) > _MANY else contextlib.nullcontext():
                copy_all(views_at(slot, whole, whole_starts), whole)
        if chunk.nbytes > copied:
            buffers.append(slot_view[copied : chunk.nbytes])
        return buffers


def views_at(
    section: torch.Tensor, sources: Sequence[torch.Tensor], starts: Sequence[int] | NDArray[np.int64]
) -> list[torch.Tensor]:
    """Views of `section` (uint8) at byte `starts`, with the shapes and dtypes of `sources`.

    Each start is a multiple of its dtype's size, as it is in every file: there tensors stand largest elements first.
    """
    views: list[torch.Tensor] = []
    begins = starts.tolist() if isinstance(starts, np.ndarray) else starts
    first = 0
    while first < len(sources):
        # A run of one dtype without holes becomes views in one call: a third of the time of a view each.
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
    """Copy each source to its target; copies from or to an accelerator are all queued before the one wait for them."""
    if not targets:
        return
    with torch.no_grad():
        if not (all(t.is_cpu for t in targets) and all(s.is_cpu for s in sources)):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            # A thread begins with the first device as its own, whichever one the process has chosen.
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
    """memcpy each (target, source), by as many threads as torch itself would use."""
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
