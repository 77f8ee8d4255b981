"""Name services of two NameNodes, one of which is of no use, as while the other takes over; and both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import StorageUnavailableError
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.testing import content, read_all, write_file
from bytecheckpoint.tuning import tuned
from tests.faults.coded import load_step, states
from tests.servers.hdfs import USER, Hdfs, write_configuration
from tests.servers.peers import silent
from tests.servers.rpc_fault_proxy import gone, rpc_fault_proxy, stands_by
from tests.storage.conftest import use

pytestmark = pytest.mark.timeout(300)


def dead() -> AbstractContextManager[str]:
    return contextlib.nullcontext("127.0.0.1:1")


OF_NO_USE = {"dead": dead, "standby": stands_by, "hanging": silent, "gone": gone}


@pytest.fixture(autouse=True)
def short_timeouts() -> Iterator[None]:
    with (
        tuned(hdfs_first_contact=2.0, hdfs_known_contact=2.0, hdfs_first_write=2.0),
        tuned(hdfs_first_call=4.0, hdfs_call=8.0, hdfs_shortest_call=1.0),
    ):
        yield


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
    bytecheckpoint.configure(writer="thread")  # a process of its own would have the default timeouts
    with tuned(hdfs_part_bytes=1 << 20), OF_NO_USE[kind]() as other:
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
    with rpc_fault_proxy(hdfs.port) as first:
        use(monkeypatch, pair(tmp_path / "pair", first.address, f"127.0.0.1:{hdfs.port}"))
        hang = first.add("addBlock", before=lambda: time.sleep(60), skip=1, times=-1)
        path = f"hdfs://demo_0/{tmp_path.name}/step"
        with tuned(hdfs_write_stall=4.0):
            bytecheckpoint.save(path, states(step=1))
        assert hang.hits
        assert load_step(path) == 1


@pytest.mark.parametrize("kind", OF_NO_USE)
def test_both_are_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    bytecheckpoint.configure(storage_timeout=2.0)  # one that stands by has answered: the other may take over
    short = tuned(hdfs_first_call=2.0, hdfs_first_contact=1.0)
    with short, OF_NO_USE[kind]() as first, OF_NO_USE[kind]() as second:
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
