"""The machines of a job: which ranks share one, and which ranks hold replicas for which."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Hashable, Sequence

from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.posix.storage import PosixStorage

__all__ = ["FIRST_STEP", "Machines", "find_machines"]

#: The first step of `find_machines`, and of an agreement that begins with it.
FIRST_STEP = "machines"

_log = logging.getLogger("bytecheckpoint")


class Machines:
    """The machines of a job, and the ranks on each.

    Args:
        hosts: name of the machine of each rank.

    Attributes:
        groups: the ranks of each machine, machines in the order of their first rank.
        machine_of: number of each rank's machine, in `groups`.
    """

    def __init__(self, hosts: Sequence[Hashable]) -> None:
        groups: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(hosts):
            groups.setdefault(host, []).append(rank)
        self.groups = list(groups.values())
        number = {host: machine for machine, host in enumerate(groups)}
        self.machine_of = [number[host] for host in hosts]

    def ranks_beside(self, rank: int) -> list[int]:
        """Return the ranks on the machine of `rank`, itself included."""
        return self.groups[self.machine_of[rank]]

    def leads(self, rank: int) -> bool:
        """Return whether `rank` acts for its machine: its first rank does."""
        return self.ranks_beside(rank)[0] == rank

    def partners(self, rank: int, replicas: int) -> list[int]:
        """Return the ranks on other machines that hold replicas of the files of `rank`."""
        machine = self.machine_of[rank]
        place = self.groups[machine].index(rank)
        found = []
        for distance in range(1, min(replicas, len(self.groups) - 1) + 1):
            group = self.groups[(machine + distance) % len(self.groups)]
            found.append(group[place % len(group)])
        return found


def find_machines(agreement: Agreement, root: PosixStorage) -> Machines:
    """Find out which ranks share a machine: those that see each other's files in the hot tier. Every rank calls it.

    Names prove nothing: containers may have one host name and boot, and memories of their own.

    Args:
        agreement: the ranks.
        root: this rank's hot tier. A rank that cannot write there counts as a machine of its own.
    """
    if agreement.collective.world_size == 1:
        return Machines([0])
    name = f".rank-{secrets.token_hex(8)}"

    def show() -> str:
        try:
            root.publish(name, b"")
        except StorageError as error:
            _log.warning("rank %d: %s", agreement.rank, error)
        return name

    def look(names: list[str]) -> int:
        present = {name}
        with contextlib.suppress(OSError):
            present.update(os.listdir(root.root))
        return next(rank for rank, other in enumerate(names) if other in present)

    try:
        names: list[str] = agreement.agree(FIRST_STEP, show, lambda names: names)
        first: list[int] = agreement.agree("first", lambda: look(names), lambda first: first)
    finally:
        with contextlib.suppress(StorageError):
            root.delete([name])
    return Machines(first)
