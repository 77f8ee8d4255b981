"""Tests of files that are written and read whole, as the engine does it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from bytecheckpoint.storage.base import NewFile, Storage
from bytecheckpoint.storage.testing.support import Suite, content, read_all, write_file

__all__ = ["FileTests"]

_ALIGN = 4096


def _aligned(nbytes: int) -> NDArray[np.uint8]:
    """Return zeroed memory whose address is a multiple of 4096, shape [nbytes]."""
    raw = np.zeros(nbytes + _ALIGN, np.uint8)
    shift = -raw.ctypes.data % _ALIGN
    return raw[shift : shift + nbytes]


class FileTests(Suite):
    """Read each file as it was written, with other files beside it."""

    @pytest.mark.parametrize("stable", [True, False])
    @pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 101, 4095, 4096, 4097, (1 << 20) + 1])
    def test_written_bytes_are_read(self, storage: Storage, nbytes: int, stable: bool) -> None:
        data = content(nbytes)
        write_file(storage, "model/file", data, stable=stable)
        other = self.again(storage)
        assert np.array_equal(read_all(other, "model/file"), data)
        whole = other.read("model/file")
        assert type(whole) is bytes
        assert whole == data.tobytes()
        assert other.stat("model/file").size == nbytes
        assert other.list() == [("model/file", nbytes)]

    @pytest.mark.parametrize("stable", [True, False])
    def test_a_large_file(self, storage: Storage, stable: bool) -> None:
        data = content(self.large_bytes)
        write_file(storage, "model/large", data, stable=stable, piece=3 << 20)
        assert np.array_equal(read_all(self.again(storage), "model/large"), data)

    @pytest.mark.parametrize("stable", [True, False])
    @pytest.mark.parametrize("announced", [0, 9_000, 100_000])
    def test_the_size_in_the_request_is_an_estimate(self, storage: Storage, announced: int, stable: bool) -> None:
        data = content(10_000)
        write_file(storage, "model/file", data, stable=stable, announced=announced)
        assert self.again(storage).list() == [("model/file", 10_000)]
        assert np.array_equal(read_all(self.again(storage), "model/file"), data)

    @pytest.mark.parametrize("nbytes", [8192, 10_000, (1 << 20) + 1])
    def test_a_file_written_past_the_page_cache(self, storage: Storage, nbytes: int) -> None:
        data = content(nbytes)
        writer = storage.create(NewFile("model/file", nbytes, direct=True))
        # A writer that takes only whole pages gets the last one padded, and truncates the file.
        memory = _aligned(-(-nbytes // _ALIGN) * _ALIGN if writer.direct else nbytes)
        memory[:nbytes] = data
        for start in (*range(_ALIGN, len(memory), 1 << 19), 0):
            stop = min(start + (1 << 19), len(memory)) if start else _ALIGN
            writer.write_at(start, [memoryview(memory)[start:stop]])
        writer.finish(nbytes)
        assert self.again(storage).list() == [("model/file", nbytes)]
        assert np.array_equal(read_all(self.again(storage), "model/file"), data)

    def test_hints(self, storage: Storage) -> None:
        writer = storage.create(NewFile("model/file", 10))
        assert not writer.direct, "aligned buffers are only for those who ask for `direct`"
        assert writer.preferred_bytes >= 1
        writer.write_at(0, [memoryview(content(10))])
        writer.finish(10)
        reader = storage.open("model/file")
        assert reader.preferred_bytes >= 1
        assert reader.match_size(10)
        assert not reader.match_size(11)
        reader.close()
        assert self.again(storage).capabilities == storage.capabilities

    def test_many_buffers_in_one_call(self, storage: Storage) -> None:
        data = content(5000)
        writer = storage.create(NewFile("model/file", 5000, stable=True))
        writer.write_at(0, [memoryview(data)[i : i + 1] for i in range(2500)])
        writer.write_at(2500, [memoryview(data)[2500:2500], memoryview(data)[2500:], memoryview(b"")])
        writer.finish(5000)
        reader = storage.open("model/file")
        out = np.zeros(5000, np.uint8)
        assert reader.read_into(0, [memoryview(out)[i : i + 2] for i in range(0, 5000, 2)]) == 5000
        reader.close()
        assert np.array_equal(out, data)

    def test_many_files_at_once(self, storage: Storage) -> None:
        """Files of equal names in several folders."""

        def write(number: int) -> None:
            write_file(storage, f"kind-{number % 3}/file-{number // 3:03d}", content(1000 + number, number))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(39)))
        other = self.again(storage)
        sizes = {f"kind-{n % 3}/file-{n // 3:03d}": 1000 + n for n in range(39)}
        assert other.list() == sorted(sizes.items())
        for name, size in sizes.items():
            assert np.array_equal(read_all(other, name), content(size, size - 1000))

    def test_a_whole_file_is_not_there_before_it_is_finished(self, storage: Storage) -> None:
        if not storage.capabilities.whole_files:
            return  # an unfinished file may be visible; the catalog names the complete ones
        data = content(self.large_bytes)
        writer = storage.create(NewFile("model/file", len(data), stable=True))
        writer.write_at(0, [memoryview(data)])
        assert self.again(storage).list() == []
        writer.finish(len(data))
        assert self.again(storage).list() == [("model/file", len(data))]

    @pytest.mark.parametrize("stable", [True, False])
    @pytest.mark.parametrize("moment", ["created", "written", "interrupted", "finished"])
    def test_an_aborted_file_is_gone(self, storage: Storage, moment: str, stable: bool) -> None:
        """And no other, complete or not."""
        data = content(10_000)
        write_file(storage, "model/other", data)
        beside = storage.create(NewFile("model/beside", 10_000, stable=True))
        beside.write_at(100, [memoryview(data)[100:]])
        writer = storage.create(NewFile("model/file", 10_000, stable=stable))
        if moment != "created":
            writer.write_at(0, [memoryview(data)])
        if moment == "interrupted":
            writer.interrupt()
        if moment == "finished":
            writer.finish(10_000)
        writer.abort()
        writer.abort()
        with pytest.raises(FileNotFoundError):
            storage.open("model/file")
        beside.write_at(0, [memoryview(data)[:100]])
        beside.finish(10_000)
        assert self.again(storage).list() == [("model/beside", 10_000), ("model/other", 10_000)]
        assert np.array_equal(read_all(self.again(storage), "model/beside"), data)
