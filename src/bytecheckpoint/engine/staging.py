"""Copy live shards into the image of a rank's storage files.

A rank's *image* consists of the data sections of its storage files, one after the other, each on a 4096-byte boundary.
A pool as large as the image takes all shards in one copy. Through a smaller pool the image passes chunk by chunk.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from bytecheckpoint.engine.device_copies import DeviceCopies
from bytecheckpoint.engine.pieces import SharedCopy
from bytecheckpoint.engine.runs import Runs
from bytecheckpoint.engine.tensor_bytes import copy_all, dense_bytes, flat_bytes, gather, movable, views_at

__all__ = ["Chunk", "Image", "ImageFile", "KnownTargets", "chunks_of"]

#: Pieces of tensors from this length on are written from their own memory, others are gathered in a chunk first.
_LARGE_BYTES = 256 << 10
#: Chunks of more tensors than this keep the interpreter busy; two threads would only take turns at its lock.
_MANY_TENSORS = 64


@dataclass(slots=True)
class ImageFile:
    """One file's data section inside the image.

    Attributes:
        start: first byte in the image; a multiple of 4096.
        nbytes: length of the data section.
        shards: indexes into the image's tensors and runs, in file order; they tile the section.
        starts: byte offset of each of them in the section, ascending, shape [n].
        sizes: bytes of each of them, shape [n].
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


class _Parts(NamedTuple):
    """The contents of one file: tensors with their starts in its data section, and runs with their starts in the image."""

    file: ImageFile
    tensors: list[torch.Tensor]
    starts: NDArray[np.int64]
    runs: list[tuple[Runs, int]]


@dataclass(slots=True)
class Image:
    """The live tensors of one save and where their bytes go.

    Attributes:
        tensors: the live shards' elements: a tensor, or the runs of many boxes that follow each other in a file.
        files: the data sections that they make up.
        copies: copies tensors on devices, in order with the caller's work.
        known: views of the pool for the tensors of the first files, which later saves use again.
        filling: held by the thread that fills a chunk of many small tensors.
    """

    tensors: list[torch.Tensor | Runs]
    files: list[ImageFile]
    copies: DeviceCopies
    known: KnownTargets = field(default_factory=KnownTargets)
    filling: threading.Lock = field(default_factory=threading.Lock)

    def large(self) -> dict[int, memoryview]:
        """Return the memory of the tensors that can be written without a copy, by index."""
        numbers = [file.shards[place] for file in self.files for place in np.flatnonzero(file.sizes >= _LARGE_BYTES)]
        return {
            number: memoryview(flat_bytes(tensor).numpy())
            for number, tensor in zip(numbers, map(self.tensors.__getitem__, numbers), strict=True)
            if not isinstance(tensor, Runs) and tensor.device.type == "cpu" and tensor.is_contiguous()
        }

    @property
    def nbytes(self) -> int:
        """The length of the image in bytes."""
        last = self.files[-1] if self.files else None
        return last.start + -(-last.nbytes // 4096) * 4096 if last else 0

    def stage(
        self, pool: torch.Tensor, generation: int, shared: SharedCopy | None = None, files: slice = slice(None)
    ) -> None:
        """Copy tensors into a pool: the blocking part of an asynchronous save.

        Args:
            pool: uint8, at least `nbytes` long.
            generation: growths of the pool so far, by which views of it are known.
            shared: copy in which other threads take part; None if nothing but the copy runs.
            files: files whose tensors are copied: all or none of those of which views are known.
        """
        parts = [self._parts(file) for file in self.files[files]]
        key = (pool.data_ptr(), generation)
        known, targets = self.known, list[torch.Tensor]()
        first = 0 if files.start else known.files
        if first:
            if known.key != key:
                known.key, known.views = key, self._views(pool, parts[:first])
            targets += known.views
        targets += self._views(pool, parts[first:])
        with self.copies.queued():
            copy_all(targets, [tensor for part in parts for tensor in part.tensors], shared)
            for part in parts:
                for runs, start in part.runs:
                    runs.copy_bytes(0, runs.nbytes, pool[start : start + runs.nbytes])

    @staticmethod
    def staged(tensor: torch.Tensor, at: int, pool: torch.Tensor) -> torch.Tensor:
        """Return the copy of `tensor` that `stage` has made at byte `at` of `pool`."""
        (copy,) = views_at(pool, [movable(tensor)], [at])
        return copy.view(tensor.dtype)

    def _parts(self, file: ImageFile) -> _Parts:
        """Sort what a file holds into tensors and runs."""
        held = [self.tensors[i] for i in file.shards]
        if Runs not in set(map(type, held)):  # as usual; the caller of a save waits for this
            return _Parts(file, list(map(movable, cast("list[torch.Tensor]", held))), file.starts, [])
        tensors: list[torch.Tensor] = []
        places: list[int] = []
        runs: list[tuple[Runs, int]] = []
        for place, found in enumerate(held):
            if isinstance(found, Runs):
                runs.append((found, file.start + int(file.starts[place])))
            else:
                tensors.append(movable(found))
                places.append(place)
        return _Parts(file, tensors, file.starts[places], runs)

    @staticmethod
    def _views(pool: torch.Tensor, parts: Sequence[_Parts]) -> list[torch.Tensor]:
        views: list[torch.Tensor] = []
        for part in parts:
            section = pool[part.file.start : part.file.start + part.file.nbytes]
            views += views_at(section, part.tensors, part.starts)
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
        with self.copies.queued():
            return self._fill(chunk, slot, large)

    def _fill(self, chunk: Chunk, slot: torch.Tensor, large: Mapping[int, memoryview]) -> list[memoryview]:
        file = self.files[chunk.file]
        stop = chunk.start + chunk.nbytes
        first = int(np.searchsorted(file.starts + file.sizes, chunk.start, "right"))
        last = int(np.searchsorted(file.starts, stop, "left"))
        starts, sizes = file.starts[first:last], file.sizes[first:last]
        numbers = file.shards[first:last]
        # Most are small tensors that lie in the chunk as a whole: they are gathered together.
        inside = (starts >= chunk.start) & (starts + sizes <= stop) & (sizes > 0) & (sizes < _LARGE_BYTES)
        whole: list[torch.Tensor] = []
        for place in np.flatnonzero(inside).tolist():
            tensor = self.tensors[numbers[place]]
            if isinstance(tensor, Runs):
                inside[place] = False
            else:
                whole.append(movable(tensor))
        whole_starts = (starts[inside] - chunk.start).tolist()
        slot_view = memoryview(slot.numpy())
        buffers: list[memoryview] = []
        covered = 0  # bytes of the chunk that `buffers` cover
        for place in np.flatnonzero(~inside & (sizes > 0)).tolist():
            begin, size = int(starts[place]), int(sizes[place])
            low, high = max(begin, chunk.start), min(begin + size, stop)
            at = low - chunk.start
            memory = large.get(numbers[place]) if high - low >= _LARGE_BYTES else None
            if memory is not None:
                if at > covered:
                    buffers.append(slot_view[covered:at])
                buffers.append(memory[low - begin : high - begin])
                covered = at + high - low
                continue
            tensor = self.tensors[numbers[place]]
            if isinstance(tensor, Runs):
                tensor.copy_bytes(low - begin, high - begin, slot[at : at + high - low])
                continue
            piece = dense_bytes(tensor, low - begin, high - begin)
            if piece.device.type == "cpu":
                np.copyto(slot[at : at + high - low].numpy(), piece.numpy())
            else:
                slot[at : at + high - low].copy_(piece, non_blocking=True)
        if whole:
            with self.filling if len(whole) > _MANY_TENSORS else contextlib.nullcontext():
                gather(slot, whole, whole_starts)
        if chunk.nbytes > covered:
            buffers.append(slot_view[covered : chunk.nbytes])
        return buffers
