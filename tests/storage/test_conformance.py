"""The conformance suite on every storage that needs no server."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import obstore.store
import pytest

from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.object_bucket import Bucket
from bytecheckpoint.storage.objects import ObjectStorage
from bytecheckpoint.storage.testing import StorageTests
from bytecheckpoint.storage.wrappers import DelayedStorage, MeteredStorage, RetryingStorage


class TestLocal(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return resolve(tmp_path / "new" / "step")


class TestLocalByUrl(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return resolve(f"file://{tmp_path}/step")


class TestMemory(StorageTests):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        name = f"test-{uuid.uuid4().hex}"
        yield resolve(f"mem://{name}/step")
        shutil.rmtree(f"/dev/shm/bytecheckpoint-{os.geteuid()}/{name}", ignore_errors=True)


class TestWrapped(StorageTests):
    """The wrappers change nothing."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return MeteredStorage(RetryingStorage(DelayedStorage(resolve(tmp_path / "step"), 0.0), 1.0))


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
        return Bucket("memory", obstore.store.MemoryStore(), 1.0)


class TestObstoreLocal(_InProcess):
    replaces = False

    def _bucket(self, tmp_path: Path) -> Bucket:
        return Bucket("local", obstore.store.LocalStore(tmp_path, automatic_cleanup=True), 1.0)


class TestFsspecMemory(StorageTests):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        name = f"test-{uuid.uuid4().hex}"
        yield resolve(f"fsspec+memory://{name}/step")
        fsspec.filesystem("memory").store.clear()


class TestFsspecLocal(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return resolve(f"fsspec+file://{tmp_path}/step")
