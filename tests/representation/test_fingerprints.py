"""Fingerprints: the sums equal the definition for any cut of a tensor, and show any change of one bit."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.representation.fingerprints import BoxSums, FileBoxSums, StoredBox, row_dims, weights

_MODULUS = 1 << 64


def defined(shape: tuple[int, ...], itemsize: int, data: bytes) -> list[int]:
    """Return the sums of a tensor by the definition in docs/format.md, word by word."""
    outer = row_dims(shape, itemsize)
    rows = math.prod(shape[:outer])
    size = len(data) // rows
    found = [0, 0]
    for number, at in enumerate(np.ndindex(shape[:outer])):
        row = data[number * size : (number + 1) * size]
        for word in range(-(-size // 8)):
            places = [*enumerate(at), (64, word // 1024), (65, word % 1024)]
            value = int.from_bytes(row[8 * word : 8 * word + 8], "little")
            for which in (0, 1):
                weight = math.prod(int(weights(dim, place, place + 1)[which, 0]) for dim, place in places)
                found[which] += weight * (value >> (32 * which))
    return [one % _MODULUS for one in found]


@st.composite
def tensors(draw: Any) -> tuple[tuple[int, ...], int]:
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    extents = st.integers(1, draw(st.sampled_from([3, 9, 40, 300])))
    shape = tuple(draw(st.lists(extents, max_size=4)))
    while math.prod(shape) * itemsize > 30_000:
        shape = shape[1:]
    return shape, itemsize


def tiles(
    chosen: random.Random, offsets: list[int], lengths: list[int], cuts: int
) -> list[tuple[list[int], list[int]]]:
    """Cut a box at random, some times."""
    dims = [k for k, length in enumerate(lengths) if length > 1]
    if not cuts or not dims:
        return [(offsets, lengths)]
    dim = chosen.choice(dims)
    at = chosen.randrange(1, lengths[dim])
    low, high, moved = lengths.copy(), lengths.copy(), offsets.copy()
    low[dim], high[dim], moved[dim] = at, lengths[dim] - at, offsets[dim] + at
    return tiles(chosen, offsets, low, cuts - 1) + tiles(chosen, moved, high, cuts - 1)


@given(tensors(), st.randoms(use_true_random=False))
def test_any_cut_has_the_sums_of_the_definition(tensor: tuple[tuple[int, ...], int], chosen: random.Random) -> None:
    shape, itemsize = tensor
    data = np.frombuffer(chosen.randbytes(math.prod(shape) * itemsize), np.uint8)
    elements, boxes, content = data.reshape(*shape, itemsize), [], []
    for offsets, lengths in tiles(chosen, [0] * len(shape), [*shape], chosen.randrange(4)):
        box = elements[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].tobytes()
        boxes.append(StoredBox(sum(map(len, content)), len(box), itemsize, shape, tuple(offsets), tuple(lengths)))
        content.append(box)
    file, section = FileBoxSums(boxes), memoryview(b"".join(content))
    cuts = sorted({0, len(section), *(chosen.randrange(len(section) + 1) for _ in range(chosen.randrange(5)))})
    for first, last in itertools.pairwise(cuts):
        middle = chosen.randrange(first, last)
        file.add(first, [section[first:middle], section[middle:last]])
    assert file.sums.sum(axis=0).tolist() == defined(shape, itemsize, data.tobytes())


@pytest.mark.parametrize(("shape", "itemsize"), [((3, 5000), 8), ((70_000,), 4), ((2, 3, 20_000), 2), ((70_000, 1), 8)])
def test_long_rows_and_many_rows(shape: tuple[int, ...], itemsize: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, math.prod(shape) * itemsize, np.uint8)
    whole = BoxSums(shape, itemsize, (0,) * len(shape), shape)
    assert whole.of(0, data).tolist() == defined(shape, itemsize, data.tobytes())


@pytest.mark.parametrize(
    ("shape", "itemsize"), [((8, 1024), 1), ((40, 3, 3, 5), 2), ((600,), 4), ((5, 7, 64), 8), ((33, 9), 16)]
)
def test_every_change_of_one_bit_shows(shape: tuple[int, ...], itemsize: int) -> None:
    random_bits = np.random.default_rng(0)
    data = random_bits.integers(0, 256, math.prod(shape) * itemsize, np.uint8)
    whole = BoxSums(shape, itemsize, (0,) * len(shape), shape)
    before, seen = whole.of(0, data), set()
    for place, bit in random_bits.integers(0, (len(data), 8), (2000, 2)).tolist():
        data[place] ^= 1 << bit
        after = whole.of(0, data)
        data[place] ^= 1 << bit
        assert after[0] != before[0]
        seen.add((int(after[0]), int(after[1]), place, bit))
    assert len({sums[:2] for sums in seen}) == len(seen), "different changes give different fingerprints"


def test_changes_that_cancel_in_one_sum_show_in_the_other() -> None:
    """Two changes of the highest bit of a word are multiples of 2**63: their sum is 0 for all odd weights."""
    data = np.zeros((64, 512), np.uint64)
    whole = BoxSums(data.shape, 8, (0, 0), data.shape)
    before = whole.of(0, data.tobytes())
    chosen = random.Random(0)
    for _ in range(500):
        changed = data.copy()
        for _ in range(2 * chosen.randrange(1, 4)):
            changed[chosen.randrange(64), chosen.randrange(512)] ^= np.uint64(1 << 63)
        after = whole.of(0, changed.tobytes())
        assert (after == before).all() == (not changed.any())
