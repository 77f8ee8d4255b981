"""Tests that compare the files that are really stored with what the storage reports."""

from __future__ import annotations

import numpy as np
import pytest

from bytecheckpoint.errors import StorageConflictError
from bytecheckpoint.storage.base import NewFile, Storage
from bytecheckpoint.storage.testing.access import RawAccess
from bytecheckpoint.storage.testing.support import Suite, content, read_all, write_file

__all__ = ["RawTests"]


class RawTests(Suite):
    """A storage reports exactly the files that are stored. Skipped where the test class has no raw access."""

    @pytest.fixture
    def raw(self, storage: Storage) -> RawAccess:
        """Raw access to the folder of `storage`."""
        raw = self.raw_access(storage)
        if raw is None:
            pytest.skip("NOT TESTED HERE: the test class has no raw access")
        return raw

    def test_files_are_stored_under_their_names(self, storage: Storage, raw: RawAccess) -> None:
        large = content(self.large_bytes)
        write_file(storage, "model/large", large, piece=3 << 20)
        write_file(storage, "model/spooled", content(1000), stable=False)
        write_file(storage, "small", content(10))
        storage.publish("catalog", b"first", expected="")
        storage.publish("catalog", b"second")
        expected = {
            "catalog": b"second", "model/large": large.tobytes(), "model/spooled": content(1000).tobytes(),
            "small": content(10).tobytes(),
        }  # fmt: skip
        assert raw.files() == expected, "and no temporary file"
        assert storage.list() == sorted((name, len(data)) for name, data in expected.items())

    def test_files_of_other_writers(self, storage: Storage, raw: RawAccess) -> None:
        data = content(5000)
        raw.put("model/file", data.tobytes())
        assert storage.list() == [("model/file", 5000)]
        assert storage.folders() == ["model"]
        assert storage.stat("model/file").size == 5000
        assert storage.read("model/file") == data.tobytes()
        assert np.array_equal(read_all(storage, "model/file"), data)
        storage.delete(["model/file"])
        assert raw.files() == {}

    def test_files_that_others_remove(self, storage: Storage, raw: RawAccess) -> None:
        write_file(storage, "model/file", content(100))
        write_file(storage, "model/other", content(200))
        assert storage.version("model/file")
        raw.remove("model/file")
        for call in (storage.open, storage.read, storage.stat):
            with pytest.raises(FileNotFoundError):
                call("model/file")
        assert storage.version("model/file") == ""
        assert storage.list() == [("model/other", 200)]
        storage.delete(["model/file", "model/other"])
        assert storage.list() == [] and raw.files() == {}

    def test_a_file_that_another_writer_replaces(self, storage: Storage, raw: RawAccess) -> None:
        storage.publish("catalog", b"ours", expected="")
        version = storage.version("catalog")
        raw.put("catalog", b"of another writer")
        assert storage.read("catalog") == b"of another writer"
        assert storage.version("catalog") not in ("", version)
        for expected in ("", version) if self.replaces else ("",):
            with pytest.raises(StorageConflictError):
                storage.publish("catalog", b"ours again", expected=expected)
        assert raw.files() == {"catalog": b"of another writer"}

    @pytest.mark.parametrize("stable", [True, False])
    def test_aborted_files_leave_nothing(self, storage: Storage, raw: RawAccess, stable: bool) -> None:
        data = content(10_000)
        for moment in ("created", "written", "finished"):
            writer = storage.create(NewFile("model/file", 10_000, stable=stable))
            if moment != "created":
                writer.write_at(100, [memoryview(data)[100:]])
                writer.write_at(0, [memoryview(data)[:100]])
            if moment == "finished":
                writer.finish(10_000)
            writer.abort()
            assert raw.files() == {}, moment
