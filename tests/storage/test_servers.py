"""The conformance suite against real object stores."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore.store
import pytest

from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.testing import RawAccess, StorageTests
from tests.servers.azure import AzureServer, azurite
from tests.servers.s3 import S3Server, minio, versitygw
from tests.storage.conftest import use
from tests.storage.raw_access import ObstoreAccess

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


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
