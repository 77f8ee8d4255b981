"""The machines of a job: which ranks share one, and which ranks hold replicas for which."""

from __future__ import annotations

from collections.abc import Sequence

from bytecheckpoint.collectives.agreement import Agreement

__all__ = ["FIRST_STEP", "Machines", "find_machines"]

#: The step of `find_machines`, the first one of an agreement that begins with it.
FIRST_STEP = "hosts"


class Machines:
    """Which ranks share a machine.

    Args:
        hosts: the name of each rank's machine.

    Attributes:
        groups: the ranks of each machine, machines in the order of their first rank.
        machine_of: number of each rank's machine, in `groups`.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        groups: dict[str, list[int]] = {}
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


def find_machines(agreement: Agreement) -> Machines:
    """Find out which ranks share a machine. Every rank calls it."""
    hosts: list[str] = agreement.agree(FIRST_STEP, lambda: agreement.collective.host, lambda hosts: hosts)
    return Machines(hosts)
