"""The conformance suite: what every storage must do, as tests that a backend's own test class derives from.

    class TestMine(StorageTests):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(f"mine://{tmp_path}")

Needs pytest. Override `again` where `resolve(storage.url)` does not lead to the same files, and `large_bytes` so that a
file of that length takes several parts.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ..errors import StorageConflictError, StorageError, UsageError
from .base import FileReader, NewFile, Storage
from .registry import resolve

__all__ = ["StorageTests", "content", "read_all", "write_file"]

_HOSTILE = (
    "", ".", "..", "/", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "/a", "a\0b", "a\nb", "a\\b", "c:\\x", "c:x",
    "mem://x/y", "file:///etc/passwd", "s3://bucket/key",
)  # fmt: skip
_ODD = ("model/with space", "model/%41%2F", "model/ünïcode-文", "model/#hash", "model/a+b&c=d,e;f", "model/~.-_'!()")


def content(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    """Bytes of which any 8 in a row tell where they stand (and the seed), shape [nbytes]."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return (words ^ (words >> np.uint64(29))).view(np.uint8)[:nbytes]


def write_file(storage: Storage, name: str, data: NDArray[np.uint8], *, stable: bool = True, piece: int = 0) -> None:
    """Write a file as the engine does: pieces from several threads in any order, the first bytes last.

    Args:
        storage: where.
        name: of the file.
        data: its bytes, shape [nbytes].
        stable: as in `NewFile`. Otherwise each buffer is overwritten as soon as it was taken.
        piece: bytes of one piece; 0: such that there are some ten of them.
    """
    piece = piece or max(len(data) // 10, 1)
    head = min(100, len(data))
    writer = storage.create(NewFile(name, len(data), stable=stable))

    def one(start: int) -> None:
        part = data[start : start + piece]
        if stable:
            half = len(part) // 2
            writer.write_at(start, [memoryview(part)[:half], memoryview(part)[half:]])
            return
        scratch = part.copy()
        writer.write_at(start, [memoryview(scratch)])
        scratch[:] = 0xEE

    starts = list(range(head, len(data), piece))
    random.Random(len(data)).shuffle(starts)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, starts))
    if head:
        writer.write_at(0, [memoryview(data)[:head]])
    writer.finish(len(data))
    storage.sync([name])


def read_all(storage: Storage, name: str) -> NDArray[np.uint8]:
    """All bytes of a file through a reader, shape [nbytes]."""
    reader = storage.open(name)
    try:
        data = np.zeros(reader.size, np.uint8)
        assert reader.read_into(0, [memoryview(data)]) == reader.size
        return data
    finally:
        reader.close()


def _all_at_once(count: int, function: Callable[[int], Any]) -> list[Any]:
    """Call `function(number)` on `count` threads that start together; what each returned or raised."""
    start = threading.Barrier(count)

    def one(number: int) -> Any:
        start.wait()
        try:
            return function(number)
        except Exception as error:  # noqa: BLE001  it is what the caller asks for
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


class StorageTests:
    """Derive from it, define the fixture `storage`: an empty folder, which must not exist yet where that is possible."""

    #: A file of this length takes several parts.
    large_bytes = (20 << 20) + 4097
    #: Whether `publish` can replace what is expected. Some object stores can only create.
    replaces = True

    @pytest.fixture
    def storage(self) -> Storage:
        """The storage under test."""
        raise NotImplementedError

    def again(self, storage: Storage) -> Storage:
        """The same folder as another process finds it."""
        return resolve(storage.url)

    def neighbour(self, storage: Storage, suffix: str) -> Storage:
        """The folder whose address is that of `storage` with something behind it."""
        return resolve(storage.url + suffix)

    # --- files ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("stable", [True, False])
    @pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 101, 4095, 4096, 4097, (1 << 20) + 1])
    def test_what_is_written_is_read(self, storage: Storage, nbytes: int, stable: bool) -> None:
        data = content(nbytes)
        write_file(storage, "model/file", data, stable=stable)
        other = self.again(storage)
        assert np.array_equal(read_all(other, "model/file"), data)
        assert other.read("model/file") == data.tobytes()
        assert other.stat("model/file").size == nbytes
        assert other.list() == [("model/file", nbytes)]

    @pytest.mark.parametrize("stable", [True, False])
    def test_a_large_file(self, storage: Storage, stable: bool) -> None:
        data = content(self.large_bytes)
        write_file(storage, "model/large", data, stable=stable, piece=3 << 20)
        assert np.array_equal(read_all(self.again(storage), "model/large"), data)

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
        def one(number: int) -> None:
            write_file(storage, f"kind-{number % 3}/file-{number:03d}", content(1000 + number, number))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(40)))
        other = self.again(storage)
        expected = sorted((f"kind-{n % 3}/file-{n:03d}", 1000 + n) for n in range(40))
        assert other.list() == expected
        for name, size in expected:
            assert np.array_equal(read_all(other, name), content(size, size - 1000))

    def test_a_whole_file_is_not_there_before_it_is_finished(self, storage: Storage) -> None:
        if not storage.capabilities.whole_files:
            return  # it may be seen unfinished; the catalog says what is complete
        data = content(self.large_bytes)
        writer = storage.create(NewFile("model/file", len(data), stable=True))
        writer.write_at(0, [memoryview(data)])
        assert self.again(storage).list() == []
        writer.finish(len(data))
        assert self.again(storage).list() == [("model/file", len(data))]

    @pytest.mark.parametrize("stable", [True, False])
    @pytest.mark.parametrize("moment", ["created", "written", "interrupted", "finished"])
    def test_an_aborted_file_is_gone(self, storage: Storage, moment: str, stable: bool) -> None:
        data = content(10_000)
        write_file(storage, "model/other", data)
        writer = storage.create(NewFile("model/file", 10_000, stable=stable))
        if moment != "created":
            writer.write_at(0, [memoryview(data)])
        if moment == "interrupted":
            writer.interrupt()
        if moment == "finished":
            writer.finish(10_000)
        writer.abort()
        assert self.again(storage).list() == [("model/other", 10_000)]
        with pytest.raises(FileNotFoundError):
            storage.open("model/file")

    # --- ranges -----------------------------------------------------------------------------------------------

    @pytest.fixture
    def reader_of(self, storage: Storage) -> Callable[[NDArray[np.uint8]], FileReader]:
        """Writes a file and opens it."""

        def make(data: NDArray[np.uint8]) -> FileReader:
            write_file(storage, "model/file", data)
            return self.again(storage).open("model/file")

        return make

    def test_ranges(self, reader_of: Callable[[NDArray[np.uint8]], FileReader]) -> None:
        data = content(300_000)
        reader = reader_of(data)
        draw = random.Random(1)
        for _ in range(40):
            start = draw.randrange(len(data) + 10)
            lengths = [draw.choice([0, 1, 7, 4096, 100_000]) for _ in range(draw.randrange(4))]
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

        def one(start: int) -> int:
            return reader.read_into(start, [memoryview(out)[start : start + step]])

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(one, range(0, len(data), step))) == len(data)
        reader.close()
        assert np.array_equal(out, data)

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

    # --- names ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", ["nothing", "model/nothing", "model", "a/b/c"])
    def test_what_is_not_there(self, storage: Storage, name: str) -> None:
        write_file(storage, "model/file", content(10))
        for call in (storage.open, storage.read, storage.stat):
            with pytest.raises(FileNotFoundError):
                call(name)
        assert storage.version(name) == ""

    def test_an_empty_folder(self, storage: Storage) -> None:
        assert storage.list() == []
        assert storage.folders() == []
        assert storage.version("metadata.parquet") == ""
        storage.delete(["model/file", "metadata.parquet"])
        storage.delete([])
        with pytest.raises(FileNotFoundError):
            storage.read("metadata.parquet")

    def test_list_and_folders(self, storage: Storage) -> None:
        for name in ("b", "a", "model/z", "model/y", "extra/x"):
            write_file(storage, name, content(len(name)))
        other = self.again(storage)
        assert other.list() == [("a", 1), ("b", 1), ("extra/x", 7), ("model/y", 7), ("model/z", 7)]
        assert other.folders() == ["extra", "model"]

    def test_folders_with_like_names_are_apart(self, storage: Storage) -> None:
        write_file(storage, "model/file", content(10))
        longer, inner = self.neighbour(storage, "0"), self.neighbour(storage, "/step_1")
        assert longer.list() == []
        write_file(longer, "model/other", content(20))
        write_file(inner, "model/inner", content(30))
        assert longer.list() == [("model/other", 20)]
        assert inner.list() == [("model/inner", 30)]
        assert self.again(storage).list() == [("model/file", 10)], "only files and files in direct sub-folders"
        assert self.again(storage).folders() == ["model", "step_1"]
        longer.delete(["model/other"])
        inner.delete(["model/inner"])
        assert self.again(storage).list() == [("model/file", 10)]

    def test_delete(self, storage: Storage) -> None:
        for number in range(30):
            write_file(storage, f"model/{number:02d}", content(number))
        storage.delete([f"model/{n:02d}" for n in range(0, 30, 2)] + ["model/absent", "absent"])
        assert [name for name, _ in self.again(storage).list()] == [f"model/{n:02d}" for n in range(1, 30, 2)]
        storage.delete(name for name, _ in storage.list())
        assert self.again(storage).list() == []
        write_file(storage, "model/again", content(3))
        assert self.again(storage).list() == [("model/again", 3)]

    @pytest.mark.parametrize("name", _HOSTILE)
    def test_names_that_are_none(self, storage: Storage, name: str) -> None:
        calls: Sequence[Callable[[], object]] = (
            lambda: storage.create(NewFile(name, 1)),
            lambda: storage.open(name),
            lambda: storage.read(name),
            lambda: storage.stat(name),
            lambda: storage.publish(name, b"x"),
            lambda: storage.publish(name, b"x", expected=""),
            lambda: storage.delete([name]),
        )
        for call in calls:
            with pytest.raises(UsageError):
                call()
        assert self.again(storage).list() == []

    def test_names_of_odd_characters(self, storage: Storage) -> None:
        for number, name in enumerate(_ODD):
            write_file(storage, name, content(100, number))
        other = self.again(storage)
        assert other.list() == sorted((name, 100) for name in _ODD)
        for number, name in enumerate(_ODD):
            assert np.array_equal(read_all(other, name), content(100, number))
        other.delete(_ODD)
        assert other.list() == []

    def test_a_folder_of_odd_characters(self, storage: Storage) -> None:
        odd = self.neighbour(storage, "/run 7 %20 #1 ü+&=")
        assert odd.list() == []
        write_file(odd, "model/file", content(10))
        odd.publish("metadata.parquet", b"catalog", expected="")
        assert self.again(odd).list() == [("metadata.parquet", 7), ("model/file", 10)]
        assert self.again(odd).url == odd.url

    def test_its_url_leads_back_to_it(self, storage: Storage) -> None:
        assert self.again(storage).url == storage.url
        assert not storage.url.endswith("/")

    # --- commit -----------------------------------------------------------------------------------------------

    def test_publish(self, storage: Storage) -> None:
        storage.probe("catalog", "")
        storage.publish("catalog", b"first")
        first = storage.version("catalog")
        assert first and self.again(storage).version("catalog") == first
        assert self.again(storage).read("catalog") == b"first"
        storage.publish("catalog", b"second")
        assert self.again(storage).read("catalog") == b"second"
        assert storage.version("catalog") not in ("", first)
        assert self.again(storage).list() == [("catalog", 6)], "nothing else is left behind"
        data = content(3 << 20).tobytes()
        storage.publish("catalog", data)
        assert self.again(storage).read("catalog") == data

    def test_publish_what_is_expected(self, storage: Storage) -> None:
        storage.publish("catalog", b"first", expected="")
        first = storage.version("catalog")
        for wrong in ("", None) if self.replaces else ("",):
            if wrong is None:
                storage.publish("catalog", b"second", expected=first)
                wrong = first
            before = storage.read("catalog")
            with pytest.raises(StorageConflictError, match="another save"):
                storage.publish("catalog", b"another", expected=wrong)
            assert self.again(storage).read("catalog") == before
        second = storage.version("catalog")
        if self.replaces:
            storage.delete(["catalog"])
            with pytest.raises(StorageConflictError, match="another save"):
                storage.publish("catalog", b"third", expected=second)
            assert self.again(storage).list() == []
            return
        with pytest.raises(StorageError, match="path of its own"):
            storage.publish("catalog", b"third", expected=second)
        assert self.again(storage).read("catalog") == b"first"

    @pytest.mark.parametrize("replacing", [False, True])
    def test_one_of_several_publishers_wins(self, storage: Storage, replacing: bool) -> None:
        if not storage.capabilities.exclusive_publish or (replacing and not self.replaces):
            return  # it promises less
        for trial in range(3):
            name = f"catalog-{trial}"
            if replacing:
                storage.publish(name, b"before")
            version = storage.version(name)

            def one(number: int, name: str = name, version: str = version) -> int:
                self.again(storage).publish(name, b"%d" % number * 10_000, expected=version)
                return number

            got = _all_at_once(8, one)
            winners = [g for g in got if isinstance(g, int)]
            assert len(winners) == 1, got
            assert all(isinstance(g, int | StorageConflictError) for g in got), got
            assert self.again(storage).read(name) == b"%d" % winners[0] * 10_000

    def test_readers_never_see_a_mixture(self, storage: Storage) -> None:
        size = 200_000
        storage.publish("catalog", b"a" * size)
        stopped = threading.Event()
        seen: set[bytes] = set()

        def read() -> None:
            other = self.again(storage)
            while not stopped.is_set():
                data = other.read("catalog")
                assert len(data) == size
                seen.update(bytes([b]) for b in set(data))
                assert len(set(data)) == 1, "old and new bytes in one reading"

        def publish(letter: bytes) -> None:
            for _ in range(4):
                self.again(storage).publish("catalog", letter * size)

        with ThreadPoolExecutor(6) as pool:
            readers = [pool.submit(read) for _ in range(3)]
            try:
                for future in [pool.submit(publish, letter) for letter in (b"b", b"c", b"d")]:
                    future.result()
            finally:
                stopped.set()
            for future in readers:
                future.result()
        assert seen <= {b"a", b"b", b"c", b"d"}
        assert self.again(storage).read("catalog")[:1] in (b"b", b"c", b"d")
        assert self.again(storage).list() == [("catalog", size)], "nothing else is left behind"
