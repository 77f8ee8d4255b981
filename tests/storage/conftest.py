"""Fixtures of the storage tests."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.hdfs.storage import HdfsStorage
from bytecheckpoint.tuning import tuned
from tests.servers.azure import AzureServer, azurite
from tests.servers.fault_proxy import FaultProxy, fault_proxy
from tests.servers.hdfs import Hdfs
from tests.servers.peers import garbles, hangs_up, silent
from tests.servers.s3 import S3Server, minio, versitygw
from tests.servers.tcp_proxy import TcpProxy, tcp_proxy
from tests.support.memory import new_memory
from tests.support.settings import undisturbed
from tests.support.system_calls import Fail, failing
from tests.support.worlds import Worlds


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """Every test begins with the defaults and no failure waiting to be raised."""
    with undisturbed():
        yield


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of a place in memory."""
    with new_memory() as url:
        yield url


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Processes over gloo for the tests of one file."""
    made = Worlds(tmp_path_factory.mktemp("worlds"))
    yield made
    made.close()


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Lets a system call fail: `failing` without its first argument."""
    return functools.partial(failing, monkeypatch)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of a module that sets EVERY_S3_SERVER on each S3 server; on MinIO with the slow tests."""
    servers = [versitygw, pytest.param(minio, marks=pytest.mark.slow)]
    for name in ("s3_server", "mortal"):
        if name in metafunc.fixturenames and getattr(metafunc.module, "EVERY_S3_SERVER", False):
            metafunc.parametrize(name, servers, ids=["versitygw", "minio"], indirect=True)


@pytest.fixture(scope="session")
def s3_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A versitygw, or another server, for all tests of the run."""
    server = getattr(request, "param", versitygw)(tmp_path_factory.mktemp("s3"))
    yield server
    server.server.stop()


@pytest.fixture
def mortal(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server of the test's own, with a bucket "bucket"."""
    server = getattr(request, "param", versitygw)(tmp_path)
    server.make_bucket("bucket")
    use(monkeypatch, server.environment())
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
def hdfs(hdfs_cluster: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hdfs]:
    """The cluster, with the environment pointing to it as hdfs://demo_0; what a test kills runs again afterwards."""
    use(monkeypatch, hdfs_cluster.configuration(tmp_path / "hadoop"))
    yield hdfs_cluster
    hdfs_cluster.start()


@pytest.fixture
def rpc_proxy(hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpProxy]:
    """A proxy before the NameNode, which everything of the test goes through."""
    with tcp_proxy(f"127.0.0.1:{hdfs.port}") as made:
        use(monkeypatch, hdfs.configuration(tmp_path / "proxy", namenode=made.address))
        yield made


@pytest.fixture
def hdfs_path(hdfs: Hdfs) -> str:
    """A step in a folder of the test's own."""
    return f"hdfs://demo_0/tests/{uuid.uuid4().hex}/step"


@pytest.fixture
def hdfs_storage(hdfs_path: str) -> HdfsStorage:
    """The storage of `hdfs_path`."""
    made = resolve(hdfs_path)
    assert isinstance(made, HdfsStorage)
    return made


@pytest.fixture
def short_parts() -> Iterator[None]:
    """Files on HDFS are sent in sub-files of 1 MiB."""
    with tuned(hdfs_part_bytes=1 << 20):
        yield


@pytest.fixture(scope="session")
def az_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """An Azurite for all tests of the run, with a container "container"."""
    server = azurite(tmp_path_factory.mktemp("azurite"))
    server.make_bucket("container")
    yield server
    server.server.stop()


@pytest.fixture(scope="session")
def minio_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A MinIO for all tests of the run."""
    server = minio(tmp_path_factory.mktemp("minio"))
    yield server
    server.server.stop()


@pytest.fixture(params=["s3", "az", "hdfs", "mem", pytest.param("minio", marks=pytest.mark.slow)])
def root(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A place for checkpoints, by URL."""
    yield from place(request, monkeypatch, tmp_path)


#: Every kind of storage.
ANYWHERE = ["s3", "az", "hdfs", "mem", "file", "fsspec"]


@pytest.fixture(params=ANYWHERE)
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The same, on every kind of storage."""
    yield from place(request, monkeypatch, tmp_path)


@pytest.fixture(params=[silent, hangs_up, garbles])
def peer(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of something that is no server."""
    with request.param() as address:
        yield address


def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[str]:
    """Yield the URL of a new place on the kind of storage that is the fixture's parameter."""
    name = uuid.uuid4().hex
    if request.param == "s3":
        yield f"s3://{request.getfixturevalue('bucket')}/{name}"
    elif request.param == "minio":
        server = request.getfixturevalue("minio_server")
        use(monkeypatch, server.environment())
        server.make_bucket(name)
        yield f"s3://{name}/runs"
    elif request.param == "az":
        use(monkeypatch, request.getfixturevalue("az_server").environment())
        yield f"az://container/{name}"
    elif request.param == "hdfs":
        request.getfixturevalue("hdfs")
        yield f"hdfs://demo_0/{name}"
    elif request.param == "mem":
        yield request.getfixturevalue("memory")
    else:
        yield f"{'fsspec+' if request.param == 'fsspec' else ''}file://{folder}/place"


def use(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Let clients, those of child processes too, find a server."""
    for name in [n for n in os.environ if n.startswith(("AWS_", "AZURE_", "GOOGLE_", "HADOOP_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
