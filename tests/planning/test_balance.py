from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.planning.balance import assign, scrambled
from bytecheckpoint.tuning import tuned


def rows(held: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    group = np.repeat(np.arange(len(held)), [len(h) for h in held])
    return group, np.array([r for h in held for r in h], np.int64)


def loads(writer: np.ndarray, nbytes: np.ndarray, world_size: int) -> np.ndarray:
    result = np.zeros(world_size, np.int64)
    np.add.at(result, writer, nbytes)
    return result


def worst_fit(held: list[list[int]], nbytes: list[int], load: list[int]) -> list[int]:
    load, writer = list(load), [-1] * len(held)
    for g, ranks in enumerate(held):
        if len(set(ranks)) == 1:
            writer[g] = ranks[0]
            load[ranks[0]] += nbytes[g]
    for g in sorted(range(len(held)), key=lambda g: (-nbytes[g], g)):
        if writer[g] < 0:
            writer[g] = min(held[g], key=lambda r: (load[r], r))
            load[writer[g]] += nbytes[g]
    return writer


def first_weak(values: np.ndarray, seed: int) -> np.ndarray:
    """Hash weakly at first: different sets collide, and only the exact check distinguishes them."""
    return scrambled(values, seed) if seed else values.astype(np.uint64)


WORLD = 6
holdings = st.lists(st.lists(st.integers(0, WORLD - 1), min_size=1, max_size=8), max_size=20)


@given(holdings, st.data())
def test_large_groups_follow_worst_fit_exactly(held: list[list[int]], data: st.DataObject) -> None:
    # At most 20 groups of similar size: none of them is small, so the plain greedy is the oracle.
    nbytes = data.draw(st.lists(st.integers(100, 900), min_size=len(held), max_size=len(held)))
    load = data.draw(st.lists(st.integers(0, 2000), min_size=WORLD, max_size=WORLD))
    group, rank = rows(held)
    before = np.array(load)
    writer = assign(group, rank, np.array(nbytes, np.int64), WORLD, before)
    assert writer.tolist() == worst_fit(held, nbytes, load)
    assert before.tolist() == load
    shuffled = np.random.default_rng(0).permutation(len(group))
    again = assign(group[shuffled], rank[shuffled], np.array(nbytes, np.int64), WORLD, before)
    assert (writer == again).all()


@given(holdings, st.data())
def test_every_writer_holds_what_it_writes(held: list[list[int]], data: st.DataObject) -> None:
    sizes = st.sampled_from([0, 0, 1, 2, 3, 10**4, 2**45])
    nbytes = data.draw(st.lists(sizes, min_size=len(held), max_size=len(held)))
    group, rank = rows(held)
    with tuned(small_group_part=data.draw(st.sampled_from([0, 1, 64]))):
        writer = assign(group, rank, np.array(nbytes, np.int64), WORLD, scramble=first_weak)
    assert all(w in h for w, h in zip(writer.tolist(), held, strict=True))


@given(
    st.lists(st.integers(0, 50), max_size=60),
    st.lists(st.integers(0, 400), min_size=1, max_size=6),
)
def test_loads_end_within_one_item_of_the_common_level(sizes: list[int], start: list[int]) -> None:
    size, load = np.array(sizes, np.int64), np.array(start, np.int64)
    group, rank = rows([list(range(len(load)))] * len(size))
    with tuned(small_group_part=0):  # all groups are small, and spread at once
        writer = assign(group, rank, size, len(load), load)
    final = load + loads(writer, size, len(load))
    level = next(x for x in range(max(start) + sum(sizes) + 1) if np.maximum(x - load, 0).sum() >= size.sum())
    largest = size.max(initial=0)
    assert (np.abs(final - np.maximum(load, level)) <= largest + 1).all()


def test_many_small_groups_are_level_in_runs() -> None:
    count, world = 50_000, 8
    rng = np.random.default_rng(1)
    nbytes = rng.integers(1024, 4097, count)
    group, rank = np.tile(np.arange(count), world), np.repeat(np.arange(world), count)
    start = np.array([10**6, 0, 0, 5, 0, 0, 0, 2 * 10**6])
    writer = assign(group, rank, nbytes, world, start)
    final = start + loads(writer, nbytes, world)
    assert np.ptp(final) <= 2 * 4096
    assert np.count_nonzero(np.diff(writer)) == world - 1, "each rank writes one run of neighbours"


def test_large_and_small_groups_mixed_over_overlapping_sets() -> None:
    # One embedding, many layers, a tail of norms, on 8 ranks; half of the norms are known to two ranks only.
    nbytes = np.array([10**8, *[10**7] * 40, *[10**3] * 20_000], np.int64)
    held = [list(range(8))] * (41 + 10_000) + [[6, 7]] * 10_000
    group, rank = rows(held)
    final = loads(assign(group, rank, nbytes, 8), nbytes, 8)
    assert final.max() == 10**8
    assert final.sum() == nbytes.sum()
    assert np.ptp(np.sort(final)[:-1]) <= 10**7


def test_nothing_to_assign() -> None:
    none = np.zeros(0, np.int64)
    assert assign(none, none, none, 4).tolist() == []


def test_a_group_without_holder_is_refused() -> None:
    with pytest.raises(AssertionError):
        assign(np.array([0]), np.array([0]), np.array([1, 1]), 1)
