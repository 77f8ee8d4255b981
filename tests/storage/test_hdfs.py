"""HDFS against a real NameNode and two DataNodes: the conformance suite, what it costs, how it commits, what is refused."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import StorageError, StorageFullError, StorageUnavailableError
from bytecheckpoint.storage import Storage, hdfs_upload, resolve
from bytecheckpoint.storage.hdfs import HdfsStorage
from bytecheckpoint.storage.hdfs_rpc import _call, _number, _text
from bytecheckpoint.storage.testing import StorageTests, content, read_all, write_file
from tests.faults.coded import load_step, states
from tests.servers.hdfs import USER, Hdfs
from tests.servers.rpc_meddler import Event, RpcMeddler, rpc_meddler
from tests.storage.conftest import use

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

#: With sub-files of 1 MiB: a file of four.
LARGE = content((3 << 20) + 4097)
CATALOG = "metadata.parquet"


class TestHdfs(StorageTests):
    large_bytes = (40 << 20) + 4097

    @pytest.fixture
    def storage(self, hdfs: Hdfs) -> Storage:
        return resolve(f"hdfs://demo_0/runs/{uuid.uuid4().hex}/step")


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdfs_upload, "_LEAST_PART", 1 << 20)


@pytest.fixture
def folder(hdfs: Hdfs) -> str:
    return f"hdfs://demo_0/tests/{uuid.uuid4().hex}"


@pytest.fixture
def storage(folder: str) -> HdfsStorage:
    made = resolve(f"{folder}/step")
    assert isinstance(made, HdfsStorage)
    return made


@pytest.fixture
def between(hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RpcMeddler]:
    """A proxy before the NameNode, which everything of the test goes through."""
    with rpc_meddler(hdfs.port) as made:
        use(monkeypatch, hdfs.configuration(tmp_path / "between", namenode=made.address))
        yield made


# --- what it costs ----------------------------------------------------------------------------------------------------


class Operations:
    """Counts what the NameNode does for clients."""

    _servers = re.compile(
        "Overall|SendHeartbeat|Block(ReceivedAndDeleted|Report)|RegisterDatanode|VersionRequest|RenewLease"
    )

    def __init__(self, hdfs: Hdfs) -> None:
        self._hdfs = hdfs
        self._before = Counter(hdfs.operations())

    def since(self) -> Counter[str]:
        """How often each was asked for since the last look."""
        now = Counter(self._hdfs.operations())
        found = {name: count - self._before[name] for name, count in now.items() if not self._servers.match(name)}
        self._before = now
        return Counter({name: count for name, count in found.items() if count})


def test_operations_of_the_namenode(hdfs: Hdfs, storage: HdfsStorage, short_parts: None) -> None:
    """The table in docs/how-to/choose-a-storage.md."""
    write_file(storage, "model/before", content(100))  # the client has asked for the server's defaults
    operations = Operations(hdfs)

    def spent(call: Callable[[], object], files: int = 0) -> Counter[str]:
        """Without "complete", which may have to be repeated until a DataNode has reported the file's block."""
        call()
        found = operations.since()
        assert files <= found.pop("Complete", 0) <= 5 * files
        return found

    assert spent(lambda: write_file(storage, "model/small", content(1000)), 1) == {"Create": 1, "AddBlock": 1}
    large = spent(lambda: write_file(storage, "model/large", LARGE), 4)
    assert large == {"Create": 4, "AddBlock": 4, "Concat": 1}
    assert spent(lambda: read_all(storage, "model/large")) == {"GetBlockLocations": 1}
    assert spent(lambda: storage.read("model/small")) == {"GetBlockLocations": 1}
    assert spent(lambda: storage.stat("model/small")) == {"GetFileInfo": 1}
    assert spent(storage.list) == {"GetListing": 2}
    first = spent(lambda: storage.publish(CATALOG, b"first", expected=""), 1)
    assert first == {"Create": 1, "AddBlock": 1, "Rename2": 1}
    version = storage.version(CATALOG)
    assert operations.since() == {"GetFileInfo": 1}
    assert spent(lambda: storage.publish(CATALOG, b"second", expected=version), 1) == {
        "Create": 1, "AddBlock": 1, "Rename2": 2, "GetFileInfo": 1, "GetBlockLocations": 1,
    }  # fmt: skip
    assert spent(lambda: storage.delete(["model/small"])) == {"Delete": 1}, "there are other files in its folder"


def test_operations_of_a_whole_save_and_load(hdfs: Hdfs, folder: str) -> None:
    path = f"{folder}/step"
    bytecheckpoint.save(path, states(step=1), async_checkpoint=True).result(60)  # the writer process is there
    operations = Operations(hdfs)
    bytecheckpoint.save(f"{path}-2", states(step=2), async_checkpoint=True).result(60)
    save = operations.since()
    files = len(resolve(f"{path}-2").list())
    assert save["Create"] == save["AddBlock"] == files
    assert save["Rename2"] == 1
    assert save["GetFileInfo"] <= 1 and save["GetListing"] <= 4 and save["Delete"] == 0
    operations.since()
    load_step(f"{path}-2")
    assert operations.since() == {"GetBlockLocations": files}, "every file is opened once, and nothing else is asked"
    bytecheckpoint.save(f"{path}-2", states(step=3), async_checkpoint=True).result(60)
    replaced = operations.since()
    assert replaced["Create"] == replaced["AddBlock"] == files
    assert replaced["Rename2"] == 2 and replaced["Delete"] == files - 1, "the old files, and no folders"
    assert replaced["GetFileInfo"] == 2 and replaced["GetListing"] <= 4 and replaced["GetBlockLocations"] == 1


def test_a_load_reads_no_byte_twice(hdfs: Hdfs, folder: str) -> None:
    """As the DataNodes count it: with checksums of 4 bytes for 512, to which ranges are rounded."""
    path = f"{folder}/step"
    bytecheckpoint.save(path, states(step=1, rows=50_000))
    sizes = sum(size for _, size in resolve(path).list())
    reads = len(resolve(path).list()) + sizes // (2 << 20) + 50
    before = hdfs.bytes_read()
    assert load_step(path, rows=50_000) == 1
    assert 0.99 * sizes < hdfs.bytes_read() - before < sizes * (1 + 4 / 512) + 1024 * reads


# --- sub-files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stable", [True, False])
def test_a_joined_file_is_like_any_other(hdfs: Hdfs, storage: HdfsStorage, stable: bool, short_parts: None) -> None:
    write_file(storage, "model/file", LARGE, stable=stable, piece=1_000_003)
    assert storage.list() == [("model/file", len(LARGE))], "no sub-files are left"
    assert np.array_equal(read_all(storage, "model/file"), LARGE)
    path = storage._path("model/file")
    assert hdfs.client().get_file_info(path).replication == 2
    if stable:  # Hadoop's own client takes seconds
        assert hdfs.shell("-checksum", path)


def test_sub_files_that_are_left_are_seen_and_removed(hdfs: Hdfs, storage: HdfsStorage, short_parts: None) -> None:
    """As a killed writer leaves them: the file that they were to become can be removed, and they go with it."""
    client = hdfs.client()
    for name in (".bytecheckpoint-part-0001-file", ".bytecheckpoint-part-0002-file", ".bytecheckpoint-part-0001-other"):
        client.create(storage._path(f"model/{name}")).close()
    client.create(storage._path("model/other")).close()
    assert storage.list() == [("model/file", 0), ("model/other", 0)]
    storage.delete(["model/file", "model/other"])
    assert storage.list() == []
    assert storage.folders() == []


def test_a_cluster_that_cannot_join(
    between: RpcMeddler, storage: HdfsStorage, short_parts: None, monkeypatch: Any
) -> None:
    """An encryption zone, for one: files are sent as single streams there, and that is found out once."""
    storage = resolve(storage.url)  # type: ignore[assignment]
    joined: list[str] = []

    def refuse(target: str, *_: Any) -> None:
        joined.append(target)
        raise hdfs_upload.RemoteError("IOException", "concat can not be called for files in encryption zone.")

    monkeypatch.setattr(storage._cluster, "join", refuse)
    for name in ("model/first", "model/second"):
        write_file(storage, name, LARGE)
        assert np.array_equal(read_all(storage, name), LARGE)
    assert len(joined) == 1
    assert storage.list() == [("model/first", len(LARGE)), ("model/second", len(LARGE))]


@pytest.mark.parametrize("method", ["create", "addBlock", "complete", "concat", "delete"])
def test_an_answer_that_gets_lost(between: RpcMeddler, folder: str, method: str, short_parts: None) -> None:
    storage = resolve(f"{folder}/step")
    write_file(storage, "model/small", content(10))
    event = Event(method, lose=True)
    between.events.append(event)
    write_file(storage, "model/large", LARGE)
    storage.delete(["model/small"])
    assert event.hits == 1
    assert storage.list() == [("model/large", len(LARGE))]
    assert np.array_equal(read_all(storage, "model/large"), LARGE)


# --- the paper's example, and how clusters are found ------------------------------------------------------------------


class Loader:
    """A dataloader that knows where it is, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.position += 1
            yield torch.full((8,), float(self.position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("framework", ["megatron", "fsdp"])
def test_figure_6_of_the_paper(hdfs: Hdfs, framework: str) -> None:
    """Its two calls as they are written, and training that goes on with equal losses."""
    if framework == "megatron":
        pytest.importorskip("megatron.core", reason="NOT TESTED HERE: Megatron-Core is not installed")

    def make(value: float) -> tuple[torch.nn.Module, torch.optim.Optimizer, Loader]:
        model = torch.nn.Linear(8, 8)
        torch.nn.init.constant_(model.weight, value)
        return model, torch.optim.AdamW(model.parameters()), Loader()

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, dataloader: Loader) -> list[float]:
        losses = []
        for batch, _ in zip(dataloader, range(3), strict=False):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer, dataloader = make(1.0)
    train(model, optimizer, dataloader)
    extra_states: dict[str, Any] = {"step": 100}
    ckpt_states = {"model": model, "optimizer": optimizer, "dataloader": dataloader, "extra_states": extra_states}
    handle = bytecheckpoint.save("hdfs://demo_0/checkpoints", ckpt_states, framework=framework, async_checkpoint=True)
    expected = train(model, optimizer, dataloader)
    handle.result(60)

    model, optimizer, dataloader = make(2.0)
    train(model, optimizer, dataloader)
    extra_states = {}
    ckpt_states = {"model": model, "optimizer": optimizer, "dataloader": dataloader, "extra_states": extra_states}
    bytecheckpoint.load("hdfs://demo_0/checkpoints", ckpt_states, framework=framework, overlap_loading=True)
    assert ckpt_states["extra_states"] == {"step": 100}
    assert train(model, optimizer, dataloader) == expected
    storage = resolve("hdfs://demo_0/checkpoints")
    storage.delete([name for name, _ in storage.list()])


@pytest.mark.parametrize("form", ["host:port", "default", "high availability", "HADOOP_HOME"])
def test_ways_to_name_a_cluster(hdfs: Hdfs, tmp_path: Path, form: str, monkeypatch: Any, short_parts: None) -> None:
    name = uuid.uuid4().hex
    url = f"hdfs://demo_0/{name}/step"
    if form == "host:port":
        monkeypatch.delenv("HADOOP_CONF_DIR")
        url = f"hdfs://127.0.0.1:{hdfs.port}/{name}/step"
    elif form == "default":
        url = f"hdfs:///{name}/step"
    elif form == "HADOOP_HOME":
        hdfs.configuration(tmp_path / "home" / "etc" / "hadoop")
        monkeypatch.delenv("HADOOP_CONF_DIR")
        monkeypatch.setenv("HADOOP_HOME", str(tmp_path / "home"))
    else:
        conf = hdfs.configuration(
            tmp_path / "ha", dfs__ha__namenodes__demo_0="nn1, nn2", **{"dfs.namenode.rpc-address.demo-0": "x:1"}
        )
        site = Path(conf["HADOOP_CONF_DIR"]) / "hdfs-site.xml"
        more = "".join(
            f"<property><name>dfs.{key}</name><value>{value}</value></property>"
            for key, value in (
                ("ha.namenodes.demo_0", "nn1, nn2"),
                ("namenode.rpc-address.demo_0.nn1", "127.0.0.1:1"),
                ("namenode.rpc-address.demo_0.nn2", f"127.0.0.1:{hdfs.port}"),
            )
        )
        site.write_text(site.read_text().replace("</configuration>", f"{more}</configuration>"))
        use(monkeypatch, conf)
    storage = resolve(url)
    write_file(storage, "model/large", LARGE)
    storage.publish(CATALOG, b"x", expected="")
    assert np.array_equal(read_all(resolve(storage.url), "model/large"), LARGE)
    assert storage.url == (f"hdfs://demo_0/{name}/step" if form != "host:port" else url)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_dead_namenode_is_an_error_in_seconds(
    hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """The client alone takes 182 s."""
    use(monkeypatch, hdfs.configuration(tmp_path / "dead", namenode="127.0.0.1:1"))
    begun = time.monotonic()
    with pytest.raises(StorageUnavailableError) as raised:
        bytecheckpoint.save("hdfs://demo_0/dead/step", states(step=1), async_checkpoint=asynchronous).result(60)
    bytecheckpoint.saving.saver.saver_of(bytecheckpoint.collectives.current())._failed = None
    text = str(raised.value)
    assert re.search(
        r"cannot \w+.* hdfs://demo_0/dead/step/\S+: Connection refused \(attempt \d+\); .*127\.0\.0\.1:1", text
    ), text
    if not asynchronous:
        with pytest.raises(StorageUnavailableError, match=r"cannot read hdfs://demo_0/dead/step/metadata\.parquet"):
            load_step("hdfs://demo_0/dead/step")
    assert time.monotonic() - begun < 20


def test_a_namenode_that_hangs(hdfs: Hdfs, folder: str) -> None:
    """It takes connections and answers nothing: the client alone waits for ever."""
    bytecheckpoint.save(f"{folder}/step", states(step=1))
    bytecheckpoint.configure(storage_timeout=3.0)
    process = hdfs.namenode.process
    os.killpg(process.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(
            StorageUnavailableError, match=rf"{folder}/step/metadata.parquet: no answer in 3 s \(attempt"
        ):
            load_step(f"{folder}/step")
        with pytest.raises(StorageUnavailableError, match="no answer"):
            bytecheckpoint.save(f"{folder}/step", states(step=2))
        assert time.monotonic() - begun < 30
    finally:
        os.killpg(process.pid, signal.SIGCONT)
    bytecheckpoint.configure(storage_timeout=180.0)
    assert load_step(f"{folder}/step") == 1


def test_a_namenode_that_hangs_for_a_while(hdfs: Hdfs, folder: str) -> None:
    process = hdfs.namenode.process
    os.killpg(process.pid, signal.SIGSTOP)
    threading.Timer(3.0, os.killpg, [process.pid, signal.SIGCONT]).start()
    bytecheckpoint.save(f"{folder}/step", states(step=1))
    assert load_step(f"{folder}/step") == 1


def test_permission_denied(hdfs: Hdfs, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bytecheckpoint.save(f"{folder}/step", states(step=1))
    client = hdfs.client()
    client.set_permission(folder.removeprefix("hdfs://demo_0"), 0o755)
    use(monkeypatch, {"HADOOP_CONF_DIR": os.environ["HADOOP_CONF_DIR"], "HADOOP_USER_NAME": "alice"})
    assert load_step(f"{folder}/step") == 1
    begun = time.monotonic()
    denied = (
        rf"cannot \w+ {folder}/step.*: AccessControlException: Permission denied: user=alice.*\(attempt 1\); check who"
    )
    with pytest.raises(StorageError, match=denied) as raised:
        bytecheckpoint.save(f"{folder}/step", states(step=2))
    assert "\tat " not in str(raised.value) and "\\n" not in str(raised.value)
    with pytest.raises(StorageError, match=r"Permission denied: user=alice"):
        bytecheckpoint.save(f"{folder}/new", states(step=2), async_checkpoint=True).result(60)
    bytecheckpoint.saving.saver.saver_of(bytecheckpoint.collectives.current())._failed = None
    client.set_permission(f"{folder.removeprefix('hdfs://demo_0')}/step", 0o700)
    with pytest.raises(
        StorageError, match=r"cannot read .*metadata\.parquet: AccessControlException: Permission denied"
    ):
        load_step(f"{folder}/step")
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("what", ["names", "space"])
def test_a_quota(hdfs: Hdfs, folder: str, what: str) -> None:
    bytecheckpoint.save(f"{folder}/step", states(step=1))
    path = folder.removeprefix("hdfs://demo_0")
    limits = (10, (1 << 63) - 1) if what == "names" else ((1 << 63) - 1, 3 << 20)
    request = _text(1, path) + _number(2, limits[0]) + _number(3, limits[1])
    _call(("127.0.0.1", hdfs.port), USER, "setQuota", request, os.urandom(16), 10)
    with pytest.raises(StorageFullError, match=rf"cannot \w+.* {folder}/.*QuotaExceeded.*raise the quota"):
        bytecheckpoint.save(f"{folder}/step", states(step=2, rows=10_000))
    assert load_step(f"{folder}/step") == 1


def test_a_damaged_block_is_read_from_its_other_copy(hdfs: Hdfs, folder: str) -> None:
    """HDFS has checksums of its own; a copy that is bad is passed over."""
    path = f"{folder}/step"
    bytecheckpoint.save(path, states(step=1, rows=1000))
    (name,) = [name for name, _ in resolve(path).list() if name.startswith("model/rank")]
    data = resolve(path).read(name)
    damaged = 0
    for block in hdfs.blocks(0):
        if block.stat().st_size == len(data) and block.read_bytes() == data:
            block.write_bytes(b"\0" * len(data))
            damaged += 1
    assert damaged == 1
    assert load_step(path, rows=1000) == 1


def test_a_folder_is_no_file(storage: HdfsStorage) -> None:
    write_file(storage, "model/file", content(10))
    for name in ("model", "model/file/below"):
        for call in (storage.open, storage.read, storage.stat):
            with pytest.raises(FileNotFoundError):
                call(name)
    with pytest.raises(StorageError, match=r"cannot upload|no such file"):
        write_file(storage, "model/file/below", content(10))


def _read_in_child(url: str, pipe: Any) -> None:
    try:
        pipe.send(resolve(url).read("x"))
    except StorageError as error:
        pipe.send(str(error))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_fork_is_refused_and_a_new_process_works(storage: HdfsStorage, method: str) -> None:
    storage.publish("x", b"content")
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=_read_in_child, args=(storage.url, theirs))
    child.start()
    assert ours.poll(60)
    said = ours.recv()
    child.join(20)
    assert "in a fork of a process that has used HDFS" in said if method == "fork" else said == b"content"
