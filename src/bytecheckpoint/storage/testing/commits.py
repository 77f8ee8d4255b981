"""Tests of commits: names are replaced atomically, by one of several publishers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bytecheckpoint.errors import StorageConflictError, StorageError
from bytecheckpoint.storage.base import Storage
from bytecheckpoint.storage.testing.support import Suite, all_at_once, content, read_all

__all__ = ["CommitTests"]


class CommitTests(Suite):
    """A reader sees the old bytes or the new ones, and one of several publishers succeeds."""

    def test_publish(self, storage: Storage) -> None:
        storage.check_publish("catalog", "")
        assert self.again(storage).list() == [], "a probe leaves nothing behind"
        versions = [""]
        # Shorter, longer and as long as the one before.
        for data in (b"first", b"second", b"SECOND", b"", b"x", content(3 << 20).tobytes(), b"last"):
            storage.publish("catalog", data)
            for each in (storage, self.again(storage)):
                assert each.read("catalog") == data == read_all(each, "catalog").tobytes()
                assert each.stat("catalog").size == len(data)
            assert self.again(storage).list() == [("catalog", len(data))], "nothing else is left behind"
            versions.append(storage.version("catalog"))
            assert self.again(storage).version("catalog") == versions[-1]
        assert len(set(versions)) == len(versions), "each content has its own version"

    def test_publish_in_a_new_folder(self, storage: Storage) -> None:
        storage.publish("model/file", b"first", expected="")
        assert self.again(storage).list() == [("model/file", 5)]
        assert self.again(storage).read("model/file") == b"first"

    def test_publish_with_an_expected_version(self, storage: Storage) -> None:
        storage.publish("catalog", b"first", expected="")
        first = storage.version("catalog")
        for wrong in ("", None) if self.replaces else ("",):
            if wrong is None:
                storage.publish("catalog", b"FIRST", expected=first)  # as long, and soon after
                wrong = first
            before = storage.read("catalog")
            with pytest.raises(StorageConflictError, match="another save"):
                storage.publish("catalog", b"another", expected=wrong)
            assert self.again(storage).read("catalog") == before
            assert self.again(storage).list() == [("catalog", 5)], "nothing else is left behind"
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
            return  # the storage does not guarantee it
        for trial in range(3):
            name = f"catalog-{trial}"
            if replacing:
                storage.publish(name, b"before")
            version = storage.version(name)

            def publish(number: int, name: str = name, version: str = version) -> int:
                self.again(storage).publish(name, b"%d" % number * 10_000, expected=version)
                return number

            got = all_at_once(8, publish)
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
