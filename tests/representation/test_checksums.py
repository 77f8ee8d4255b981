from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.representation.checksums import (
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    RunningSum,
    block_bytes,
    block_count,
    block_sum,
    block_sums,
)


@given(st.integers(0, 1 << 45))
def test_block_size_is_a_power_of_two_in_its_range_and_grows_with_the_file(length: int) -> None:
    size = block_bytes(length)
    assert MIN_BLOCK_BYTES <= size <= MAX_BLOCK_BYTES and size & (size - 1) == 0
    assert size <= block_bytes(length + 1)
    assert size == MAX_BLOCK_BYTES or block_count(length, size) <= 2048


def test_block_size_of_known_lengths() -> None:
    assert block_bytes(0) == block_bytes(128 << 20) == 64 << 10
    assert block_bytes((128 << 20) + 1) == 128 << 10
    assert block_bytes(2 << 30) == block_bytes(1 << 40) == 1 << 20


@given(st.binary(max_size=300), st.sampled_from([1, 2, 64, 128]))
def test_sums_are_those_of_the_slices(data: bytes, size: int) -> None:
    expected = [xxhash.xxh3_64_intdigest(data[i : i + size]) for i in range(0, len(data), size)]
    sums = block_sums(data, size)
    assert sums.dtype == np.uint64 and sums.tolist() == expected and len(expected) == block_count(len(data), size)
    assert block_sums(np.frombuffer(data, np.uint8), size).tolist() == expected
    assert block_sums(np.repeat(np.frombuffer(data, np.uint8), 4).view(np.int32), size * 4).shape == (len(expected),)


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_the_running_sum_equals_the_sum_of_the_whole(pieces: list[bytes]) -> None:
    running = RunningSum()
    running.update(b"of the block before")
    running.reset()
    for piece in pieces:
        running.update(memoryview(piece))
    assert running.value() == block_sum(b"".join(pieces))


def test_the_hash_is_xxh3_64_with_seed_0() -> None:
    assert block_sum(b"") == 0x2D06800538D394C2
