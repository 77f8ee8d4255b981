"""The exchange: ranks read once what several of them want (ByteCheckpoint, section 4.1).

Every rank reads its share of the chunks, where possible directly into its own destinations. The other ranks of its
machine copy them out of its memory (`peer_memory`). One rank of each other machine receives them over the data plane,
for all ranks of that machine. An exchange consists of rounds: ranks read the chunks of a round, agree that all are
read, and copy them while the threads read the next round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.engine.exchange_items import ItemMover, LoadedItem
from bytecheckpoint.engine.exchange_rounds import MachineItems, Machines
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.peer_memory import segments_of_buffers
from bytecheckpoint.engine.reading import Readers
from bytecheckpoint.engine.scatter import ScatterPlan
from bytecheckpoint.errors import PeerLostError
from bytecheckpoint.representation.plans import ExchangePlan, SharedChunks
from bytecheckpoint.settings import Settings

__all__ = ["Exchange"]


class _Schedule:
    """Which rank reads which items in which round.

    Args:
        plan: the items.
        world_size: number of ranks.
        chunks: items that each rank reads in a round.

    Attributes:
        rounds: number of rounds.
        wanted_by: the ranks that want each item.
    """

    def __init__(self, plan: SharedChunks, world_size: int, chunks: int) -> None:
        self._chunks = chunks
        self._by_reader: list[list[int]] = [np.flatnonzero(plan.reader == rank).tolist() for rank in range(world_size)]
        self.rounds = max((-(-len(items) // chunks) for items in self._by_reader), default=0)
        rank_sets = plan.rank_sets()
        self.wanted_by = [rank_sets[number] for number in plan.wanted_by.tolist()]

    def items_of(self, rank: int, number: int) -> list[int]:
        """Return the items that a rank reads in round `number`."""
        return self._by_reader[rank][number * self._chunks : (number + 1) * self._chunks]

    def of_round(self, number: int) -> Iterator[tuple[int, int]]:
        """Iterate over the readers and items of round `number`, in the same order on every rank."""
        for reader in range(len(self._by_reader)):
            for item in self.items_of(reader, number):
                yield reader, item


class Exchange:
    """One rank's part of an exchange. All ranks construct it, call `run`, and call `release` when all have returned.

    Args:
        collective: the ranks.
        tag: names the exchange; unique.
        plan: the shared chunks ("items"), equal on all ranks, and this rank's part.
        hosts: a number for each rank, equal for ranks of one host.
        handshakes: `peer_memory.peer_handshake` of every rank.
        files: the checkpoint's files.
        scatter_plan: this rank's read plan with its destinations.
        chunk_bytes: longest item.
        chunks: items that each rank reads in a round, equal on all ranks.
        settings: threads and time limit.

    Attributes:
        rank: this rank.
        read: bytes read from storage.
        received: bytes copied from other ranks.
    """

    def __init__(
        self,
        collective: Collective,
        tag: str,
        plan: ExchangePlan,
        hosts: Sequence[int],
        handshakes: Sequence[bytes],
        files: FileSet,
        scatter_plan: ScatterPlan,
        *,
        chunk_bytes: int,
        chunks: int,
        settings: Settings,
    ) -> None:
        self.rank = collective.rank
        self._agreement = Agreement(collective, tag, settings.timeout)
        self._files = files
        self._threads = files.threads(settings.read_threads)
        self._mover = ItemMover(plan, files, scatter_plan, chunk_bytes)
        self._schedule = _Schedule(plan.shared, collective.world_size, chunks)
        self._items = MachineItems(self._agreement, Machines(hosts, collective.rank, handshakes))
        self.read = 0
        self.received = 0

    def run(self) -> None:
        """Read this rank's share of the items, and deliver all items that this rank wants.

        Raises:
            CorruptCheckpointError: as `FileSet.fetch`, on every rank.
            PeerLostError, CheckpointTimeoutError: another rank is gone or hangs.
        """
        if not self._schedule.rounds:
            return
        with (
            Readers(self._files, self._threads) as readers,
            ThreadPoolExecutor(self._threads, thread_name_prefix="bytecheckpoint-take") as copiers,
        ):
            reads: dict[int, Future[LoadedItem]] = {}
            for number in range(-1, self._schedule.rounds):
                # One round ahead. That takes buffers for three rounds: one being read, one whose readers wait for
                # slower ranks, one being copied.
                for item in self._schedule.items_of(self.rank, number + 1):
                    reads[item] = readers.submit(self._mover.load, item)
                if number >= 0:
                    self._run_round(number, reads, readers, copiers)
            if self._items.failure is not None:
                raise self._items.failure

    def release(self) -> None:
        """Release the memory from which other ranks copy. Call it when every rank has returned from `run`."""
        self._items.loaded = {}

    def _run_round(
        self, number: int, reads: dict[int, Future[LoadedItem]], readers: Readers, copiers: ThreadPoolExecutor
    ) -> None:
        loaded: dict[int, LoadedItem] = {}
        try:
            for item in self._schedule.items_of(self.rank, number):
                loaded[item] = readers.result(reads.pop(item))
                self.read += self._mover.nbytes(item)
        except BaseException as error:  # noqa: BLE001  reported to the other ranks, then raised
            self._items.failure = self._items.failure or error
        for item_before in self._items.start_round(str(number), loaded):
            self._mover.recycle(item_before)
        if len(set(self._items.machines.numbers)) > 1:
            self._exchange_with_machines(number)
        try:
            self._deliver(number, copiers)
        except BaseException as error:  # noqa: BLE001  reported to the other ranks in the next round, then raised
            self._items.failure = error

    def _deliver(self, number: int, copiers: ThreadPoolExecutor) -> None:
        """Bring the items of a round to this rank's destinations."""
        copies = []
        for _, item in self._schedule.of_round(number):
            if not self._mover.wants(item):
                continue
            loaded = self._items.loaded.get(item)
            if loaded is None:
                copies.append(copiers.submit(self._copy_from_rank, item, *self._items.place_of(item)))
            elif not loaded.delivered:
                self._mover.deliver(item, loaded.buffers[0])
        for copy in copies:
            self.received += copy.result()

    def _copy_from_rank(self, item: int, rank: int, segments: bytes) -> int:
        try:
            memory = np.frombuffer(segments, np.int64).reshape(-1, 2)
            return self._mover.copy_from_peer(item, self._items.machines.pids[rank], memory)
        except OSError as error:
            raise PeerLostError(f"rank {self.rank}: rank {rank} went away during an exchange: {error}") from error

    # --- other machines ---------------------------------------------------------------------------------------

    def _exchange_with_machines(self, number: int) -> None:
        """Send items that this rank has read to other machines, and receive items for this machine."""
        outgoing: dict[int, list[NDArray[np.uint8]]] = {}
        incoming: dict[int, list[int]] = {}
        for reader, item in self._schedule.of_round(number):
            receivers = self._items.machines.receivers(item, reader, self._schedule.wanted_by[item])
            if reader == self.rank:
                for rank in receivers:
                    pieces = (np.frombuffer(b, np.uint8) for b in self._items.loaded[item].buffers)
                    outgoing.setdefault(rank, []).extend(pieces)
            elif self.rank in receivers:
                incoming.setdefault(reader, []).append(item)
        memory = {rank: np.empty(sum(map(self._mover.nbytes, items)), np.uint8) for rank, items in incoming.items()}
        try:
            self._agreement.collective.exchange(
                f"{self._agreement.tag}/{number}/far",
                {rank: np.concatenate(parts) for rank, parts in outgoing.items()},
                memory,
                timeout=self._agreement.timeout,
            )
        except BaseException as error:  # noqa: BLE001  reported to the other ranks, then raised
            self._items.failure = error
        received: dict[int, LoadedItem] = {}
        for rank, items in incoming.items():
            begin = 0
            for item in items:
                data = memory[rank][begin : begin + self._mover.nbytes(item)]
                # `scatter` needs aligned data.
                buffers = [memoryview(data if begin % 16 == 0 else data.copy())]
                received[item] = LoadedItem(buffers, segments_of_buffers(buffers))
                self.received += data.nbytes
                begin += data.nbytes
        self._items.add(f"{number}/across", received)
