"""The storages that are measured, and the clients and tools that they are compared with."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import hdfs_native
import numpy as np
import obstore
import obstore.store
from numpy.typing import NDArray

from tests.servers.azure import azurite
from tests.servers.gluster import Gluster
from tests.servers.hdfs import Hdfs
from tests.servers.s3 import versitygw
from tests.servers.tcp_proxy import tcp_proxy

__all__ = ["PLACES", "Peer", "Place"]

#: Limit of one connection in bytes per second, as of a busy network or disk.
_LIMIT = 20 << 20
_MOST_THREADS = 16
_numbers = itertools.count()


class Peer(ABC):
    """A client or tool that moves the same bytes.

    Attributes:
        name: its name in the table.
    """

    name: str

    @abstractmethod
    def target(self) -> str:
        """Return an unused name."""

    @abstractmethod
    def write(self, target: str, data: Any) -> None:
        """Write bytes durably."""

    @abstractmethod
    def read(self, target: str, out: NDArray[np.uint8]) -> None:
        """Read the bytes."""

    @abstractmethod
    def remove(self, target: str) -> None:
        """Remove the file."""

    def write_many(self, targets: Sequence[str], parts: Sequence[Any]) -> None:
        """Write several files, as many in parallel as our own arms do at most."""
        with ThreadPoolExecutor(_MOST_THREADS) as pool:
            list(pool.map(self.write, targets, parts))

    def read_many(self, targets: Sequence[str], outs: Sequence[NDArray[np.uint8]]) -> None:
        """Read several files, in the same way."""
        with ThreadPoolExecutor(_MOST_THREADS) as pool:
            list(pool.map(self.read, targets, outs))


@dataclass
class Place:
    """A storage to measure.

    Attributes:
        name: its name in the table.
        root: URL of the folder for everything.
        peers: the clients and tools that it is compared with.
        operations: returns the number of requests by operation so far, if its server counts them.
    """

    name: str
    root: str
    peers: list[Peer] = field(default_factory=list)
    operations: Callable[[], Mapping[str, int]] | None = None

    def fresh(self) -> str:
        """Return the URL of a folder that does not exist."""
        return f"{self.root}/{next(_numbers)}"


# --- HDFS -------------------------------------------------------------------------------------------------------------


class HdfsStream(Peer):
    """The client library as its manual shows: one stream."""

    name = "hdfs-native, one stream"

    def __init__(self, cluster: Hdfs, options: dict[str, str]) -> None:
        self._client: Any = hdfs_native.Client(f"hdfs://127.0.0.1:{cluster.port}", options)

    def target(self) -> str:
        return f"/peer/{next(_numbers)}"

    def write(self, target: str, data: Any) -> None:
        with self._client.create(target, hdfs_native.WriteOptions(overwrite=True)) as file:
            for start in range(0, len(data), 1 << 20):
                file.write(bytes(memoryview(data)[start : start + (1 << 20)]))  # it takes each byte of a view by itself

    def read(self, target: str, out: NDArray[np.uint8]) -> None:
        position = 0
        for piece in self._client.read(target).read_range_stream(0, len(out)):
            out[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
            position += len(piece)

    def remove(self, target: str) -> None:
        self._client.delete(target)


class HdfsShell(Peer):
    """Hadoop's command, from and to memory, with the start of its Java machine."""

    name = "hdfs dfs -put, -get"

    def __init__(self, cluster: Hdfs, options: dict[str, str], folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._options = [word for key, value in options.items() for word in ("-D", f"{key}={value}")]

    def target(self) -> str:
        return f"/peer/{next(_numbers)}"

    def _local(self, target: str) -> Path:
        return self._folder / target.rpartition("/")[2]

    def _run(self, *arguments: str) -> None:
        self._cluster.shell(*self._options, *arguments)

    def write(self, target: str, data: Any) -> None:
        self.write_many([target], [data])

    def write_many(self, targets: Sequence[str], parts: Sequence[Any]) -> None:
        local = [self._local(target) for target in targets]
        for path, part in zip(local, parts, strict=True):
            if not path.exists():
                path.write_bytes(part)
        folder = targets[0].rpartition("/")[0]
        # The command keeps the names of the local files.
        self._run("-put", "-f", *(["-t", "16"] if len(local) > 1 else []), *map(str, local), folder)

    def read(self, target: str, out: NDArray[np.uint8]) -> None:
        self._run("-get", "-f", target, str(self._local(target)) + ".got")

    def read_many(self, targets: Sequence[str], outs: Sequence[NDArray[np.uint8]]) -> None:
        folder = self._folder / "got"
        folder.mkdir(exist_ok=True)
        self._run("-get", "-f", "-t", str(_MOST_THREADS), *targets, str(folder))

    def remove(self, target: str) -> None:
        self._cluster.client().delete(target)


@contextmanager
def _hdfs(folder: Path, *, limited: bool) -> Iterator[Place]:
    local = Path("/dev/shm") / folder.name
    local.mkdir()
    cluster = Hdfs(folder / "hdfs", 2, java=())
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, local, ignore_errors=True)
        stack.callback(cluster.stop)
        cluster.start()
        options = {"dfs.client.use.datanode.hostname": "true"} if limited else {}
        variables = cluster.configuration(folder / "hadoop", **options)
        os.environ.update(variables)
        cluster.client().mkdirs("/peer", create_parent=True)
        if limited:
            for port in cluster.ports:
                proxy = stack.enter_context(tcp_proxy(f"127.0.0.1:{port}", "127.0.0.2", port))
                proxy.up.rate = proxy.down.rate = float(_LIMIT)
        name = f"hdfs, each connection limited to {_LIMIT >> 20} MiB/s" if limited else "hdfs"
        peers: list[Peer] = [HdfsStream(cluster, options), HdfsShell(cluster, options, local)]
        yield Place(name, "hdfs://demo_0/bench", peers, None if limited else lambda: _client_operations(cluster))


def _client_operations(cluster: Hdfs) -> dict[str, int]:
    """Return the number of the NameNode's operations for clients."""
    for_servers = ("SendHeartbeat", "Block", "Register", "VersionRequest", "RenewLease")
    found = cluster.operations()
    return {name: count for name, count in found.items() if not name.startswith(for_servers) and "Overall" not in name}


# --- object stores ----------------------------------------------------------------------------------------------------


class Obstore(Peer):
    """The client library by its defaults."""

    name = "obstore"

    def __init__(self, store: Any) -> None:
        self._store = store

    def target(self) -> str:
        return f"peer/{next(_numbers)}"

    def write(self, target: str, data: Any) -> None:
        obstore.put(self._store, target, memoryview(data).tobytes())

    def read(self, target: str, out: NDArray[np.uint8]) -> None:
        position = 0
        for piece in obstore.get(self._store, target).stream():
            out[position : position + len(piece)] = np.frombuffer(piece, np.uint8)
            position += len(piece)

    def remove(self, target: str) -> None:
        obstore.delete(self._store, target)


class OneStream(Obstore):
    """The same client with everything over one connection, which a limit per connection slows down."""

    name = "obstore, one stream"

    def write(self, target: str, data: Any) -> None:
        obstore.put(self._store, target, memoryview(data).tobytes(), use_multipart=False)


def _limited(stack: ExitStack, endpoint: str) -> str:
    """Return the endpoint of a proxy that limits each connection to `endpoint`."""
    address = endpoint.split("://")[1].partition("/")[0]
    proxy = stack.enter_context(tcp_proxy(address))
    proxy.up.rate = proxy.down.rate = float(_LIMIT)
    return endpoint.replace(address, proxy.address)


@contextmanager
def _s3(folder: Path, *, limited: bool) -> Iterator[Place]:
    with ExitStack() as stack:
        server = versitygw(folder)
        stack.callback(server.server.stop)
        server.make_bucket("bucket")
        endpoint = _limited(stack, server.endpoint) if limited else server.endpoint
        os.environ.update(server.environment(endpoint))
        store = obstore.store.S3Store("bucket", client_options={"allow_http": True})
        peers: list[Peer] = [Obstore(store), *([OneStream(store)] if limited else [])]
        name = f"s3, each connection limited to {_LIMIT >> 20} MiB/s" if limited else "s3 (versitygw)"
        yield Place(name, "s3://bucket/bench", peers)


@contextmanager
def _az(folder: Path) -> Iterator[Place]:
    server = azurite(folder)
    try:
        server.make_bucket("bench")
        variables = server.environment()
        os.environ.update(variables)
        store = obstore.store.AzureStore(
            "bench", endpoint=variables["AZURE_STORAGE_ENDPOINT"], client_options={"allow_http": True}
        )
        yield Place("az (Azurite)", "az://bench/bench", [Obstore(store)])
    finally:
        server.server.stop()


# --- fsspec -----------------------------------------------------------------------------------------------------------


class Fsspec(Peer):
    """The file system itself, as its manual shows."""

    name = "fsspec"

    def __init__(self, folder: Path) -> None:
        self._fs: Any = fsspec.filesystem("file")
        self._folder = folder

    def target(self) -> str:
        return str(self._folder / f"peer-{next(_numbers)}")

    def write(self, target: str, data: Any) -> None:
        self._fs.pipe_file(target, memoryview(data).tobytes())

    def read(self, target: str, out: NDArray[np.uint8]) -> None:
        out[:] = np.frombuffer(self._fs.cat_file(target), np.uint8)

    def remove(self, target: str) -> None:
        self._fs.rm_file(target)


@contextmanager
def _fsspec(folder: Path) -> Iterator[Place]:
    yield Place("fsspec (local files)", f"fsspec+file://{folder}/data", [Fsspec(folder)])


# --- local disk -------------------------------------------------------------------------------------------------------


class Dd(Peer):
    """dd, from and to memory, with fsync."""

    name = "dd"

    def __init__(self, folder: Path, memory: Path) -> None:
        self._folder, self._memory = folder, memory

    def target(self) -> str:
        return str(self._folder / f"peer-{next(_numbers)}")

    def _source(self, target: str) -> Path:
        return self._memory / Path(target).name

    def write(self, target: str, data: Any) -> None:
        source = self._source(target)
        if not source.exists():
            source.write_bytes(data)
        self._dd(str(source), target, "conv=fsync")

    def read(self, target: str, out: NDArray[np.uint8]) -> None:
        self._dd(target, "/dev/null")

    @staticmethod
    def _dd(source: str, target: str, *options: str) -> None:
        subprocess.run(["dd", f"if={source}", f"of={target}", "bs=8M", *options], check=True, capture_output=True)

    def remove(self, target: str) -> None:
        Path(target).unlink()


@contextmanager
def _local(folder: Path) -> Iterator[Place]:
    memory = Path("/dev/shm") / folder.name
    memory.mkdir()
    try:
        yield Place("local", str(folder / "data"), [Dd(folder, memory)])
    finally:
        shutil.rmtree(memory, ignore_errors=True)


@contextmanager
def _nas(folder: Path) -> Iterator[Place]:
    """Start a network file system: GlusterFS over FUSE, with its usual caches."""
    memory = Path("/dev/shm") / folder.name
    gluster = Gluster(folder / "gluster", "default")
    try:
        memory.mkdir()
        mount = gluster.mounts[0]
        yield Place("nas (GlusterFS)", str(mount / "data"), [Dd(mount, memory)])
    finally:
        gluster.stop()
        shutil.rmtree(memory, ignore_errors=True)


@contextmanager
def _mem(folder: Path) -> Iterator[Place]:
    memory = Path("/dev/shm") / folder.name
    (memory / "targets").mkdir(parents=True)
    try:
        yield Place("mem", f"mem://{folder.name}", [Dd(memory / "targets", memory)])
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(f"/dev/shm/bytecheckpoint-{os.geteuid()}/{folder.name}", ignore_errors=True)


PLACES: dict[str, Callable[[Path], AbstractContextManager[Place]]] = {
    "hdfs": lambda folder: _hdfs(folder, limited=False),
    "hdfs-limited": lambda folder: _hdfs(folder, limited=True),
    "s3": lambda folder: _s3(folder, limited=False),
    "s3-limited": lambda folder: _s3(folder, limited=True),
    "az": _az,
    "fsspec": _fsspec,
    "local": _local,
    "nas": _nas,
    "mem": _mem,
}
