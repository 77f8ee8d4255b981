"""What ranks say to each other about tiers: every step ends with one verdict for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..collectives import Collective
from ..errors import error_from_report, error_report

__all__ = ["Machines", "Party"]


class Machines:
    """Which ranks share a machine.

    Args:
        hosts: the name of each rank's machine.

    Attributes:
        groups: the ranks of each machine, machines in the order of their first rank.
        of: the machine of each rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        groups: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            groups.setdefault(host, []).append(rank)
        self.groups = list(groups.values())
        number = {host: machine for machine, host in enumerate(groups)}
        self.of = [number[host] for host in hosts]

    def leads(self, rank: int) -> bool:
        """Whether `rank` acts for its machine."""
        return self.groups[self.of[rank]][0] == rank

    def partners(self, rank: int, replicas: int) -> list[int]:
        """The ranks of other machines that keep copies of what `rank` writes."""
        here = self.of[rank]
        place = self.groups[here].index(rank)
        found = []
        for step in range(1, min(replicas, len(self.groups) - 1) + 1):
            other = self.groups[(here + step) % len(self.groups)]
            found.append(other[place % len(other)])
        return found


class _Word(msgspec.Struct, frozen=True, array_like=True):
    error: dict[str, str] = {}
    rank: int = 0
    data: bytes = b""


class Party:
    """One rank's part in one conversation of all ranks.

    Args:
        collective: the ranks.
        tag: unique to the conversation, equal on all ranks.
        timeout: seconds that a step may take.
    """

    def __init__(self, collective: Collective, tag: str, timeout: float) -> None:
        self.rank = collective.rank
        self.collective = collective
        self.tag = tag
        self.timeout = timeout

    def machines(self) -> Machines:
        """Who stands where; all ranks call it."""
        hosts = self.collective.all_gather(f"{self.tag}/hosts", self.collective.host.encode(), timeout=self.timeout)
        return Machines([host.decode() for host in hosts])

    def agree(
        self,
        step: str,
        work: Callable[[], Any],
        decide: Callable[[list[Any]], Any] = lambda _: None,
    ) -> Any:
        """Do `work` on every rank, let rank 0 `decide` upon all results, return what it decided.

        Args:
            step: names the step; unique within the conversation.
            work: its result can be encoded by msgpack.
            decide: runs on rank 0 only; its result too.

        Raises:
            CheckpointError: what any rank's `work` raised, or `decide`, on every rank; each rank's own if it has one.
        """
        own: BaseException | None = None
        try:
            word = _Word(rank=self.rank, data=msgspec.msgpack.encode(work()))
        except BaseException as error:  # noqa: BLE001  told to the others, then raised
            own, word = error, _Word(error=error_report(error), rank=self.rank)

        def answers(gathered: list[bytes]) -> list[bytes]:
            return [msgspec.msgpack.encode(self._verdict(gathered, decide))] * len(gathered)

        told = self.collective.consult(
            f"{self.tag}/{step}", msgspec.msgpack.encode(word), answers, timeout=self.timeout
        )
        verdict = msgspec.msgpack.decode(told, type=_Word)
        if own is not None:
            raise own
        if verdict.error:
            raise error_from_report(verdict.error, prefix=f"rank {verdict.rank}: ")
        return msgspec.msgpack.decode(verdict.data)

    @staticmethod
    def _verdict(gathered: Sequence[bytes], decide: Callable[[list[Any]], Any]) -> _Word:
        words = [msgspec.msgpack.decode(word, type=_Word) for word in gathered]
        for word in words:
            if word.error:
                return word
        try:
            return _Word(data=msgspec.msgpack.encode(decide([msgspec.msgpack.decode(word.data) for word in words])))
        except BaseException as error:  # noqa: BLE001  told to all ranks
            return _Word(error=error_report(error))
