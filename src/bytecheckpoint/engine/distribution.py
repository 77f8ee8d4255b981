"""Describe who reads each shared chunk, in which round, and by which ranks it reaches the others that want it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from bytecheckpoint.representation.plans import SharedChunks

__all__ = ["Distribution", "Edge", "Schedule", "number_machines", "tree_of", "whose_turn"]

_T = TypeVar("_T")


class Schedule:
    """The rank that reads each chunk, and the round in which it reads.

    One machine has memory for all chunks of a round. If there are more ranks than that, they take turns.
    The ranks of one round are far from each other, and so on many machines, which all send at the same time.

    Args:
        plan: the chunks.
        chunks_per_round: largest number of chunks that each rank reads in a round.
        most: largest number of chunks of a round.

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

    def of_round(self, number: int) -> Iterator[tuple[int, int]]:
        """Iterate over the readers and chunks of a round, in the same order on every rank; none after the last round."""
        part = slice(*self._starts[number : number + 2]) if number < self.rounds else slice(0)
        return zip(self._readers[part], self._chunks[part], strict=True)

    def chunks_of(self, rank: int, number: int) -> list[int]:
        """Return the chunks that a rank reads in a round."""
        return [chunk for reader, chunk in self.of_round(number) if reader == rank]


class Edge(NamedTuple):
    """One transfer of a chunk in its broadcast tree.

    Attributes:
        stage: (0, n) for the n-th stage between machines, (1, n) for one inside of them. Ranks pass stages in order.
        rank: rank at the other end.
    """

    stage: tuple[int, int]
    rank: int


class Distribution:
    """The ways of the chunks, equal on all ranks. All movers of chunks follow them.

    The reader of a chunk has it first. On its own machine the others that want the chunk copy it out of the reader's
    memory. On each other machine one of the ranks that want it is the *receiver*, from whom the others of that machine
    copy it. Over a fabric, the chunk passes down a tree of the receivers, and then down a tree of each machine's ranks.

    Args:
        schedule: readers and rounds.
        machines: number of each rank's machine. Ranks of one machine can read each other's memory.
        rank: this rank.

    Attributes:
        machines: number of each rank's machine.
        rank: this rank.
        several: True if there are several machines.
    """

    def __init__(self, schedule: Schedule, machines: Sequence[int], rank: int) -> None:
        self.machines = machines
        self.rank = rank
        self.several = len(set(machines)) > 1
        self._schedule = schedule
        self._wanting: dict[int, Mapping[int, Sequence[int]]] = {}  # set of ranks -> machine -> ranks

    def remote_ranks(self, chunk: int, reader: int) -> list[Sequence[int]]:
        """Return the ranks of each other machine that want a chunk. Chunks take turns in the machine that comes first."""
        home = self.machines[reader]
        others = [ranks for machine, ranks in self._ranks_by_machine(chunk).items() if machine != home]
        turn = chunk % len(others) if others else 0
        return others[turn:] + others[:turn]

    def leaving(self, number: int) -> Iterator[tuple[int, int]]:
        """Iterate over the readers and chunks of a round that other machines want too, in the same order on every rank."""
        return (
            (reader, chunk) for reader, chunk in self._schedule.of_round(number) if self.remote_ranks(chunk, reader)
        )

    def sent_by_rank(self, number: int) -> dict[int, list[int]]:
        """Return the chunks of a round that this rank has read and sends, by receiver on another machine."""
        sent: dict[int, list[int]] = {}
        for chunk in self._schedule.chunks_of(self.rank, number):
            for ranks in self.remote_ranks(chunk, self.rank):
                sent.setdefault(whose_turn(ranks, chunk), []).append(chunk)
        return sent

    def received_by_rank(self, number: int) -> dict[int, list[int]]:
        """Return the chunks of a round that this rank receives for its machine, by reader on another machine."""
        received: dict[int, list[int]] = {}
        own = self.machines[self.rank]
        for reader, chunk in self._schedule.of_round(number):
            ranks = self._ranks_by_machine(chunk).get(own, ())
            if self.machines[reader] != own and ranks and whose_turn(ranks, chunk) == self.rank:
                received.setdefault(reader, []).append(chunk)
        return received

    def tree_edges(self, chunk: int, reader: int) -> tuple[list[Edge], list[Edge]]:
        """Return the edges to the parent (or none) and to the children of this rank in the chunk's broadcast trees."""
        remote = self.remote_ranks(chunk, reader)
        trees = [[reader, *(whose_turn(ranks, chunk) for ranks in remote)]]
        own = next((ranks for ranks in remote if self.machines[ranks[0]] == self.machines[self.rank]), ())
        if own:
            turn = chunk % len(own)
            trees.append([*own[turn:], *own[:turn]])
        parents: list[Edge] = []
        children: list[Edge] = []
        for level, holders in enumerate(trees):
            if self.rank in holders:
                parent, below = tree_of(holders.index(self.rank), holders)
                parents += [Edge((level, parent[0]), parent[1])] if parent else []
                children += [Edge((level, stage), rank) for stage, rank in below]
        return parents, children

    def _ranks_by_machine(self, chunk: int) -> Mapping[int, Sequence[int]]:
        """Return the ranks that want a chunk, by the number of their machine."""
        wanted_by = self._schedule.wanted_by[chunk]
        if wanted_by not in self._wanting:
            by_machine: dict[int, list[int]] = {}
            for rank in self._schedule.rank_sets[wanted_by]:
                by_machine.setdefault(self.machines[rank], []).append(rank)
            self._wanting[wanted_by] = by_machine
        return self._wanting[wanted_by]


def number_machines(hosts: Sequence[int], unreadable_hosts: Sequence[int]) -> list[int]:
    """Return a number for the machine of each rank.

    Args:
        hosts: number of each rank's host.
        unreadable_hosts: hosts on which some rank cannot read another one's memory. Each rank there counts as a machine.
    """
    names = [(host, rank if host in unreadable_hosts else -1) for rank, host in enumerate(hosts)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def whose_turn(ranks: Sequence[int], number: int) -> int:
    """Return the rank among `ranks` that acts for all of them in the matter of that number."""
    return ranks[number % len(ranks)]


def tree_of(position: int, holders: Sequence[_T]) -> tuple[tuple[int, _T] | None, list[tuple[int, _T]]]:
    """Return the parent (or None) and the children of a member of a binomial tree, each with its stage.

    In stage s the first 2**s holders have the data, and each sends it to the one 2**s places further on.

    >>> tree_of(1, "abcdef")
    ((0, 'a'), [(1, 'd'), (2, 'f')])

    Args:
        position: position of the member in `holders`.
        holders: members, the root first.
    """
    first = position.bit_length()
    parent = (first - 1, holders[position - (1 << first - 1)]) if position else None
    stages = range(first, (len(holders) - 1).bit_length())
    return parent, [(s, holders[position + (1 << s)]) for s in stages if position + (1 << s) < len(holders)]
