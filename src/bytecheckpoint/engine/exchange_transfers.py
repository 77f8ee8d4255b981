"""Move the chunks of an exchange between machines, over sockets or over the job's own fabric."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.engine.distribution import Distribution
from bytecheckpoint.engine.exchange_chunks import ChunkMover, LoadedChunk
from bytecheckpoint.engine.fabric import Fabric, FabricOffer, Transfers, warn_no_fabric
from bytecheckpoint.engine.peer_memory import segments_of_buffers
from bytecheckpoint.errors import CheckpointError, PeerLostError
from bytecheckpoint.tuning import tuning

__all__ = ["FabricTransfers", "MovedChunks", "SocketTransfers", "start_fabric"]

_ALIGNMENT = 512


class MovedChunks(NamedTuple):
    """The chunks of one round that this rank has received from other machines.

    Attributes:
        delivered: chunks that are in this rank's destinations.
        received: chunks in this rank's memory, for all ranks of its machine.
        nbytes: number of bytes received.
    """

    delivered: set[int]
    received: dict[int, LoadedChunk]
    nbytes: int


class SocketTransfers:
    """Transfers over sockets: one rank of each other machine receives a chunk, for all ranks of that machine.

    Args:
        agreement: agreement of all ranks of the exchange.
        mover: mover of the chunks.
        distribution: ways of the chunks.
    """

    def __init__(self, agreement: Agreement, mover: ChunkMover, distribution: Distribution) -> None:
        self._agreement = agreement
        self._mover = mover
        self._distribution = distribution

    def run(self, number: int, loaded: Mapping[int, LoadedChunk]) -> MovedChunks:
        """Send chunks of a round that this rank has read, and receive chunks for this machine.

        Raises:
            CheckpointError: another rank is gone or hangs.
        """
        outgoing, incoming = self._distribution.sent_by_rank(number), self._distribution.received_by_rank(number)
        # One array for all machines that get the same chunks.
        arrays = {tuple(chunks): _joined([loaded[chunk] for chunk in chunks]) for chunks in outgoing.values()}
        memory = {rank: np.empty(sum(map(self._mover.nbytes, chunks)), np.uint8) for rank, chunks in incoming.items()}
        self._agreement.collective.exchange(
            f"{self._agreement.tag}/{number}/far",
            {rank: arrays[tuple(chunks)] for rank, chunks in outgoing.items()},
            memory,
            timeout=self._agreement.timeout,
        )
        received: dict[int, LoadedChunk] = {}
        for rank, chunks in incoming.items():
            begin = 0
            for chunk in chunks:
                data = memory[rank][begin : begin + self._mover.nbytes(chunk)]
                # `scatter` needs aligned data.
                buffers = [memoryview(data if begin % 16 == 0 else data.copy())]
                received[chunk] = LoadedChunk(buffers, segments_of_buffers(buffers))
                begin += data.nbytes
        return MovedChunks(set(), received, sum(array.nbytes for array in memory.values()))


def start_fabric(
    agreement: Agreement, offer: FabricOffer, stopped: Future[NoReturn], mover: ChunkMover, distribution: Distribution
) -> FabricTransfers | None:
    """Start the fabric on all ranks. Return None, on all ranks, if that fails on one: then bytes go over sockets.

    Raises:
        PeerLostError: a rank is gone.
    """
    fabrics: list[Fabric] = []

    def start() -> str:
        try:
            fabrics.append(Fabric(agreement.collective, agreement.tag, offer, agreement.timeout, stopped))
        except PeerLostError:
            raise
        except CheckpointError as error:
            return str(error)
        return ""

    def first_failure(failures: list[str]) -> str:
        return next(filter(None, failures), "")

    failure = "the ranks did not agree"
    try:
        failure = agreement.agree("fabric", start, first_failure, reports=str, decisions=str)
    finally:
        if failure:
            for fabric in fabrics:
                fabric.close()
    if failure:
        if agreement.rank == 0:
            warn_no_fabric(failure)
        return None
    return FabricTransfers(fabrics[0], mover, distribution)


class FabricTransfers:
    """Transfers over the fabric, down the trees of the distribution, straight to the destinations.

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

    def run(self, number: int, loaded: Mapping[int, LoadedChunk]) -> MovedChunks:
        """Transfer the chunks of a round, and deliver those that arrive here.

        Args:
            number: number of the round.
            loaded: chunks that this rank has read.

        Raises:
            CheckpointError: as `Fabric.run`.
        """
        delivered: set[int] = set()
        nbytes = 0
        for batch in self._batches(number):
            for chunk, data in self.fabric.run(functools.partial(self._move, batch, loaded)).items():
                self._mover.deliver(chunk, data)
                delivered.add(chunk)
                nbytes += data.numel()
        return MovedChunks(delivered, {}, nbytes)

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


def _joined(loaded: Sequence[LoadedChunk]) -> NDArray[np.uint8]:
    """Return the bytes of some chunks; those of a single buffer without a copy."""
    buffers = [np.frombuffer(buffer, np.uint8) for chunk in loaded for buffer in chunk.buffers]
    return buffers[0] if len(buffers) == 1 else np.concatenate(buffers)
