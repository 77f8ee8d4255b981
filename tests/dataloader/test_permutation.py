"""Random orders: bijections for every length, the same for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.dataloader.permutation import MAX_LENGTH, Permutation, order_key
from bytecheckpoint.errors import UsageError


def order(length: int, key: int) -> list[int]:
    return Permutation(length, key).at(np.arange(length)).tolist()


@given(st.integers(0, 200) | st.integers(0, 3000), st.integers(0, 2**64 - 1))
def test_every_number_once(length: int, key: int) -> None:
    assert sorted(order(length, key)) == list(range(length))


@given(st.integers(1, MAX_LENGTH), st.integers(0, 2**64 - 1), st.integers(0))
def test_numbers_of_long_orders_are_below_the_length_and_distinct(length: int, key: int, first: int) -> None:
    count = min(length, 500)
    places = np.unique((np.arange(count, dtype=np.int64) * (length // count) + first % length) % length)
    numbers = Permutation(length, key).at(places)
    assert len(np.unique(numbers)) == len(places) and 0 <= numbers.min() <= numbers.max() < length


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1), st.data())
def test_a_place_has_the_same_number_alone_and_among_others(length: int, key: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, length - 1))
    assert Permutation(length, key).at(np.array([place])).tolist() == [order(length, key)[place]]


def test_orders_never_change() -> None:
    """Saved checkpoints rely on these numbers: a change of them is a fault, whatever it improves."""
    key = order_key(1234, 5, "wiki")
    assert key == 314106783112364556
    assert order(10, key) == [4, 1, 0, 8, 6, 3, 9, 5, 2, 7]
    assert order(17, order_key(0, 0, "")) == [11, 9, 6, 10, 16, 3, 0, 4, 13, 2, 15, 7, 5, 12, 8, 14, 1]
    assert Permutation(10**6, key).at(np.arange(6)).tolist() == [660713, 988916, 784520, 673581, 372675, 658324]
    long = Permutation(MAX_LENGTH, key)
    assert long.at(np.arange(4)).tolist() == [
        837940981133,
        698685274955,
        332736690560,
        489911163503,
    ]


def test_seed_epoch_and_name_each_give_another_order() -> None:
    keys = [order_key(seed, epoch, name) for seed in range(-2, 9) for epoch in range(9) for name in ("a", "b", "0\0a")]
    assert len(set(keys)) == len(keys)
    assert len({tuple(order(30, key)) for key in keys}) == len(keys)


@pytest.mark.parametrize("length", [5, 6, 7, 16])
def test_all_pairs_of_first_numbers_are_as_likely(length: int) -> None:
    """Chi-square over some orders for each pair; the seeds are fixed, so that the result is."""
    each = 40 if length < 10 else 10
    counts = np.zeros((length, length))
    trials = each * length * (length - 1)
    places = np.arange(2)
    for epoch in range(trials):
        first, second = Permutation(length, order_key(3, epoch, "pairs")).at(places)
        counts[first, second] += 1
    pairs = counts[~np.eye(length, dtype=bool)]
    assert np.trace(counts) == 0
    assert ((pairs - each) ** 2 / each).sum() < len(pairs) + 5 * np.sqrt(2 * len(pairs))


@pytest.mark.parametrize("length", [-1, MAX_LENGTH + 1])
def test_impossible_lengths(length: int) -> None:
    with pytest.raises(UsageError, match="cannot order"):
        Permutation(length, 0)
