"""The conformance suite against real object stores."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore.store
import pytest

from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.testing import RawAccess, StorageTests
from tests.servers.azure import AzureServer, azurite
from tests.servers.s3 import S3Server, minio, versitygw
from tests.storage.raw_access import ObstoreAccess

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


class _OnS3(StorageTests):
    start: Callable[[Path], S3Server]

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[S3Server]:
        folder = Path(tempfile.mkdtemp(prefix="s3-"))
        server = cls.start(folder)
        server.make_bucket("bucket")
        yield server
        server.server.stop()
        shutil.rmtree(folder, ignore_errors=True)

    @pytest.fixture
    def storage(self, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Storage:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        return resolve(f"s3://bucket/runs/{uuid.uuid4().hex}/step")

    def raw_access(self, storage: Storage) -> RawAccess:
        client = obstore.store.S3Store("bucket", client_options={"allow_http": True})
        return ObstoreAccess(client, storage.url.removeprefix("s3://bucket/"))


class TestVersityGateway(_OnS3):
    start = staticmethod(versitygw)


class TestMinio(_OnS3):
    start = staticmethod(minio)


class TestAzurite(StorageTests):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[AzureServer]:
        folder = Path(tempfile.mkdtemp(prefix="az-"))
        server = azurite(folder)
        server.make_container("container")
        yield server
        server.server.stop()
        shutil.rmtree(folder, ignore_errors=True)

    @pytest.fixture
    def storage(self, server: AzureServer, monkeypatch: pytest.MonkeyPatch) -> Storage:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        return resolve(f"az://container/runs/{uuid.uuid4().hex}/step")
