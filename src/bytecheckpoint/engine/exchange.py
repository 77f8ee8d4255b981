"""The exchange: ranks read once what several of them want (ByteCheckpoint, section 4.1).

Every rank reads its share of the chunks, where possible directly into its own destinations. The other ranks of its
machine copy them out of its memory (`peer_memory`). One rank of each other machine receives them over the data plane,
for all ranks of that machine; or all of them receive them over the job's own fabric (`exchange_fabric`). An exchange
consists of rounds: ranks read the chunks of a round, agree that all are read, and copy them while the threads read the
next round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray

from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.concurrency import Workers
from bytecheckpoint.engine.exchange_chunks import ChunkMover, LoadedChunk
from bytecheckpoint.engine.exchange_fabric import FabricExchange
from bytecheckpoint.engine.exchange_rounds import MachineChunks, Machines
from bytecheckpoint.engine.fabric import Fabric, offer_fabric, warn_no_fabric
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.peer_memory import segments_of_buffers
from bytecheckpoint.engine.reading import Readers
from bytecheckpoint.engine.scatter import ScatterPlan
from bytecheckpoint.errors import CheckpointError, PeerLostError
from bytecheckpoint.representation.plans import ExchangePlan, SharedChunks
from bytecheckpoint.settings import Settings
from bytecheckpoint.tuning import tuning

__all__ = ["Exchange"]


class _Schedule:
    """Which rank reads which chunks in which round.

    A round has so few chunks that a machine has room for all of them, however many ranks there are: then ranks take turns.
    Those of one round are far from each other, and so on as many machines as can be, which all send at the same time.

    Args:
        plan: the chunks.
        chunks_per_round: chunks that each rank reads in a round, at most.
        most: chunks of a round.

    Attributes:
        rounds: number of rounds.
        rank_sets: sets of ranks that want a chunk.
        wanted_by: number of the set that wants each chunk.
    """

    def __init__(self, plan: SharedChunks, chunks_per_round: int, most: int) -> None:
        by_reader = np.argsort(plan.reader, kind="stable")
        readers = plan.reader[by_reader]
        names, first, place = np.unique(readers, return_index=True, return_inverse=True)
        each = min(chunks_per_round, max(most // max(len(names), 1), 1))
        parts = -(-len(names) * each // most)
        turn = (np.arange(len(readers)) - first[place]) // each
        _, number = np.unique(turn * parts + place % parts if parts else turn, return_inverse=True)
        order = np.argsort(number, kind="stable")
        self._chunks: list[int] = by_reader[order].tolist()
        self._readers: list[int] = readers[order].tolist()
        self._starts = [0, *np.cumsum(np.bincount(number)).tolist()]  # of each round, and the end of the last one
        self.rounds = len(self._starts) - 1
        self.rank_sets = plan.rank_sets()
        self.wanted_by: list[int] = plan.wanted_by.tolist()

    def chunks_of(self, rank: int, number: int) -> list[int]:
        """Return the chunks that a rank reads in round `number`."""
        return [chunk for reader, chunk in self.of_round(number) if reader == rank]

    def of_round(self, number: int) -> Iterator[tuple[int, int]]:
        """Iterate over the readers and chunks of round `number`, in the same order on every rank; none after the last."""
        part = slice(*self._starts[number : number + 2]) if number < self.rounds else slice(0)
        return zip(self._readers[part], self._chunks[part], strict=True)


class Exchange:
    """One rank's part of an exchange. All ranks construct it, call `run`, and call `release` when all have returned.

    Args:
        agreement: of all ranks.
        plan: the shared chunks, equal on all ranks, and this rank's part.
        hosts: a number for each rank, equal for ranks of one host.
        handshakes: `peer_memory.peer_handshake` of every rank.
        files: the checkpoint's files.
        scatter_plan: this rank's read plan with its destinations.
        chunk_bytes: longest chunk.
        chunks_per_round: chunks that each rank reads in a round, at most; equal on all ranks.
        settings: number of threads.

    Attributes:
        rank: this rank.
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
        self.rank = agreement.rank
        self._agreement = agreement
        self._files = files
        self._threads = files.threads(settings.storage.read_threads)
        self._mover = ChunkMover(plan, files, scatter_plan, chunk_bytes)
        most = max(tuning().exchange_round_bytes // chunk_bytes, 1)
        self._schedule = _Schedule(plan.shared, chunks_per_round, most)
        devices = {target.data.device for target in scatter_plan.targets}
        nbytes = int((plan.shared.stop - plan.shared.start).sum())
        self._offer = offer_fabric(agreement.collective, settings.transport.fabric, devices, nbytes)
        self._fabric: FabricExchange | None = None
        self._wanting: dict[int, dict[int, list[int]]] = {}  # set of ranks -> machine -> ranks
        self._machine_chunks = MachineChunks(self._agreement, Machines(hosts, self.rank, handshakes), self._offer)
        self.read = 0
        self.received = 0

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
            reads: dict[int, Future[LoadedChunk]] = {}
            for number in range(-1, self._schedule.rounds):
                # One round ahead. That takes buffers for three rounds: one being read, one whose readers wait for
                # slower ranks, one being copied.
                for chunk in self._schedule.chunks_of(self.rank, number + 1):
                    reads[chunk] = readers.submit(self._mover.load, chunk)
                if number >= 0:
                    self._run_round(number, reads, readers, copiers)
            if self._machine_chunks.failure is not None:
                raise self._machine_chunks.failure

    def release(self) -> None:
        """Release the memory from which other ranks copy. Call it when every rank has returned from `run`."""
        self._machine_chunks.loaded = {}
        if self._fabric is not None:
            self._fabric.close()
            self._fabric = None

    def _run_round(
        self, number: int, reads: dict[int, Future[LoadedChunk]], readers: Readers, copiers: Workers
    ) -> None:
        loaded: dict[int, LoadedChunk] = {}
        try:
            for chunk in self._schedule.chunks_of(self.rank, number):
                loaded[chunk] = readers.result(reads.pop(chunk))
                self.read += self._mover.nbytes(chunk)
        except BaseException as error:  # noqa: BLE001  reported to the other ranks, then raised
            self._machine_chunks.failure = self._machine_chunks.failure or error
        for previous in self._machine_chunks.start_round(str(number), loaded):
            self._mover.recycle(previous)
        if number == 0 and self._machine_chunks.offers_fabric:
            self._start_fabric()
        arrived = set()
        if self._fabric is not None:
            arrived = self._exchange_over_fabric(self._fabric, number)
        elif len(set(self._machine_chunks.machines.numbers)) > 1:
            self._exchange_with_machines(number)
        try:
            self._deliver(number, arrived, copiers)
        except BaseException as error:  # noqa: BLE001  reported to the other ranks in the next round, then raised
            self._machine_chunks.failure = error

    def _deliver(self, number: int, arrived: set[int], copiers: Workers) -> None:
        """Bring the chunks of a round to this rank's destinations, but for those that have arrived there."""
        copies = []
        for _, chunk in self._schedule.of_round(number):
            if not self._mover.wants(chunk) or chunk in arrived:
                continue
            loaded = self._machine_chunks.loaded.get(chunk)
            if loaded is None:
                copies.append(copiers.submit(self._copy_from_rank, chunk, *self._machine_chunks.place_of(chunk)))
            elif not loaded.delivered:
                self._mover.deliver(chunk, torch.frombuffer(loaded.buffers[0], dtype=torch.uint8))
        for copy in copies:
            self.received += copy.result()

    def _copy_from_rank(self, chunk: int, rank: int, segments: bytes) -> int:
        try:
            memory = np.frombuffer(segments, np.int64).reshape(-1, 2)
            return self._mover.copy_from_peer(chunk, self._machine_chunks.machines.pids[rank], memory)
        except OSError as error:
            raise PeerLostError(f"rank {self.rank}: rank {rank} went away during an exchange: {error}") from error

    # --- other machines ---------------------------------------------------------------------------------------

    def _wanting_on(self, chunk: int) -> Mapping[int, Sequence[int]]:
        """Return the ranks that want a chunk, by the numbers of their machines."""
        wanted_by = self._schedule.wanted_by[chunk]
        if wanted_by not in self._wanting:
            self._wanting[wanted_by] = self._machine_chunks.machines.group(self._schedule.rank_sets[wanted_by])
        return self._wanting[wanted_by]

    def _others(self, chunk: int, reader: int) -> list[Sequence[int]]:
        """Return the ranks of each other machine that want a chunk."""
        return self._machine_chunks.machines.others(chunk, reader, self._wanting_on(chunk))

    def _joined(self, chunks: Sequence[int]) -> NDArray[np.uint8]:
        """Return the bytes of chunks that this rank has read; of a single one, where they are."""
        buffers = [np.frombuffer(b, np.uint8) for chunk in chunks for b in self._machine_chunks.loaded[chunk].buffers]
        return buffers[0] if len(buffers) == 1 else np.concatenate(buffers)

    def _start_fabric(self) -> None:
        """Start the fabric, unless that fails on any rank: then bytes go over sockets."""
        fabric: list[Fabric] = []

        def start() -> str:
            try:
                name = self._agreement.tag
                fabric.append(
                    Fabric(self._agreement.collective, name, self._offer, self._agreement.timeout, self._files.stopped)
                )
            except PeerLostError:
                raise
            except CheckpointError as error:
                return str(error)
            return ""

        def first_failure(failures: list[str]) -> str:
            return next(filter(None, failures), "")

        failure = "the ranks did not agree"
        try:
            failure = self._agreement.agree("fabric", start, first_failure, reports=str, decisions=str)
        finally:
            for each in fabric:
                if failure:
                    each.close()
                else:
                    self._fabric = FabricExchange(each, self._mover, self._machine_chunks.machines.numbers, self.rank)
        if failure and self.rank == 0:
            warn_no_fabric(failure)

    def _exchange_over_fabric(self, fabric: FabricExchange, number: int) -> set[int]:
        """Send and receive what passes between machines in a round; return the chunks that were delivered here."""
        chunks = ((chunk, reader, self._others(chunk, reader)) for reader, chunk in self._schedule.of_round(number))
        arrived: dict[int, int] = {}
        try:
            arrived = fabric.run(chunks, self._machine_chunks.loaded)
        except BaseException as error:  # noqa: BLE001  reported to the other ranks, then raised
            self._machine_chunks.failure = error
        self.received += sum(arrived.values())
        self._machine_chunks.add(f"{number}/across", {})
        return set(arrived)

    def _exchange_with_machines(self, number: int) -> None:
        """Send chunks that this rank has read to other machines, and receive chunks for this machine."""
        outgoing: dict[int, list[int]] = {}
        incoming: dict[int, list[int]] = {}
        machines = self._machine_chunks.machines.numbers
        for reader, chunk in self._schedule.of_round(number):
            if reader == self.rank:
                for ranks in self._others(chunk, reader):
                    outgoing.setdefault(ranks[chunk % len(ranks)], []).append(chunk)
            elif machines[reader] != machines[self.rank]:
                ranks = self._wanting_on(chunk).get(machines[self.rank], ())
                if ranks and ranks[chunk % len(ranks)] == self.rank:
                    incoming.setdefault(reader, []).append(chunk)
        # One array for all machines that get the same chunks.
        arrays = {tuple(chunks): self._joined(chunks) for chunks in outgoing.values()}
        memory = {rank: np.empty(sum(map(self._mover.nbytes, chunks)), np.uint8) for rank, chunks in incoming.items()}
        try:
            self._agreement.collective.exchange(
                f"{self._agreement.tag}/{number}/far",
                {rank: arrays[tuple(chunks)] for rank, chunks in outgoing.items()},
                memory,
                timeout=self._agreement.timeout,
            )
        except BaseException as error:  # noqa: BLE001  reported to the other ranks, then raised
            self._machine_chunks.failure = error
        received: dict[int, LoadedChunk] = {}
        for rank, chunks in incoming.items():
            begin = 0
            for chunk in chunks:
                data = memory[rank][begin : begin + self._mover.nbytes(chunk)]
                # `scatter` needs aligned data.
                buffers = [memoryview(data if begin % 16 == 0 else data.copy())]
                received[chunk] = LoadedChunk(buffers, segments_of_buffers(buffers))
                self.received += data.nbytes
                begin += data.nbytes
        self._machine_chunks.add(f"{number}/across", received)
