"""Exchange chunks: ranks read once what several of them want (ByteCheckpoint, section 4.1).

Every rank reads its share of the chunks, where possible directly into its own destinations. The `Distribution` says
which rank each chunk comes from. The other ranks of the reader's machine copy it out of its memory (`peer_memory`).
Other machines receive it over sockets or over the job's own fabric (`exchange_transfers`). An exchange consists of rounds:
ranks read the chunks of a round, agree that all are read, and copy them while the threads read the next round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.concurrency import Workers
from bytecheckpoint.engine.distribution import Distribution, Schedule
from bytecheckpoint.engine.exchange_chunks import ChunkMover, LoadedChunk
from bytecheckpoint.engine.exchange_rounds import MachineChunks, PeerProcesses
from bytecheckpoint.engine.exchange_transfers import FabricTransfers, MovedChunks, SocketTransfers, start_fabric
from bytecheckpoint.engine.fabric import offer_fabric
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.reading import Readers
from bytecheckpoint.engine.scatter import ScatterPlan
from bytecheckpoint.errors import PeerLostError
from bytecheckpoint.representation.plans import ExchangePlan
from bytecheckpoint.settings import Settings
from bytecheckpoint.tuning import tuning

__all__ = ["ChunkExchange"]


class ChunkExchange:
    """One rank's part of an exchange. All ranks construct it, call `run`, and call `release` when all have returned.

    Args:
        agreement: agreement of all ranks.
        plan: shared chunks, equal on all ranks, and this rank's part.
        hosts: number of each rank's host.
        handshakes: `peer_memory.peer_handshake` of every rank.
        files: storage files of the checkpoint.
        scatter_plan: read plan of this rank with its destinations.
        chunk_bytes: length of the longest chunk.
        chunks_per_round: largest number of chunks that each rank reads in a round; equal on all ranks.
        settings: settings with the number of threads and the use of the fabric.

    Attributes:
        read: bytes read from storage.
        received: bytes copied from other ranks.
    """

    def __init__(
        self,
        agreement: Agreement,
        plan: ExchangePlan,
        hosts: Sequence[int],
        handshakes: Sequence[bytes],
        files: FileSet,
        scatter_plan: ScatterPlan,
        *,
        chunk_bytes: int,
        chunks_per_round: int,
        settings: Settings,
    ) -> None:
        self.read = 0
        self.received = 0
        self._agreement = agreement
        self._files = files
        self._threads = files.threads(settings.storage.read_threads)
        self._mover = ChunkMover(plan, files, scatter_plan, chunk_bytes)
        most = max(tuning().exchange_round_bytes // chunk_bytes, 1)
        self._schedule = Schedule(plan.shared, chunks_per_round, most)
        devices = {target.data.device for target in scatter_plan.targets}
        nbytes = int((plan.shared.stop - plan.shared.start).sum())
        offer = offer_fabric(agreement.collective, settings.transport.fabric, devices, nbytes)
        self._chunks = MachineChunks(agreement, PeerProcesses(hosts, agreement.rank, handshakes), offer)
        self._resources = contextlib.ExitStack()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._agreement.rank

    def run(self) -> None:
        """Read this rank's share of the chunks, and deliver all chunks that this rank wants.

        Raises:
            CorruptCheckpointError: as `FileSet.fetch`, on every rank.
            PeerLostError, CheckpointTimeoutError: another rank is gone or hangs.
        """
        if not self._schedule.rounds:
            return
        with Readers(self._files, self._threads) as readers, contextlib.ExitStack() as stack:
            copiers = Workers(self._threads, "bytecheckpoint-take")
            stack.callback(copiers.shutdown)
            reads = self._submit_round(0, readers)
            following = self._submit_round(1, readers)
            topology = self._chunks.start("0", self._collect(reads, readers))
            distribution = Distribution(self._schedule, topology.machines, self.rank)
            transfers = self._start_transfers(distribution, fabric=topology.fabric)
            for number in range(self._schedule.rounds):
                if number > 0:
                    # One round ahead. That takes buffers for three rounds: one being read, one whose readers wait for
                    # slower ranks, one being copied.
                    reads, following = following, self._submit_round(number + 1, readers)
                    for previous in self._chunks.start_round(str(number), self._collect(reads, readers)):
                        self._mover.recycle(previous)
                self._move_round(number, transfers, copiers)
            if self._chunks.failure is not None:
                raise self._chunks.failure

    def release(self) -> None:
        """Release the memory from which other ranks copy. Call it when every rank has returned from `run`."""
        self._chunks.loaded = {}
        self._resources.close()

    def _submit_round(self, number: int, readers: Readers) -> dict[int, Future[LoadedChunk]]:
        chunks = self._schedule.chunks_of(self.rank, number)
        return {chunk: readers.submit(self._mover.load, chunk) for chunk in chunks}

    def _collect(self, reads: dict[int, Future[LoadedChunk]], readers: Readers) -> dict[int, LoadedChunk]:
        """Wait for the chunks of a round that this rank reads. A failure is kept for the next agreement."""
        loaded: dict[int, LoadedChunk] = {}
        try:
            for chunk, future in reads.items():
                loaded[chunk] = readers.result(future)
                self.read += self._mover.nbytes(chunk)
        except BaseException as error:  # noqa: BLE001  reported to the other ranks, then raised
            self._chunks.failure = self._chunks.failure or error
        return loaded

    def _start_transfers(self, distribution: Distribution, *, fabric: bool) -> FabricTransfers | SocketTransfers | None:
        """Return the transfers between machines; None on a single machine."""
        if fabric:
            transfers = start_fabric(
                self._agreement, self._chunks.offer, self._files.stopped, self._mover, distribution
            )
            if transfers is not None:
                self._resources.callback(transfers.close)
                return transfers
        return SocketTransfers(self._agreement, self._mover, distribution) if distribution.several else None

    def _move_round(self, number: int, transfers: FabricTransfers | SocketTransfers | None, copiers: Workers) -> None:
        """Bring the chunks of a round to the machines and destinations that want them."""
        moved = MovedChunks(set(), {}, 0)
        if transfers is not None:
            try:
                moved = transfers.run(number, self._chunks.loaded)
            except BaseException as error:  # noqa: BLE001  reported to the other ranks, then raised
                self._chunks.failure = error
            self.received += moved.nbytes
            self._chunks.add(f"{number}/across", moved.received)
        try:
            self._deliver(number, moved.delivered, copiers)
        except BaseException as error:  # noqa: BLE001  reported to the other ranks in the next round, then raised
            self._chunks.failure = error

    def _deliver(self, number: int, arrived: set[int], copiers: Workers) -> None:
        """Copy the chunks of a round to this rank's destinations, without those that have arrived there."""
        copies = []
        for _, chunk in self._schedule.of_round(number):
            if not self._mover.wants(chunk) or chunk in arrived:
                continue
            loaded = self._chunks.loaded.get(chunk)
            if loaded is None:
                copies.append(copiers.submit(self._copy_from_rank, chunk, *self._chunks.place_of(chunk)))
            elif not loaded.delivered:
                self._mover.deliver(chunk, torch.frombuffer(loaded.buffers[0], dtype=torch.uint8))
        for copy in copies:
            self.received += copy.result()

    def _copy_from_rank(self, chunk: int, rank: int, segments: bytes) -> int:
        try:
            memory = np.frombuffer(segments, np.int64).reshape(-1, 2)
            return self._mover.copy_from_peer(chunk, self._chunks.peers.pids[rank], memory)
        except OSError as error:
            raise PeerLostError(f"rank {self.rank}: rank {rank} went away during an exchange: {error}") from error
