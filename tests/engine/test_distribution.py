"""Who reads each shared chunk, in which round, and on which way it reaches the others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.engine.distribution import Distribution, Schedule, number_machines, tree_of
from bytecheckpoint.representation.plans import SharedChunks


@st.composite
def shared_chunks(draw: Any, ranks: int) -> SharedChunks:
    """Chunks with the sets of ranks that want them; one rank of each set reads its chunk."""
    sets = draw(st.lists(st.sets(st.integers(0, ranks - 1), min_size=2).map(sorted), min_size=1, max_size=3))
    wanted_by = draw(st.lists(st.integers(0, len(sets) - 1), min_size=1, max_size=20))
    readers = [draw(st.sampled_from(sets[number])) for number in wanted_by]
    start = np.arange(len(wanted_by), dtype=np.int64)
    columns = (np.zeros_like(start), start, start + 1, readers, wanted_by)
    ends, flat = np.cumsum([len(each) for each in sets]), [rank for each in sets for rank in each]
    return SharedChunks(*(np.array(column, np.int64) for column in (*columns, ends, flat)))


@given(shared_chunks(6), st.integers(1, 3), st.integers(1, 8))
def test_every_chunk_is_read_in_one_round_and_a_machine_has_memory_for_a_round(
    plan: SharedChunks, chunks_per_round: int, most: int
) -> None:
    schedule = Schedule(plan, chunks_per_round, most)
    rounds = [list(schedule.of_round(number)) for number in range(schedule.rounds)]
    assert sorted(chunk for each in rounds for _, chunk in each) == list(range(len(plan)))
    assert all(plan.reader[chunk] == reader for each in rounds for reader, chunk in each)
    for each in rounds:
        assert 0 < len(each) <= most
        assert max(Counter(reader for reader, _ in each).values()) <= chunks_per_round
    assert list(schedule.of_round(schedule.rounds)) == []


@given(shared_chunks(6), st.lists(st.integers(0, 3), min_size=6, max_size=6), st.sets(st.integers(0, 3)))
def test_sockets_and_trees_bring_each_chunk_to_every_machine_once(
    plan: SharedChunks, hosts: list[int], unreadable: set[int]
) -> None:
    machines = number_machines(hosts, sorted(unreadable))
    schedule = Schedule(plan, 2, 8)
    ranks = [Distribution(schedule, machines, rank) for rank in range(6)]
    sets = plan.rank_sets()
    for number in range(schedule.rounds):
        sent = [(rank, to, c) for rank, d in enumerate(ranks) for to, cs in d.sent_by_rank(number).items() for c in cs]
        got = [
            (of, rank, c) for rank, d in enumerate(ranks) for of, cs in d.received_by_rank(number).items() for c in cs
        ]
        assert sorted(sent) == sorted(got)
        for reader, chunk in schedule.of_round(number):
            wanting = set(sets[plan.wanted_by[chunk]])
            reached = [machines[to] for _, to, c in sent if c == chunk]
            assert sorted(reached) == sorted({machines[rank] for rank in wanting} - {machines[reader]})
            assert ((reader, chunk) in set(ranks[0].leaving(number))) == bool(reached)
            edges = [distribution.tree_edges(chunk, reader) for distribution in ranks]
            below = {(child.stage, rank, child.rank) for rank, (_, children) in enumerate(edges) for child in children}
            above = [(parent.stage, parent.rank, rank) for rank, (parents, _) in enumerate(edges) for parent in parents]
            assert below == set(above), "both ends of a transfer know it"
            assert sorted(rank for _, _, rank in above) == sorted(
                rank for rank in wanting if machines[rank] != machines[reader]
            )


@given(st.integers(1, 300))
def test_every_holder_receives_once_from_one_that_has_it(count: int) -> None:
    holders = [f"rank {n}" for n in range(count)]
    received = {holders[0]: -1}
    sends: list[tuple[int, str, str]] = []
    for position, holder in enumerate(holders):
        parent, children = tree_of(position, holders)
        assert (parent is None) == (position == 0)
        sends += [(stage, holder, child) for stage, child in children]
        for stage, child in children:
            assert tree_of(holders.index(child), holders)[0] == (stage, holder)
    for stage, source, target in sorted(sends):
        assert received[source] < stage
        assert target not in received
        received[target] = stage
    assert len(received) == count
    assert max(received.values()) < count.bit_length()
    assert len({(stage, source) for stage, source, _ in sends}) == len(sends), "one send per stage"
