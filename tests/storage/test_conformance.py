"""The conformance suite on every storage that needs no server, and against real object stores."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import obstore.store
import pytest

from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.objects.bucket import Bucket, BucketClients
from bytecheckpoint.storage.objects.storage import ObjectStorage
from bytecheckpoint.storage.testing import FolderAccess, RawAccess, StorageTests
from bytecheckpoint.storage.testing.wrappers import DelayedStorage, MeteredStorage, RetryingStorage
from tests.servers.azure import AzureServer, azurite
from tests.servers.s3 import S3Server, minio, versitygw
from tests.storage.conftest import use
from tests.storage.raw_access import FsspecMemoryAccess, ObstoreAccess
from tests.support.memory import folder_in_memory


class TestLocal(StorageTests):
    prefix = ""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return resolve(f"{self.prefix}{tmp_path}/new/step")

    def raw_access(self, storage: Storage) -> RawAccess:
        return FolderAccess(Path(storage.url.rpartition("://")[2]))


@pytest.mark.slow
class TestLocalByUrl(TestLocal):
    prefix = "file://"


@pytest.mark.slow
class TestFsspecLocal(TestLocal):
    prefix = "fsspec+file://"


class TestWrapped(TestLocal):
    """The wrappers change nothing."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return MeteredStorage(RetryingStorage(DelayedStorage(resolve(tmp_path / "step"), 0.0), 1.0))


class TestMemory(StorageTests):
    @pytest.fixture
    def storage(self, memory: str) -> Storage:
        return resolve(f"{memory}/step")

    def raw_access(self, storage: Storage) -> RawAccess:
        return FolderAccess(folder_in_memory(storage.url))


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
        return Bucket("memory", BucketClients(*[self._client] * 3), 1.0)

    def raw_access(self, storage: Storage) -> RawAccess:
        return ObstoreAccess(self._client, "runs/step")


@pytest.mark.slow
class TestObstoreLocal(_InProcess):
    replaces = False

    def _bucket(self, tmp_path: Path) -> Bucket:
        self._folder = tmp_path / "runs" / "step"
        return Bucket("local", BucketClients(*[obstore.store.LocalStore(tmp_path, automatic_cleanup=True)] * 3), 1.0)

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


@pytest.mark.server
@pytest.mark.timeout(300)
class _OnServer(StorageTests):
    """The suite in a bucket of a server that only this class uses."""

    start: Callable[[Path], S3Server | AzureServer]
    bucket = "s3://bucket"

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server | AzureServer]:
        server = cls.start(tmp_path_factory.mktemp("server"))
        server.make_bucket("bucket")
        yield server
        server.server.stop()

    @pytest.fixture
    def storage(self, server: S3Server | AzureServer, monkeypatch: pytest.MonkeyPatch) -> Storage:
        use(monkeypatch, server.environment())
        return resolve(f"{self.bucket}/runs/{uuid.uuid4().hex}/step")


class _OnS3(_OnServer):
    def raw_access(self, storage: Storage) -> RawAccess:
        client = obstore.store.S3Store("bucket", client_options={"allow_http": True})
        return ObstoreAccess(client, storage.url.removeprefix("s3://bucket/"))


class TestVersityGateway(_OnS3):
    start = staticmethod(versitygw)


@pytest.mark.slow
class TestMinio(_OnS3):
    start = staticmethod(minio)


class TestAzurite(_OnServer):
    start = staticmethod(azurite)
    bucket = "az://bucket"
