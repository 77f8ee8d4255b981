"""HDFS with a real NameNode and two DataNodes: the conformance suite, its operations, sub-files, configurations."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.hdfs.rpc import RemoteError
from bytecheckpoint.storage.hdfs.storage import HdfsStorage
from bytecheckpoint.storage.testing import RawAccess, StorageTests, content, read_all, write_file
from tests.servers.hdfs import Hdfs, Operations, path_in_cluster, write_configuration
from tests.servers.tcp_proxy import TcpProxy
from tests.storage.checks import check_file
from tests.storage.raw_access import HdfsAccess
from tests.support.coded import load_step, states

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

#: With sub-files of 1 MiB: a file of four.
LARGE = content((3 << 20) + 4097)
CATALOG = "metadata.parquet"


class TestHdfs(StorageTests):
    large_bytes = (40 << 20) + 4097

    @pytest.fixture
    def storage(self, hdfs: Hdfs) -> Storage:
        self._client = hdfs.client()
        return resolve(f"hdfs://demo_0/runs/{uuid.uuid4().hex}/step")

    def raw_access(self, storage: Storage) -> RawAccess:
        return HdfsAccess(self._client, storage.url.removeprefix("hdfs://demo_0"))


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_operations_of_the_namenode(hdfs: Hdfs, hdfs_storage: HdfsStorage, short_parts: None) -> None:
    """The table in docs/how-to/choose-a-storage.md."""
    write_file(hdfs_storage, "model/before", content(100))  # the client has asked for the server's defaults
    operations = Operations(hdfs)

    def spent(call: Callable[[], object], files: int = 0) -> Counter[str]:
        """Without "complete", which may have to be repeated until a DataNode has reported the file's block."""
        call()
        found = operations.since()
        assert files <= found.pop("Complete", 0) <= 5 * files
        return found

    assert spent(lambda: write_file(hdfs_storage, "model/small", content(1000)), 1) == {"Create": 1, "AddBlock": 1}
    large = spent(lambda: write_file(hdfs_storage, "model/large", LARGE), 4)
    assert large == {"Create": 4, "AddBlock": 4, "Concat": 1}
    assert spent(lambda: read_all(hdfs_storage, "model/large")) == {"GetBlockLocations": 1}
    assert spent(lambda: hdfs_storage.read("model/small")) == {"GetBlockLocations": 1}
    assert spent(lambda: hdfs_storage.stat("model/small")) == {"GetFileInfo": 1}
    assert spent(hdfs_storage.list) == {"GetListing": 2}
    first = spent(lambda: hdfs_storage.publish(CATALOG, b"first", expected=""), 1)
    assert first == {"Create": 1, "AddBlock": 1, "Rename2": 1}
    version = hdfs_storage.version(CATALOG)
    assert operations.since() == {"GetFileInfo": 1}
    assert spent(lambda: hdfs_storage.publish(CATALOG, b"second", expected=version), 1) == {
        "Create": 1, "AddBlock": 1, "Rename2": 2, "GetFileInfo": 1, "GetBlockLocations": 1,
    }  # fmt: skip
    assert spent(lambda: hdfs_storage.delete(["model/small"])) == {"Delete": 1}, "there are other files in its folder"


def test_operations_of_a_whole_save_and_load(hdfs: Hdfs, hdfs_path: str) -> None:
    bytecheckpoint.save(hdfs_path, states(step=1), async_checkpoint=True).result(60)  # the writer process is there
    operations = Operations(hdfs)
    bytecheckpoint.save(f"{hdfs_path}-2", states(step=2), async_checkpoint=True).result(60)
    save = operations.since()
    files = len(resolve(f"{hdfs_path}-2").list())
    assert save["Create"] == save["AddBlock"] == files
    assert save["Rename2"] == 1
    assert save["GetFileInfo"] <= 1 and save["GetListing"] <= 4 and save["Delete"] == 0
    assert save["GetFsStats"] == 1 and save["GetContentSummary"] <= 3
    operations.since()
    load_step(f"{hdfs_path}-2")
    assert operations.since() == {"GetBlockLocations": files}, "every file is opened once, and nothing else is asked"
    bytecheckpoint.save(f"{hdfs_path}-2", states(step=3), async_checkpoint=True).result(60)
    replaced = operations.since()
    assert replaced["Create"] == replaced["AddBlock"] == files
    assert replaced["Rename2"] == 2 and replaced["Delete"] == files - 1, "the old files, and no folders"
    assert replaced["GetFileInfo"] == 2 and replaced["GetListing"] <= 4 and replaced["GetBlockLocations"] == 2, (
        "its seal"
    )


def test_a_load_reads_no_byte_twice(hdfs: Hdfs, hdfs_path: str) -> None:
    """The DataNodes count the bytes, with checksums of 4 bytes for 512, to which ranges are rounded."""
    bytecheckpoint.save(hdfs_path, states(step=1, rows=50_000))
    sizes = sum(size for _, size in resolve(hdfs_path).list())
    reads = len(resolve(hdfs_path).list()) + sizes // (2 << 20) + 50
    before = hdfs.bytes_read()
    assert load_step(hdfs_path, rows=50_000) == 1
    assert 0.99 * sizes < hdfs.bytes_read() - before < sizes * (1 + 4 / 512) + 1024 * reads


# --- sub-files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stable", [True, False])
def test_a_joined_file_is_like_any_other(
    hdfs: Hdfs, hdfs_storage: HdfsStorage, stable: bool, short_parts: None
) -> None:
    check_file(hdfs_storage, "model/file", LARGE, stable=stable, piece=1_000_003)
    assert hdfs_storage.list() == [("model/file", len(LARGE))], "no sub-files are left"
    path = f"{path_in_cluster(hdfs_storage)}/model/file"
    assert hdfs.client().get_file_info(path).replication == 2
    if stable:  # Hadoop's own client takes seconds
        assert hdfs.shell("-checksum", path)


def test_sub_files_that_are_left_are_seen_and_removed(hdfs: Hdfs, hdfs_storage: HdfsStorage, short_parts: None) -> None:
    """A killed writer leaves them; they go when the file that they were to become is removed."""
    client, folder = hdfs.client(), f"{path_in_cluster(hdfs_storage)}/model"
    for name in (".bytecheckpoint-part-0001-file", ".bytecheckpoint-part-0002-file", ".bytecheckpoint-part-0001-other"):
        client.create(f"{folder}/{name}").close()
    client.create(f"{folder}/other").close()
    assert hdfs_storage.list() == [("model/file", 0), ("model/other", 0)]
    hdfs_storage.delete(["model/file", "model/other"])
    assert hdfs_storage.list() == []
    assert hdfs_storage.folders() == []


def test_a_cluster_that_cannot_join(
    rpc_proxy: TcpProxy, hdfs_storage: HdfsStorage, short_parts: None, monkeypatch: Any
) -> None:
    """An encryption zone, for one: files are sent as single streams there, and that is found out once."""
    refusal = RemoteError("IOException", "concat can not be called for files in encryption zone.")
    monkeypatch.setattr(hdfs_storage._cluster, "join", join := Mock(side_effect=refusal))
    for name in ("model/first", "model/second"):
        check_file(hdfs_storage, name, LARGE)
    assert join.call_count == 1
    assert hdfs_storage.list() == [("model/first", len(LARGE)), ("model/second", len(LARGE))]


@pytest.mark.parametrize("method", ["create", "addBlock", "complete", "concat", "delete"])
def test_an_answer_that_gets_lost(rpc_proxy: TcpProxy, hdfs_path: str, method: str, short_parts: None) -> None:
    storage = resolve(hdfs_path)
    write_file(storage, "model/small", content(10))
    event = rpc_proxy.add(method, lose=True)
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
    """Its two calls as they are printed, and equal losses afterwards."""
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
        pair = {
            "dfs.nameservices": "demo_0",
            "dfs.ha.namenodes.demo_0": "nn1, nn2",
            "dfs.namenode.rpc-address.demo_0.nn1": "127.0.0.1:1",
            "dfs.namenode.rpc-address.demo_0.nn2": f"127.0.0.1:{hdfs.port}",
        }
        monkeypatch.setenv("HADOOP_CONF_DIR", str(write_configuration(tmp_path / "pair", {}, pair)))
    storage = resolve(url)
    write_file(storage, "model/large", LARGE)
    storage.publish(CATALOG, b"x", expected="")
    assert np.array_equal(read_all(resolve(storage.url), "model/large"), LARGE)
    assert storage.url == (f"hdfs://demo_0/{name}/step" if form != "host:port" else url)
