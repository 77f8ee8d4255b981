"""Tests of reads of ranges: any offset and buffers, several threads, and files that disappear meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from bytecheckpoint.storage.base import FileReader, Storage
from bytecheckpoint.storage.testing.support import Suite, content, write_file

__all__ = ["RangeTests"]


class RangeTests(Suite):
    """A reader fills exactly the given memory with exactly the requested bytes."""

    @pytest.fixture
    def reader_of(self, storage: Storage) -> Callable[[NDArray[np.uint8]], FileReader]:
        """Return a function that writes a file and opens it."""

        def make(data: NDArray[np.uint8]) -> FileReader:
            write_file(storage, "model/file", data)
            return self.again(storage).open("model/file")

        return make

    def test_ranges(self, reader_of: Callable[[NDArray[np.uint8]], FileReader]) -> None:
        data = content(300_000)
        reader = reader_of(data)
        draw = random.Random(1)
        starts = [draw.randrange(len(data)) for _ in range(40)] + [len(data) - 1, len(data), len(data) + 5000]
        for start in starts:
            lengths = [draw.choice([0, 1, 7, 4096, 100_000]) for _ in range(draw.randrange(5))]
            buffers = [np.full(length, 0xAA, np.uint8) for length in lengths]
            expected = data[start : start + sum(lengths)]
            assert reader.read_into(start, [memoryview(b) for b in buffers]) == len(expected)
            got = np.concatenate([*buffers, np.zeros(0, np.uint8)])
            assert np.array_equal(got[: len(expected)], expected)
            assert (got[len(expected) :] == 0xAA).all(), "memory behind the file's end stays as it was"
        reader.close()

    def test_ranges_from_several_threads(self, reader_of: Callable[[NDArray[np.uint8]], FileReader]) -> None:
        data = content(self.large_bytes)
        reader = reader_of(data)
        out = np.zeros(len(data), np.uint8)
        step = 1_000_003

        def read(start: int) -> int:
            return reader.read_into(start, [memoryview(out)[start : start + step]])

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(read, range(0, len(data), step))) == len(data)
        reader.close()
        assert np.array_equal(out, data)

    def test_readers_are_apart(self, storage: Storage) -> None:
        data = content(100_000)
        write_file(storage, "model/file", data)
        first, second = storage.open("model/file"), storage.open("model/file")
        out = np.zeros(1000, np.uint8)
        assert first.read_into(5000, [memoryview(out)]) == 1000
        first.close()
        assert second.read_into(90_000, [memoryview(out)]) == 1000
        second.close()
        assert np.array_equal(out, data[90_000:91_000])

    def test_a_file_removed_while_it_is_read(self, storage: Storage) -> None:
        data = content(100_000)
        write_file(storage, "model/file", data)
        reader = storage.open("model/file")
        storage.delete(["model/file"])
        out = np.zeros(1000, np.uint8)
        got = reader.read_into(5000, [memoryview(out)])
        reader.close()
        assert got in (0, 1000)
        assert np.array_equal(out[:got], data[5000 : 5000 + got])
