"""Transfer the chunks of an exchange between machines over the fabric, down the trees of their distribution."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from bytecheckpoint.engine.distribution import Distribution
from bytecheckpoint.engine.exchange_chunks import ChunkMover, LoadedChunk
from bytecheckpoint.engine.fabric import Fabric, Transfers
from bytecheckpoint.tuning import tuning

__all__ = ["FabricExchange"]

_ALIGNMENT = 512


class FabricExchange:
    """One rank's part in the transfers of all rounds of an exchange.

    Args:
        fabric: process group of the load.
        mover: mover that delivers the chunks that arrive.
        distribution: ways of the chunks; every rank knows all of them, so no message announces a chunk.
    """

    def __init__(self, fabric: Fabric, mover: ChunkMover, distribution: Distribution) -> None:
        self.fabric = fabric
        self._mover = mover
        self._distribution = distribution
        self._staging = torch.empty(0, dtype=torch.uint8)

    def run(self, number: int, loaded: Mapping[int, LoadedChunk]) -> dict[int, int]:
        """Transfer the chunks of a round, and deliver those that arrive here.

        Args:
            number: number of the round.
            loaded: chunks that this rank has read.

        Returns:
            Chunks that have arrived, with their bytes.

        Raises:
            CheckpointError: as `Fabric.run`.
        """
        arrived: dict[int, int] = {}
        for batch in self._batches(number):
            for chunk, data in self.fabric.run(functools.partial(self._move, batch, loaded)).items():
                self._mover.deliver(chunk, data)
                arrived[chunk] = data.numel()
        return arrived

    def close(self) -> None:
        """End the group, and release the staging memory."""
        self.fabric.close()
        self._staging = self._staging[:0].clone()

    def _batches(self, number: int) -> Iterator[list[tuple[int, int]]]:
        """Cut a round into batches of (reader, chunk) that fit into the staging memory of any rank; equal on all ranks."""
        batch: list[tuple[int, int]] = []
        size = 0
        for reader, chunk in self._distribution.leaving(number):
            nbytes = _aligned(self._mover.nbytes(chunk))
            if batch and size + nbytes > tuning().fabric_bytes:
                yield batch
                batch, size = [], 0
            batch.append((reader, chunk))
            size += nbytes
        if batch:
            yield batch

    def _move(
        self,
        batch: list[tuple[int, int]],
        loaded: Mapping[int, LoadedChunk],
        transfer: Callable[[Transfers], None],
    ) -> dict[int, torch.Tensor]:
        """Send and receive on the fabric's thread; return the chunks that have arrived, in the staging memory."""
        stages: dict[tuple[int, int], Transfers] = {}
        arriving: dict[int, torch.Tensor] = {}
        edges = [(chunk, *self._distribution.tree_edges(chunk, reader)) for reader, chunk in batch]
        edges = [(chunk, parents, children) for chunk, parents, children in edges if parents or children]
        ends = np.cumsum([0, *(_aligned(self._mover.nbytes(chunk)) for chunk, _, _ in edges)]).tolist()
        receives = any(parents for _, parents, _ in edges)
        if ends[-1] > self._staging.numel() and (self.fabric.device.type != "cpu" or receives):
            self._staging = self._staging[:0]  # first give back the old memory
            self._staging = torch.empty(ends[-1], dtype=torch.uint8, device=self.fabric.device)
        for begin, (chunk, parents, children) in zip(ends, edges, strict=False):
            data = self._staging[begin : begin + self._mover.nbytes(chunk)]
            if chunk in loaded:
                data = _upload(loaded[chunk], data, self.fabric.device)
            for parent in parents:
                arriving[chunk] = data
                stages.setdefault(parent.stage, Transfers([], [])).receives.append((parent.rank, chunk, data))
            for child in children:
                stages.setdefault(child.stage, Transfers([], [])).sends.append((child.rank, chunk, data))
        for stage in sorted(stages):
            transfer(stages[stage])
        return arriving


def _upload(loaded: LoadedChunk, staging: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a chunk that this rank has read on a device; the copies to it are queued."""
    buffers = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in loaded.buffers]
    if device.type == "cpu":
        return buffers[0] if len(buffers) == 1 else torch.cat(buffers)
    begin = 0
    for buffer in buffers:
        staging[begin : begin + buffer.numel()].copy_(buffer, non_blocking=True)
        begin += buffer.numel()
    return staging


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
