"""What the ranks of one machine have in memory, round by round of an exchange."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Collection, Mapping, Sequence

import msgspec

from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.engine.exchange_chunks import LoadedChunk
from bytecheckpoint.engine.fabric import FabricOffer, warn_no_fabric
from bytecheckpoint.engine.peer_memory import pid_if_readable

__all__ = ["MachineChunks", "Machines"]

_log = logging.getLogger("bytecheckpoint")


@functools.cache
def _say_so() -> None:
    """Log once in a process that its loads are slower than they could be, and why."""
    _log.warning(
        "process %d cannot read the memory of other ranks of this machine (process_vm_readv): a container without shared "
        "process ids, seccomp or another user stands between them. They exchange bytes over sockets, which is slower",
        os.getpid(),
    )


class _RoundReport(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has in memory at the end of a round.

    Attributes:
        segments: chunk -> memory of its bytes, int64 rows of `Segments`.
        unreadable: this rank cannot read the memory of some rank of its host, and should. Only known in the first round.
        fabric, no_fabric: `FabricOffer.kind` and `reason` of this rank. Only in the first round.
    """

    segments: dict[int, bytes] = {}
    unreadable: bool = False
    fabric: str = ""
    no_fabric: str = ""


class _RoundDecision(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of one machine have in memory. Its size does not grow with the number of machines.

    Attributes:
        segments: rank of the same machine -> chunk -> memory of its bytes.
        unreadable_hosts: hosts on which some rank cannot read the memory of another.
        fabric: kind of the fabric that all ranks offer, "" where they do not.
    """

    segments: dict[int, dict[int, bytes]] = {}
    unreadable_hosts: list[int] = []
    fabric: str = ""


class Machines:
    """The machine of each rank: a group of ranks that can read each other's memory.

    Args:
        hosts: a number for each rank, equal for ranks of one host.
        rank: this rank.
        handshakes: `peer_handshake` of every rank; empty for one that takes no part in the exchange.

    Attributes:
        pids: process id of each rank of this host, 0 where this rank cannot read its memory.
        numbers: machine of each rank; empty before the first agreement.
    """

    def __init__(self, hosts: Sequence[int], rank: int, handshakes: Sequence[bytes]) -> None:
        self._hosts = list(hosts)
        host = hosts[rank]
        pairs = list(zip(hosts, handshakes, strict=True))
        self.pids = [pid_if_readable(handshake) if other == host else 0 for other, handshake in pairs]
        takes_part = [other == host and handshake != b"" for other, handshake in pairs]
        self._peers = list(itertools.compress(self.pids, takes_part)) if handshakes[rank] else []
        self.numbers: list[int] = []

    def has_unreadable_rank(self) -> bool:
        """Whether this rank cannot read the memory of some rank of its host with which it exchanges."""
        unreadable = not all(self._peers)
        if unreadable:
            _say_so()
        return unreadable

    def hosts_of(self, ranks: Sequence[int]) -> list[int]:
        """Return the hosts of some ranks, ascending."""
        return sorted({self._hosts[rank] for rank in ranks})

    def number_machines(self, unreadable_hosts: Sequence[int]) -> list[int]:
        """Assign a number to each machine; every rank of an unreadable host is a machine of its own."""
        names = [(host, rank if host in unreadable_hosts else -1) for rank, host in enumerate(self._hosts)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return [numbers[name] for name in names]

    def group(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        """Return the ranks by the numbers of their machines."""
        by_machine: dict[int, list[int]] = {}
        for rank in ranks:
            by_machine.setdefault(self.numbers[rank], []).append(rank)
        return by_machine

    def others(self, chunk: int, reader: int, wanting: Mapping[int, Sequence[int]]) -> list[Sequence[int]]:
        """Return the ranks of each other machine that want a chunk. Chunks take turns in who comes first.

        Args:
            chunk: number of the chunk.
            reader: the rank that reads it.
            wanting: `group` of the ranks that want it.
        """
        others = [ranks for number, ranks in wanting.items() if number != self.numbers[reader]]
        turn = chunk % len(others) if others else 0
        return others[turn:] + others[:turn]


class MachineChunks:
    """The chunks of one round, and where in the memory of this rank's machine they are.

    Args:
        agreement: of all ranks of the exchange.
        machines: numbered by the first round.
        offer: what this rank could use between machines.

    Attributes:
        machines: as given.
        offers_fabric: after the first round, whether all ranks offer the same fabric.
        loaded: chunks in this rank's memory.
        failure: of this rank; raised on every rank at the next agreement.
    """

    def __init__(self, agreement: Agreement, machines: Machines, offer: FabricOffer) -> None:
        self.machines = machines
        self.offers_fabric = False
        self.loaded: dict[int, LoadedChunk] = {}
        self.failure: BaseException | None = None
        self._agreement = agreement
        self._offer = offer
        self._remote: dict[int, tuple[int, bytes]] = {}

    def start_round(self, step: str, loaded: dict[int, LoadedChunk]) -> Collection[LoadedChunk]:
        """Report the chunks that this rank has read, and hear of those that other ranks of its machine have read.

        Args:
            step: names the agreement; unique.
            loaded: the chunks, now in this rank's memory.

        Returns:
            The chunks of the round before. Other ranks have copied all they want of them.

        Raises:
            CheckpointError: the failure of any rank.
        """
        remote = self._agree(step, loaded)
        before, self.loaded, self._remote = self.loaded, loaded, remote
        return before.values()

    def add(self, step: str, received: dict[int, LoadedChunk]) -> None:
        """Report and hear of chunks that came from other machines, as `start_round`."""
        self._remote.update(self._agree(step, received))
        self.loaded.update(received)

    def place_of(self, chunk: int) -> tuple[int, bytes]:
        """Return the rank of this machine that has a chunk, and the memory of the chunk there."""
        return self._remote[chunk]

    def _agree(self, step: str, loaded: Mapping[int, LoadedChunk]) -> dict[int, tuple[int, bytes]]:
        machines = self.machines

        def report() -> _RoundReport:
            if self.failure is not None:
                raise self.failure
            segments = {chunk: entry.segments.tobytes() for chunk, entry in loaded.items()}
            if machines.numbers:
                return _RoundReport(segments)
            return _RoundReport(segments, machines.has_unreadable_rank(), self._offer.kind, self._offer.reason)

        decision: _RoundDecision = self._agreement.agree_each(
            step, report, self._decide, reports=_RoundReport, decisions=_RoundDecision
        )
        if not machines.numbers:
            machines.numbers = machines.number_machines(decision.unreadable_hosts)
            self.offers_fabric = decision.fabric != "" and len(set(machines.numbers)) > 1
        return {
            chunk: (rank, segments) for rank, chunks in decision.segments.items() for chunk, segments in chunks.items()
        }

    def _decide(self, reports: Sequence[_RoundReport]) -> list[_RoundDecision]:
        """Make one decision per machine, for all its ranks. Runs on rank 0."""
        unreadable_hosts = self.machines.hosts_of([rank for rank, report in enumerate(reports) if report.unreadable])
        machines = self.machines.numbers or self.machines.number_machines(unreadable_hosts)
        segments: dict[int, dict[int, dict[int, bytes]]] = {}
        for rank, report in enumerate(reports):
            segments.setdefault(machines[rank], {})[rank] = report.segments
        fabric = "" if self.machines.numbers or len(segments) == 1 else self._common_fabric(reports)
        decisions = {machine: _RoundDecision(found, unreadable_hosts, fabric) for machine, found in segments.items()}
        return [decisions[machine] for machine in machines]

    def _common_fabric(self, reports: Sequence[_RoundReport]) -> str:
        """Return the fabric that all ranks offer; say why there is none if somebody could use one."""
        kinds = {report.fabric for report in reports}
        if len(kinds) == 1 and (kinds != {""} or not self._offer.asked):
            return kinds.pop()
        refusing = [f"rank {rank}: {report.no_fabric}" for rank, report in enumerate(reports) if not report.fabric]
        warn_no_fabric(refusing[0] if refusing else f"ranks have {' and '.join(sorted(kinds))}")
        return ""
