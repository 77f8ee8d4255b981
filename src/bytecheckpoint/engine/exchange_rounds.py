"""Agree, round by round of an exchange, on the chunks that the ranks of one machine have in memory."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.engine.distribution import number_machines
from bytecheckpoint.engine.exchange_chunks import LoadedChunk
from bytecheckpoint.engine.fabric import FabricOffer, warn_no_fabric
from bytecheckpoint.engine.peer_memory import pid_if_readable

__all__ = ["MachineChunks", "PeerProcesses", "Topology"]

_log = logging.getLogger("bytecheckpoint")


@functools.cache
def _warn_unreadable() -> None:
    """Log once in a process that its loads are slower than they could be, and why."""
    _log.warning(
        "process %d cannot read the memory of other ranks of this machine (process_vm_readv): a container without shared "
        "process ids, seccomp or another user stands between them. They exchange bytes over sockets, which is slower",
        os.getpid(),
    )


class _RoundReport(msgspec.Struct, frozen=True, array_like=True):
    """The report of one rank at the end of a round.

    Attributes:
        segments: chunk in this rank's memory -> addresses of its bytes, int64 rows of `Segments`.
        unreadable: True if this rank cannot read the memory of some rank of its host, and should. Only in the first round.
        fabric, no_fabric: `FabricOffer.kind` and `reason` of this rank. Only in the first round.
    """

    segments: dict[int, bytes] = {}
    unreadable: bool = False
    fabric: str = ""
    no_fabric: str = ""


class _RoundDecision(msgspec.Struct, frozen=True, array_like=True):
    """The chunks in the memory of one machine. The size of this message does not grow with the number of machines.

    Attributes:
        segments: rank of the machine -> chunk -> addresses of its bytes.
        unreadable_hosts: hosts on which some rank cannot read the memory of another. Only in the first round.
        fabric: kind of the fabric that all ranks offer, "" if they do not. Only in the first round.
    """

    segments: dict[int, dict[int, bytes]] = {}
    unreadable_hosts: list[int] = []
    fabric: str = ""


class PeerProcesses:
    """The processes of the ranks of this host, as far as this rank can read their memory.

    Args:
        hosts: number of each rank's host.
        rank: this rank.
        handshakes: `peer_handshake` of every rank; empty for one that takes no part in the exchange.

    Attributes:
        hosts: number of each rank's host.
        pids: process id of each rank of this host, 0 where this rank cannot read its memory.
    """

    def __init__(self, hosts: Sequence[int], rank: int, handshakes: Sequence[bytes]) -> None:
        self.hosts = hosts
        host = hosts[rank]
        pairs = list(zip(hosts, handshakes, strict=True))
        self.pids = [pid_if_readable(handshake) if other == host else 0 for other, handshake in pairs]
        takes_part = [other == host and handshake != b"" for other, handshake in pairs]
        self._readable = list(itertools.compress(self.pids, takes_part)) if handshakes[rank] else []

    def some_unreadable(self) -> bool:
        """Return whether this rank cannot read the memory of some rank of its host with which it exchanges."""
        unreadable = not all(self._readable)
        if unreadable:
            _warn_unreadable()
        return unreadable


class Topology(NamedTuple):
    """The facts that the ranks agree on in the first round.

    Attributes:
        machines: number of each rank's machine.
        fabric: True if all ranks offer the same fabric, and there are several machines.
    """

    machines: list[int]
    fabric: bool


class MachineChunks:
    """The chunks of one round, and their places in the memory of this rank's machine.

    Args:
        agreement: agreement of all ranks of the exchange.
        peers: processes of this host.
        offer: fabric that this rank could use between machines.

    Attributes:
        peers: processes of this host.
        offer: fabric that this rank could use.
        loaded: chunks in this rank's memory.
        failure: failure of this rank; raised on every rank at the next agreement.
    """

    def __init__(self, agreement: Agreement, peers: PeerProcesses, offer: FabricOffer) -> None:
        self.loaded: dict[int, LoadedChunk] = {}
        self.failure: BaseException | None = None
        self._agreement = agreement
        self.peers = peers
        self.offer = offer
        self._machines: list[int] = []  # on rank 0, which decides for each machine
        self._places: dict[int, tuple[int, bytes]] = {}

    def start(self, step: str, loaded: dict[int, LoadedChunk]) -> Topology:
        """Start the first round as `start_round` does, and find out which ranks share a machine and a fabric."""
        decision = self._agree(step, loaded, first=True)
        self.loaded, self._places = loaded, _places(decision)
        machines = number_machines(self.peers.hosts, decision.unreadable_hosts)
        return Topology(machines, decision.fabric != "" and len(set(machines)) > 1)

    def start_round(self, step: str, loaded: dict[int, LoadedChunk]) -> Collection[LoadedChunk]:
        """Report the chunks that this rank has read, and receive the places of those of other ranks of its machine.

        Args:
            step: unique name of the agreement.
            loaded: chunks, now in this rank's memory.

        Returns:
            The chunks of the round before. Other ranks have copied all they want of them.

        Raises:
            CheckpointError: the failure of any rank.
        """
        decision = self._agree(step, loaded)
        before, self.loaded, self._places = self.loaded, loaded, _places(decision)
        return before.values()

    def add(self, step: str, received: dict[int, LoadedChunk]) -> None:
        """Report and receive the places of chunks that came from other machines, as `start_round`."""
        self._places.update(_places(self._agree(step, received)))
        self.loaded.update(received)

    def place_of(self, chunk: int) -> tuple[int, bytes]:
        """Return the rank of this machine that has a chunk, and the addresses of the chunk there."""
        return self._places[chunk]

    def _agree(self, step: str, loaded: Mapping[int, LoadedChunk], *, first: bool = False) -> _RoundDecision:
        def report() -> _RoundReport:
            if self.failure is not None:
                raise self.failure
            segments = {chunk: entry.segments.tobytes() for chunk, entry in loaded.items()}
            if not first:
                return _RoundReport(segments)
            return _RoundReport(segments, self.peers.some_unreadable(), self.offer.kind, self.offer.reason)

        decide = self._decide_first if first else self._decide
        decision: _RoundDecision = self._agreement.agree_each(
            step, report, decide, reports=_RoundReport, decisions=_RoundDecision
        )
        return decision

    def _decide_first(self, reports: Sequence[_RoundReport]) -> list[_RoundDecision]:
        """Decide which ranks share a machine, then decide as in every round. Runs on rank 0."""
        hosts = self.peers.hosts
        unreadable_hosts = sorted({hosts[rank] for rank, report in enumerate(reports) if report.unreadable})
        self._machines = number_machines(hosts, unreadable_hosts)
        fabric = self._common_fabric(reports) if len(set(self._machines)) > 1 else ""
        return self._decide(reports, unreadable_hosts, fabric)

    def _decide(
        self, reports: Sequence[_RoundReport], unreadable_hosts: Sequence[int] = (), fabric: str = ""
    ) -> list[_RoundDecision]:
        """Make one decision per machine, for all its ranks. Runs on rank 0."""
        segments: dict[int, dict[int, dict[int, bytes]]] = {}
        for rank, report in enumerate(reports):
            segments.setdefault(self._machines[rank], {})[rank] = report.segments
        decisions = {
            machine: _RoundDecision(found, list(unreadable_hosts), fabric) for machine, found in segments.items()
        }
        return [decisions[machine] for machine in self._machines]

    def _common_fabric(self, reports: Sequence[_RoundReport]) -> str:
        """Return the fabric that all ranks offer. Warn if there is none although some rank could use one."""
        kinds = {report.fabric for report in reports}
        if len(kinds) == 1 and (kinds != {""} or not self.offer.asked):
            return kinds.pop()
        refusing = [f"rank {rank}: {report.no_fabric}" for rank, report in enumerate(reports) if not report.fabric]
        warn_no_fabric(refusing[0] if refusing else f"ranks have {' and '.join(sorted(kinds))}")
        return ""


def _places(decision: _RoundDecision) -> dict[int, tuple[int, bytes]]:
    """Return the rank and the addresses of each chunk."""
    return {chunk: (rank, segments) for rank, chunks in decision.segments.items() for chunk, segments in chunks.items()}
