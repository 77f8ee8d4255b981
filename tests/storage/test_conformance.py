"""The conformance suite on every storage that needs no server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import obstore.store
import pytest

from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.objects.bucket import Bucket
from bytecheckpoint.storage.objects.storage import ObjectStorage
from bytecheckpoint.storage.testing import FolderAccess, RawAccess, StorageTests
from bytecheckpoint.storage.testing.wrappers import DelayedStorage, MeteredStorage, RetryingStorage
from tests.storage.raw_access import FsspecMemoryAccess, ObstoreAccess
from tests.support.memory import folder_in_memory


class TestLocal(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return resolve(tmp_path / "new" / "step")

    def raw_access(self, storage: Storage) -> RawAccess:
        return FolderAccess(Path(storage.url))


@pytest.mark.slow
class TestLocalByUrl(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return resolve(f"file://{tmp_path}/step")


class TestMemory(StorageTests):
    @pytest.fixture
    def storage(self, memory: str) -> Storage:
        return resolve(f"{memory}/step")

    def raw_access(self, storage: Storage) -> RawAccess:
        return FolderAccess(folder_in_memory(storage.url))


class TestWrapped(StorageTests):
    """The wrappers change nothing."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return MeteredStorage(RetryingStorage(DelayedStorage(resolve(tmp_path / "step"), 0.0), 1.0))

    def raw_access(self, storage: Storage) -> RawAccess:
        return FolderAccess(Path(storage.url))


class _InProcess(StorageTests):
    """One of obstore's own stores behind the code of the object stores."""

    def _bucket(self, tmp_path: Path) -> Bucket:
        raise NotImplementedError

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        self._store = self._bucket(tmp_path)
        return ObjectStorage("s3://bucket/runs/step", self._store)

    def again(self, storage: Storage) -> Storage:
        return ObjectStorage(storage.url, self._store)

    def neighbour(self, storage: Storage, suffix: str) -> Storage:
        return ObjectStorage(storage.url + suffix, self._store)


class TestObstoreMemory(_InProcess):
    def _bucket(self, tmp_path: Path) -> Bucket:
        self._client = obstore.store.MemoryStore()
        return Bucket("memory", self._client, 1.0)

    def raw_access(self, storage: Storage) -> RawAccess:
        return ObstoreAccess(self._client, "runs/step")


@pytest.mark.slow
class TestObstoreLocal(_InProcess):
    replaces = False

    def _bucket(self, tmp_path: Path) -> Bucket:
        self._folder = tmp_path / "runs" / "step"
        return Bucket("local", obstore.store.LocalStore(tmp_path, automatic_cleanup=True), 1.0)

    def raw_access(self, storage: Storage) -> RawAccess:
        return FolderAccess(self._folder)


class TestFsspecMemory(StorageTests):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        name = f"test-{uuid.uuid4().hex}"
        yield resolve(f"fsspec+memory://{name}/step")
        fsspec.filesystem("memory").store.clear()

    def raw_access(self, storage: Storage) -> RawAccess:
        return FsspecMemoryAccess(storage.url.partition("://")[2])


@pytest.mark.slow
class TestFsspecLocal(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return resolve(f"fsspec+file://{tmp_path}/step")

    def raw_access(self, storage: Storage) -> RawAccess:
        return FolderAccess(Path(storage.url.partition("://")[2]))
