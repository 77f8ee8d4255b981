"""Name services of two NameNodes, one of which is of no use, as while the other takes over; and both."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import StorageUnavailableError
from bytecheckpoint.storage import hdfs_cluster, hdfs_upload, resolve
from bytecheckpoint.storage.testing import content, read_all, write_file
from tests.faults.coded import load_step, states
from tests.servers.hdfs import USER, Hdfs, write_configuration
from tests.servers.rpc_meddler import Event, gone, rpc_meddler, silent, stands_by
from tests.storage.conftest import use

pytestmark = pytest.mark.timeout(300)


def dead() -> AbstractContextManager[str]:
    return contextlib.nullcontext("127.0.0.1:1")


OF_NO_USE = {"dead": dead, "standby": stands_by, "hanging": silent, "gone": gone}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_SECONDS", "_KNOWN_SECONDS", "_FIRST_WRITE_SECONDS"):
        monkeypatch.setattr(hdfs_cluster, name, 2.0)
    monkeypatch.setattr(hdfs_cluster, "_FIRST_CALL_SECONDS", 4.0)
    monkeypatch.setattr(hdfs_cluster, "_CALL_SECONDS", 8.0)
    monkeypatch.setattr(hdfs_cluster, "_LEAST_CALL_SECONDS", 1.0)


def pair(folder: Path, first: str, second: str) -> dict[str, str]:
    """The variables with which clients find two NameNodes as "demo_0"."""
    hdfs = {
        "dfs.nameservices": "demo_0",
        "dfs.ha.namenodes.demo_0": "nn1,nn2",
        "dfs.namenode.rpc-address.demo_0.nn1": first,
        "dfs.namenode.rpc-address.demo_0.nn2": second,
        "dfs.client.failover.proxy.provider.demo_0": (
            "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
        ),
    }
    return {"HADOOP_CONF_DIR": str(write_configuration(folder, {}, hdfs)), "HADOOP_USER_NAME": USER}


@pytest.mark.server
@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("kind", OF_NO_USE)
def test_one_of_two_is_of_no_use(
    hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, turn: bool
) -> None:
    bytecheckpoint.configure(writer="thread")  # a process of its own would have its own patience
    monkeypatch.setattr(hdfs_upload, "_LEAST_PART", 1 << 20)
    with OF_NO_USE[kind]() as other:
        addresses = [other, f"127.0.0.1:{hdfs.port}"]
        use(monkeypatch, pair(tmp_path / "pair", *(addresses[::-1] if turn else addresses)))
        begun = time.monotonic()
        path = f"hdfs://demo_0/{tmp_path.name}/step"
        bytecheckpoint.save(path, states(step=1))
        bytecheckpoint.save(path, states(step=2), async_checkpoint=True).result(60)
        assert load_step(path) == 2
        data = content((3 << 20) + 77)
        write_file(resolve(path), "model/large", data)
        assert np.array_equal(read_all(resolve(path), "model/large"), data)
        assert time.monotonic() - begun < 60


@pytest.mark.server
def test_a_namenode_that_hangs_on_the_way_is_left(hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays open, so the client would wait on it for ever; the other one has taken over."""
    with rpc_meddler(hdfs.port) as first:
        use(monkeypatch, pair(tmp_path / "pair", first.address, f"127.0.0.1:{hdfs.port}"))
        hang = Event("addBlock", before=lambda: time.sleep(60), skip=1, times=-1)
        first.events.append(hang)
        path = f"hdfs://demo_0/{tmp_path.name}/step"
        monkeypatch.setattr(hdfs_upload, "_STALL_SECONDS", 4.0)
        bytecheckpoint.save(path, states(step=1))
        assert hang.hits
        assert load_step(path) == 1


@pytest.mark.parametrize("kind", OF_NO_USE)
def test_both_are_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    bytecheckpoint.configure(storage_timeout=2.0)  # one that stands by has answered: the other may take over
    monkeypatch.setattr(hdfs_cluster, "_FIRST_CALL_SECONDS", 2.0)
    monkeypatch.setattr(hdfs_cluster, "_FIRST_SECONDS", 1.0)
    with OF_NO_USE[kind]() as first, OF_NO_USE[kind]() as second:
        use(monkeypatch, pair(tmp_path / "pair", first, second))
        begun = time.monotonic()
        for call in (
            lambda: load_step("hdfs://demo_0/x/step"),
            lambda: bytecheckpoint.save("hdfs://demo_0/x/step", states(step=1)),
        ):
            with pytest.raises(
                StorageUnavailableError, match=r"cannot \w+.* hdfs://demo_0/x/step/\S+: .*\(attempt \d+\)"
            ) as raised:
                call()
            assert first in str(raised.value) and second in str(raised.value), "both are named"
        assert time.monotonic() - begun < 40
