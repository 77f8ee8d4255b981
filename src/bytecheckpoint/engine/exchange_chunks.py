"""Move the chunks of an exchange on one rank: from storage or from another rank's memory to the destinations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.peer_memory import Segments, read_peer_memory, segments_of_buffers, slice_segments
from bytecheckpoint.engine.reading import ScratchBuffers
from bytecheckpoint.engine.scatter import ScatterPlan
from bytecheckpoint.representation.plans import ExchangePlan

__all__ = ["ChunkMover", "LoadedChunk"]


@dataclass(slots=True)
class LoadedChunk:
    """A chunk in this rank's memory.

    Attributes:
        buffers: bytes of the chunk, one buffer after the other.
        segments: addresses of `buffers`.
        pooled: buffer for `ChunkMover.recycle`, if any.
        delivered: True if this rank's own destinations hold the chunk.
    """

    buffers: list[memoryview]
    segments: Segments
    pooled: torch.Tensor | None = None
    delivered: bool = False


class ChunkMover:
    """Moves the chunks that one rank wants to its destinations. Several threads may use it.

    Args:
        plan: chunks, and the ranges of this rank's read plan that they cover.
        files: storage files of the checkpoint.
        scatter_plan: read plan with its destinations.
        chunk_bytes: length of a chunk; some reach a little into the next one.
    """

    def __init__(self, plan: ExchangePlan, files: FileSet, scatter_plan: ScatterPlan, chunk_bytes: int) -> None:
        self._shared = plan.shared
        self._files = files
        self._scatter_plan = scatter_plan
        longest = int((plan.shared.stop - plan.shared.start).max(initial=0))
        self._scratch = ScratchBuffers(scatter_plan, max(chunk_bytes, longest, scatter_plan.plan.longest))
        self._free: list[torch.Tensor] = []
        self._ranges: dict[int, list[int]] = {}
        for index, chunk in zip(plan.covered_ranges.tolist(), plan.covering_chunks.tolist(), strict=True):
            self._ranges.setdefault(chunk, []).append(index)

    def wants(self, chunk: int) -> bool:
        """Return whether this rank has a destination for bytes of the chunk."""
        return chunk in self._ranges

    def nbytes(self, chunk: int) -> int:
        """Return the length of the chunk."""
        return int(self._shared.stop[chunk] - self._shared.start[chunk])

    def load(self, chunk: int) -> LoadedChunk:
        """Read a chunk from storage and deliver it, without a copy where it fills one range."""
        start, stop = int(self._shared.start[chunk]), int(self._shared.stop[chunk])
        file = int(self._shared.file[chunk])
        indexes = self._ranges[chunk]
        buffers = None
        if len(indexes) == 1 and self._bounds(indexes[0]) == (start, stop):
            buffers = self._scatter_plan.direct_buffers(indexes[0])
        if buffers is not None:
            self._files.fetch(file, start, stop, buffers)
            return LoadedChunk(buffers, segments_of_buffers(buffers), delivered=True)
        try:
            pooled = self._free.pop()
        except IndexError:
            pooled = self._scratch.new_buffer()
        buffers = [memoryview(pooled[: stop - start].numpy())]
        self._files.fetch(file, start, stop, buffers)
        self.deliver(chunk, pooled)
        return LoadedChunk(buffers, segments_of_buffers(buffers), pooled, delivered=True)

    def deliver(self, chunk: int, data: torch.Tensor) -> None:
        """Scatter a chunk to this rank's destinations.

        Args:
            chunk: number of the chunk.
            data: bytes of the chunk, uint8, on the host or on a device; its address is a multiple of 16.
        """
        data = self._scratch.within_reach(data)
        for index in self._ranges[chunk]:
            self._scratch.scatter(index, data, int(self._shared.start[chunk]))

    def copy_from_peer(self, chunk: int, pid: int, segments: Segments) -> int:
        """Copy the wanted bytes of a chunk from the memory of another process, directly to their destinations if possible.

        Args:
            chunk: number of the chunk.
            pid: id of the process.
            segments: addresses of the whole chunk there.

        Returns:
            The number of bytes copied.

        Raises:
            OSError: the process is gone.
        """
        first = int(self._shared.start[chunk])
        total = 0
        for index in self._ranges[chunk]:
            start, stop = self._bounds(index)
            runs = self._scatter_plan.runs(index)
            if runs is not None:
                remote = slice_segments(segments, runs.source - first, runs.segments[:, 1])
                read_peer_memory(pid, remote, runs.segments)
                total += int(runs.segments[:, 1].sum())
            else:
                data = self._scratch.buffer(stop - start)
                remote = slice_segments(segments, np.array([start - first]), np.array([stop - start]))
                read_peer_memory(pid, remote, segments_of_buffers([memoryview(data.numpy())]))
                self._scratch.scatter(index, data, start)
                total += stop - start
        return total

    def recycle(self, loaded: LoadedChunk) -> None:
        """Keep the buffer of a chunk for another chunk. No other rank may read it any more."""
        if loaded.pooled is not None:
            self._free.append(loaded.pooled)

    def _bounds(self, index: int) -> tuple[int, int]:
        plan = self._scatter_plan.plan
        return int(plan.start[index]), int(plan.stop[index])
