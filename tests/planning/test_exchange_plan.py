"""Shared reads compared with a plain enumeration."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.planning.exchange_plan import exchange_plan_of_rank, plan_shared_reads
from bytecheckpoint.representation.plans import SharedChunks
from bytecheckpoint.tuning import tuning

CHUNK = 8 << 20
BLOCK = 1 << 20

Range = tuple[int, int, int]


@st.composite
def plans(draw: st.DrawFn) -> list[list[Range]]:
    """Sorted disjoint ranges of each rank; none crosses the grid."""
    ranks = []
    for _ in range(draw(st.integers(1, 5))):
        blocks = draw(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 31)), max_size=40))
        ranks.append([(file, b * BLOCK, (b + 1) * BLOCK) for file, b in sorted(blocks)])
    return ranks


def columns(ranges: list[Range]) -> np.ndarray:
    return np.array(ranges, np.int64).reshape(-1, 3)


def worth_it(by_rank: dict[int, list[Range]]) -> bool:
    """Return whether the ranks copy at most two bytes for each byte that is not read again, if all read equally much."""
    ranges = [r for ranges in by_rank.values() for r in ranges]
    alone = sum(stop - start for _, start, stop in ranges)
    once = max(stop for _, _, stop in ranges) - min(start for _, start, _ in ranges)
    return alone * (len(by_rank) - 1) / len(by_rank) <= 2 * (alone - once)


@given(plans())
def test_shared_chunks_are_those_that_save_reading(ranks: list[list[Range]]) -> None:
    shared = plan_shared_reads([columns(r) for r in ranks], CHUNK)
    shared = SharedChunks.from_columns(shared.to_columns())
    touched: dict[tuple[int, int], dict[int, list[Range]]] = defaultdict(lambda: defaultdict(list))
    for rank, ranges in enumerate(ranks):
        for one in ranges:
            touched[one[0], one[1] // CHUNK][rank].append(one)
    expected = {key: by_rank for key, by_rank in sorted(touched.items()) if len(by_rank) > 1 and worth_it(by_rank)}
    ends = {
        key: (min(r[1] for p in by.values() for r in p), max(r[2] for p in by.values() for r in p))
        for key, by in expected.items()
    }
    if sum(stop - start for start, stop in ends.values()) < tuning().min_exchange_bytes:
        assert not len(shared)
        expected = {}
    else:
        assert list(zip(shared.file.tolist(), (shared.start // CHUNK).tolist(), strict=True)) == list(expected)
        assert list(zip(shared.start.tolist(), shared.stop.tolist(), strict=True)) == list(ends.values())
        sets = shared.rank_sets()
        assert len({tuple(s) for s in sets}) == len(sets)
        for number, by_rank in enumerate(expected.values()):
            assert sets[int(shared.wanted_by[number])] == sorted(by_rank)
            assert int(shared.reader[number]) in by_rank
    items = {key: number for number, key in enumerate(expected)}
    for rank, ranges in enumerate(ranks):
        part = exchange_plan_of_rank(shared, columns(ranges), CHUNK)
        want = {i: items[r[0], r[1] // CHUNK] for i, r in enumerate(ranges) if (r[0], r[1] // CHUNK) in items}
        assert dict(zip(part.covered_ranges.tolist(), part.covering_chunks.tolist(), strict=True)) == want, rank
        assert part.private.tolist() == [i for i in range(len(ranges)) if i not in want]


def test_replicas_share_the_reading_evenly() -> None:
    everything = columns([(0, n * CHUNK, (n + 1) * CHUNK) for n in range(64)])
    shared = plan_shared_reads([everything] * 8, CHUNK)
    assert np.bincount(shared.reader).tolist() == [8] * 8
    assert shared.rank_sets() == [list(range(8))]


def test_the_plan_of_a_thousand_replicas_takes_seconds_and_few_bytes() -> None:
    everything = columns([(0, n * CHUNK, (n + 1) * CHUNK) for n in range(200)])
    shared = plan_shared_reads([everything] * 1000, CHUNK)
    assert len(shared) == 200
    assert sum(map(len, shared.to_columns())) < 20_000


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_neighbours_read_the_block_at_their_border_twice(ranks: int) -> None:
    """Each rank wants a part of the rows: an exchange would save next to nothing."""
    total = 240 * CHUNK + 7 * BLOCK // 2
    borders = [(total * rank // ranks // BLOCK, -(-total * (rank + 1) // ranks // BLOCK)) for rank in range(ranks)]
    plans = [columns([(0, b * BLOCK, (b + 1) * BLOCK) for b in range(low, high)]) for low, high in borders]
    assert not len(plan_shared_reads(plans, CHUNK))


def test_columns_of_stored_rows_are_shared() -> None:
    """Every rank wants something of every block."""
    everything = columns([(file, n * CHUNK, (n + 1) * CHUNK) for file in range(4) for n in range(8)])
    assert len(plan_shared_reads([everything] * 4, CHUNK)) == 32


def test_what_lies_between_the_ranges_of_two_ranks_is_no_saving() -> None:
    """They want few blocks of a chunk, most of them different ones."""
    ranges = [(0, 0, BLOCK), (0, 7 * BLOCK, 8 * BLOCK)]
    first = columns([(0, n * CHUNK + s, n * CHUNK + e) for n in range(8) for _, s, e in ranges])
    second = columns([(0, n * CHUNK + s, n * CHUNK + e) for n in range(8) for _, s, e in ranges[:1]])
    assert not len(plan_shared_reads([first, second], CHUNK))
