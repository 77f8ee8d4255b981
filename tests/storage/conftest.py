"""Fixtures of the storage tests."""

from __future__ import annotations

import dataclasses
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.world import world_of
from tests.servers.azure import AzureServer, azurite
from tests.servers.fault_proxy import FaultProxy, fault_proxy
from tests.servers.hdfs import Hdfs
from tests.servers.s3 import S3Server, versitygw
from tests.support.worlds import Worlds


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """Every test begins with the defaults and no failure waiting to be raised."""
    before = bytecheckpoint.settings()
    yield
    bytecheckpoint.configure(**dataclasses.asdict(before))
    world = world_of(current())
    world.saves.drain()
    world.saves.forget_failure()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Processes over gloo for the tests of one file."""
    made = Worlds(tmp_path_factory.mktemp("worlds"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A versitygw for all tests of the run."""
    server = versitygw(tmp_path_factory.mktemp("versitygw"))
    yield server
    server.server.stop()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with the environment pointing to it."""
    use(monkeypatch, s3_server.environment())
    return s3_server


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """A new bucket of the server."""
    name = f"bucket-{uuid.uuid4().hex[:16]}"
    s3.make_bucket(name)
    return name


@pytest.fixture
def between(s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy that can meddle, before the S3 server."""
    with fault_proxy(s3.endpoint) as made:
        use(monkeypatch, s3.environment(made.endpoint))
        yield made


@pytest.fixture
def path(between: FaultProxy, bucket: str) -> str:
    """A step behind that proxy; files of tests that want another one have a `path` of their own."""
    return f"s3://{bucket}/runs/step"


@pytest.fixture
def storage(path: str, between: FaultProxy) -> Storage:
    """The storage of `path`, once its bucket has been tried out."""
    made = resolve(path)
    made.check_publish("metadata.parquet", "")
    between.requests.clear()
    return made


@pytest.fixture(scope="session")
def hdfs_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """A NameNode and two DataNodes for all tests of the run."""
    cluster = Hdfs(tmp_path_factory.mktemp("hdfs"))
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def hdfs(hdfs_cluster: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hdfs:
    """The cluster, with the environment pointing to it as hdfs://demo_0."""
    use(monkeypatch, hdfs_cluster.configuration(tmp_path / "hadoop"))
    return hdfs_cluster


@pytest.fixture(scope="session")
def az_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """An Azurite for all tests of the run, with a container "container"."""
    server = azurite(tmp_path_factory.mktemp("azurite"))
    server.make_container("container")
    yield server
    server.server.stop()


@pytest.fixture(params=["s3", "az", "hdfs", "mem"])
def root(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A place for checkpoints, by URL."""
    yield from _place(request, monkeypatch, tmp_path)


@pytest.fixture(params=["s3", "az", "hdfs", "mem", "file", "fsspec"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The same, on every kind of storage."""
    yield from _place(request, monkeypatch, tmp_path)


def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[str]:
    name = uuid.uuid4().hex
    if request.param == "s3":
        yield f"s3://{request.getfixturevalue('bucket')}/{name}"
    elif request.param == "az":
        use(monkeypatch, request.getfixturevalue("az_server").environment())
        yield f"az://container/{name}"
    elif request.param == "hdfs":
        request.getfixturevalue("hdfs")
        yield f"hdfs://demo_0/{name}"
    elif request.param == "mem":
        yield f"mem://test-{name}"
        shutil.rmtree(f"/dev/shm/bytecheckpoint-{os.geteuid()}/test-{name}", ignore_errors=True)
    else:
        yield f"{'fsspec+' if request.param == 'fsspec' else ''}file://{folder}/place"


def use(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Let clients, those of child processes too, find a server."""
    for name in [n for n in os.environ if n.startswith(("AWS_", "AZURE_", "GOOGLE_", "HADOOP_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
