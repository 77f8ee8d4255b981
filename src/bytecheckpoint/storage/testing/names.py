"""Tests of names and folders: lookups, listings and deletions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bytecheckpoint.errors import StorageError, UsageError
from bytecheckpoint.storage.base import NewFile, Storage
from bytecheckpoint.storage.optional import folder_exists
from bytecheckpoint.storage.testing.support import Suite, content, read_all, write_file

__all__ = ["NameTests"]

_HOSTILE = (
    "", ".", "..", "/", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "/a", "a\0b", "a\nb", "a\\b", "c:\\x", "c:x",
    "mem://x/y", "file:///etc/passwd", "s3://bucket/key",
)  # fmt: skip
_ODD = ("model/with space", "model/%41%2F", "model/ünïcode-文", "model/#hash", "model/a+b&c=d,e;f", "model/~.-_'!()")
#: Seconds by which a server's clock may be wrong.
_CLOCK_ERROR = 86_400


class NameTests(Suite):
    """A folder contains its own files, and none of its neighbours."""

    @pytest.mark.parametrize("name", ["nothing", "model/nothing", "model", "a/b/c"])
    def test_missing_files(self, storage: Storage, name: str) -> None:
        write_file(storage, "model/file", content(10))
        for call in (storage.open, storage.read, storage.stat):
            with pytest.raises(FileNotFoundError):
                call(name)
        assert storage.version(name) == ""

    def test_an_empty_folder(self, storage: Storage) -> None:
        inner = self.neighbour(storage, "/step_1")
        for folder in (inner, storage):
            assert folder.list() == []
            assert folder.folders() == []
            assert folder.version("metadata.parquet") == ""
            folder.delete(["model/file", "metadata.parquet"])
            folder.delete([])
            with pytest.raises(FileNotFoundError):
                folder.read("metadata.parquet")
        assert self.again(storage).folders() == [], "looking makes no folders"

    def test_a_folder_with_files_exists(self, storage: Storage) -> None:
        inner = self.neighbour(storage, "/step_1")
        assert folder_exists(inner) == folder_exists(self.again(storage)), "False, or True in a store without folders"
        inner.publish("metadata.parquet", b"x")
        assert folder_exists(inner)
        assert folder_exists(self.again(storage))

    def test_stat(self, storage: Storage) -> None:
        write_file(storage, "model/file", content(1000))
        write_file(storage, "model/other", content(1000, 1))
        found = self.again(storage).stat("model/file")
        assert found.size == 1000
        assert found.version
        assert found.version == storage.stat("model/file").version
        assert self.again(storage).version("model/file") == storage.version("model/file") != ""
        assert found.modified == 0.0 or abs(found.modified - time.time()) < _CLOCK_ERROR, "seconds since 1970"

    def test_list_and_folders(self, storage: Storage) -> None:
        for name in ("b", "a", "Z", "model/z", "model/y", "extra/x"):
            write_file(storage, name, content(len(name)))
        other = self.again(storage)
        assert other.list() == [("Z", 1), ("a", 1), ("b", 1), ("extra/x", 7), ("model/y", 7), ("model/z", 7)]
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

    def test_adopted_files_outlive_their_first_name(self, storage: Storage) -> None:
        write_file(storage, "model/file", content(5000))
        other = self.neighbour(storage, "0")
        assert not other.adopt("model/missing", storage.url)
        adopted = other.adopt("model/file", storage.url)
        assert adopted or not storage.capabilities.links
        assert other.list() == [("model/file", 5000)] * adopted
        assert not other.adopt("model/file", storage.url) or not adopted, "a name that is taken stays as it is"
        storage.delete(["model/file"])
        assert not adopted or np.array_equal(read_all(other, "model/file"), content(5000))
        other.delete(["model/file"])

    def test_very_many_files(self, storage: Storage) -> None:
        names = [f"model/file-{number:05d}" for number in range(self.many)]
        self._create_all([(storage, name) for name in names])
        assert self.again(storage).list() == [(name, 0) for name in names]
        storage.delete(names[1:])
        assert self.again(storage).list() == [(names[0], 0)]

    def test_very_many_folders(self, storage: Storage) -> None:
        names = [f"step_{number:05d}" for number in range(self.many)]
        self._create_all([(storage, f"{name}/file") for name in names])
        assert self.again(storage).folders() == names
        storage.delete(f"{name}/file" for name in names)
        assert self.again(storage).folders() == [], "folders go with their last file"

    @staticmethod
    def _create_all(files: Sequence[tuple[Storage, str]]) -> None:
        def create(file: tuple[Storage, str]) -> None:
            storage, name = file
            storage.create(NewFile(name, 0, stable=True)).finish(0)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(create, files))

    def test_delete(self, storage: Storage) -> None:
        for number in range(30):
            write_file(storage, f"model/{number:02d}", content(number))
        storage.delete(["absent", "model/absent", *(f"model/{n:02d}" for n in range(0, 30, 2)), "model/gone"])
        left = [f"model/{n:02d}" for n in range(1, 30, 2)]
        assert [name for name, _ in self.again(storage).list()] == left
        for no_file in ("model", "model/0", "mode", "absent/absent"):
            with contextlib.suppress(StorageError):  # it may refuse a folder
                storage.delete([no_file])
        assert [name for name, _ in self.again(storage).list()] == left, "what only begins alike stays"
        storage.delete(name for name, _ in storage.list())
        assert self.again(storage).list() == []
        assert self.again(storage).folders() == [], "folders go with their last file"
        write_file(storage, "model/again", content(3))
        assert self.again(storage).list() == [("model/again", 3)]

    @pytest.mark.parametrize("name", _HOSTILE)
    def test_invalid_names(self, storage: Storage, name: str) -> None:
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
        odd = self.neighbour(storage, "/Run 7 %20 #1 ü+&=")
        assert odd.list() == []
        write_file(odd, "model/file", content(10))
        odd.publish("metadata.parquet", b"catalog", expected="")
        assert self.again(odd).list() == [("metadata.parquet", 7), ("model/file", 10)]
        assert self.again(odd).url == odd.url
        assert self.again(storage).folders() == ["Run 7 %20 #1 ü+&="]

    def test_its_url_resolves_to_it(self, storage: Storage) -> None:
        assert self.again(storage).url == storage.url
        assert not storage.url.endswith("/")
        assert self.neighbour(storage, "/").url == storage.url, "a slash at the end means nothing"
