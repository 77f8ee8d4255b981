"""The exchange: ranks read once what several of them want (ByteCheckpoint, section 4.1).

Every rank reads its share of the chunks, where possible directly into its own destinations. The other ranks of its
machine copy them out of its memory (`peer_memory`). One rank of each other machine receives them over the data plane,
for all ranks of that machine. An exchange consists of rounds: ranks read the chunks of a round, agree that all are
read, and copy them while the threads read the next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.engine.exchange_items import ItemMover, LoadedItem
from bytecheckpoint.engine.file_set import FileSet
from bytecheckpoint.engine.peer_memory import pid_if_readable, segments_of_buffers
from bytecheckpoint.engine.reading import Readers
from bytecheckpoint.engine.scatter import ScatterPlan
from bytecheckpoint.errors import PeerLostError
from bytecheckpoint.representation.plans import ExchangePlan
from bytecheckpoint.settings import Settings

__all__ = ["Exchange"]


class _RoundReport(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has in memory at the end of a round.

    Attributes:
        segments: item -> memory of its bytes, int64 rows of `Segments`.
        unreadable: this rank cannot read the memory of some rank of its host. Only known in the first round.
    """

    segments: dict[int, bytes] = {}
    unreadable: bool = False


class _RoundDecision(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of one machine have in memory. Its size does not grow with the number of machines.

    Attributes:
        segments: rank of the same machine -> item -> memory of its bytes.
        unreadable_hosts: hosts on which some rank cannot read the memory of another.
    """

    segments: dict[int, dict[int, bytes]] = {}
    unreadable_hosts: list[int] = []


class _Machines:
    """The machine of each rank: a group of ranks that can read each other's memory.

    Args:
        hosts: a number for each rank, equal for ranks of one host.
        rank: this rank.
        handshakes: `peer_handshake` of every rank.

    Attributes:
        pids: process id of each rank of this host, 0 where this rank cannot read its memory.
        numbers: machine of each rank; empty before the first agreement.
    """

    def __init__(self, hosts: Sequence[int], rank: int, handshakes: Sequence[bytes]) -> None:
        self._hosts = list(hosts)
        self._host = hosts[rank]
        pairs = zip(hosts, handshakes, strict=True)
        self.pids = [pid_if_readable(handshake) if host == self._host else 0 for host, handshake in pairs]
        self.numbers: list[int] = []

    def has_unreadable_rank(self) -> bool:
        """Whether this rank cannot read the memory of some rank of its host."""
        return any(host == self._host and not pid for host, pid in zip(self._hosts, self.pids, strict=True))

    def hosts_of(self, ranks: Sequence[int]) -> list[int]:
        """Return the hosts of some ranks, ascending."""
        return sorted({self._hosts[rank] for rank in ranks})

    def numbers_without(self, unreadable_hosts: Sequence[int]) -> list[int]:
        """Number the machines; every rank of an unreadable host is a machine of its own."""
        names = [(host, rank if host in unreadable_hosts else -1) for rank, host in enumerate(self._hosts)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return [numbers[name] for name in names]

    def receivers(self, item: int, reader: int, ranks: Sequence[int]) -> list[int]:
        """Choose the rank of each other machine that receives an item, spreading the items over its ranks.

        Args:
            item: number of the item.
            reader: the rank that reads it.
            ranks: the ranks that want it.
        """
        by_machine: dict[int, list[int]] = {}
        for rank in ranks:
            by_machine.setdefault(self.numbers[rank], []).append(rank)
        by_machine.pop(self.numbers[reader], None)
        return [machine[item % len(machine)] for machine in by_machine.values()]


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
        self._collective = collective
        self._agreement = Agreement(collective, tag, settings.timeout)
        self._rank = collective.rank
        self._files = files
        self._chunks = chunks
        self._settings = settings
        self._mover = ItemMover(plan, files, scatter_plan, chunk_bytes)
        self._machines = _Machines(hosts, collective.rank, handshakes)
        world = range(collective.world_size)
        self._by_reader: list[list[int]] = [np.flatnonzero(plan.shared.reader == rank).tolist() for rank in world]
        rank_sets = plan.shared.rank_sets()
        self._wanted_by = [rank_sets[number] for number in plan.shared.wanted_by.tolist()]
        self._failure: BaseException | None = None
        self._loaded: dict[int, LoadedItem] = {}  # items of this round in this rank's memory
        self._remote: dict[int, tuple[int, bytes]] = {}  # items of this round elsewhere on this machine: rank, segments
        self.read = 0
        self.received = 0

    def run(self) -> None:
        """Read this rank's share of the items, and deliver all items that this rank wants.

        Raises:
            CorruptCheckpointError: as `FileSet.fetch`, on every rank.
            PeerLostError, CheckpointTimeoutError: another rank is gone or hangs.
        """
        rounds = max((-(-len(items) // self._chunks) for items in self._by_reader), default=0)
        if not rounds:
            return
        threads = self._files.threads(self._settings.read_threads)
        with (
            Readers(self._files, threads) as readers,
            ThreadPoolExecutor(threads, thread_name_prefix="bytecheckpoint-take") as copiers,
        ):
            reads: dict[int, Future[LoadedItem]] = {}
            for number in range(-1, rounds):
                # One round ahead. That takes buffers for three rounds: one being read, one whose readers wait for
                # slower ranks, one being copied.
                for item in self._items_of(self._rank, number + 1):
                    reads[item] = readers.submit(self._mover.load, item)
                if number >= 0:
                    self._run_round(number, reads, readers, copiers)
            if self._failure is not None:
                raise self._failure

    def release(self) -> None:
        """Release the memory from which other ranks copy. Call it when every rank has returned from `run`."""
        self._loaded = {}

    def _run_round(
        self, number: int, reads: dict[int, Future[LoadedItem]], readers: Readers, copiers: ThreadPoolExecutor
    ) -> None:
        loaded: dict[int, LoadedItem] = {}
        try:
            for item in self._items_of(self._rank, number):
                loaded[item] = readers.result(reads.pop(item))
                self.read += self._mover.nbytes(item)
        except BaseException as error:  # noqa: BLE001  reported to the other ranks, then raised
            self._failure = self._failure or error
        unreadable = number == 0 and self._machines.has_unreadable_rank()
        decision = self._agree(str(number), loaded, unreadable)
        # Ranks that have reported this round have copied all they want of the round before.
        for item_before in self._loaded.values():
            self._mover.recycle(item_before)
        self._loaded, self._remote = loaded, {}
        self._add_remote(decision)
        if number == 0:
            self._machines.numbers = self._machines.numbers_without(decision.unreadable_hosts)
        if len(set(self._machines.numbers)) > 1:
            self._exchange_with_machines(number)
        try:
            self._deliver(number, copiers)
        except BaseException as error:  # noqa: BLE001  reported to the other ranks in the next round, then raised
            self._failure = error

    def _deliver(self, number: int, copiers: ThreadPoolExecutor) -> None:
        """Bring the items of a round to this rank's destinations."""
        copies = []
        for reader in range(self._collective.world_size):
            for item in filter(self._mover.wants, self._items_of(reader, number)):
                loaded = self._loaded.get(item)
                if loaded is None:
                    copies.append(copiers.submit(self._copy_from_rank, item, *self._remote[item]))
                elif not loaded.delivered:
                    self._mover.deliver(item, loaded.buffers[0])
        for copy in copies:
            self.received += copy.result()

    def _copy_from_rank(self, item: int, rank: int, segments: bytes) -> int:
        try:
            memory = np.frombuffer(segments, np.int64).reshape(-1, 2)
            return self._mover.copy_from_peer(item, self._machines.pids[rank], memory)
        except OSError as error:
            raise PeerLostError(f"rank {self._rank}: rank {rank} went away during an exchange: {error}") from error

    def _items_of(self, rank: int, number: int) -> list[int]:
        return self._by_reader[rank][number * self._chunks : (number + 1) * self._chunks]

    # --- other machines ---------------------------------------------------------------------------------------

    def _exchange_with_machines(self, number: int) -> None:
        """Send items that this rank has read to other machines, and receive items for this machine."""
        outgoing: dict[int, list[NDArray[np.uint8]]] = {}
        incoming: dict[int, list[int]] = {}
        for reader in range(self._collective.world_size):
            for item in self._items_of(reader, number):
                receivers = self._machines.receivers(item, reader, self._wanted_by[item])
                if reader == self._rank:
                    for rank in receivers:
                        pieces = (np.frombuffer(b, np.uint8) for b in self._loaded[item].buffers)
                        outgoing.setdefault(rank, []).extend(pieces)
                elif self._rank in receivers:
                    incoming.setdefault(reader, []).append(item)
        memory = {rank: np.empty(sum(map(self._mover.nbytes, items)), np.uint8) for rank, items in incoming.items()}
        try:
            self._collective.exchange(
                f"{self._agreement.tag}/{number}/far",
                {rank: np.concatenate(parts) for rank, parts in outgoing.items()},
                memory,
                timeout=self._settings.timeout,
            )
        except BaseException as error:  # noqa: BLE001  reported to the other ranks, then raised
            self._failure = error
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
        decision = self._agree(f"{number}/across", received)
        self._loaded.update(received)
        self._add_remote(decision)

    # --- agreement --------------------------------------------------------------------------------------------

    def _agree(self, step: str, loaded: dict[int, LoadedItem], unreadable: bool = False) -> _RoundDecision:
        """Report this rank's items or failure, and return the items of its machine; raise the failure of any rank."""

        def report() -> _RoundReport:
            if self._failure is not None:
                raise self._failure
            segments = {item: entry.segments.tobytes() for item, entry in loaded.items()}
            return _RoundReport(segments, unreadable)

        return self._agreement.agree_each(step, report, self._decide, reports=_RoundReport, decisions=_RoundDecision)

    def _decide(self, reports: Sequence[_RoundReport]) -> list[_RoundDecision]:
        """Make one decision per machine, for all its ranks. Runs on rank 0."""
        unreadable_hosts = self._machines.hosts_of([rank for rank, report in enumerate(reports) if report.unreadable])
        machines = self._machines.numbers or self._machines.numbers_without(unreadable_hosts)
        segments: dict[int, dict[int, dict[int, bytes]]] = {}
        for rank, report in enumerate(reports):
            segments.setdefault(machines[rank], {})[rank] = report.segments
        decisions = {machine: _RoundDecision(found, unreadable_hosts) for machine, found in segments.items()}
        return [decisions[machine] for machine in machines]

    def _add_remote(self, decision: _RoundDecision) -> None:
        for rank, items in decision.segments.items():
            self._remote.update((item, (rank, segments)) for item, segments in items.items())
