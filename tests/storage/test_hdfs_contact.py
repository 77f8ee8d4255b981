"""HDFS addresses with no NameNode, or one of no use: an error in seconds that says where was asked, or the other one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint import StorageError, StorageUnavailableError
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.testing import content
from bytecheckpoint.tuning import tuned
from tests.servers.hdfs import USER, Hdfs, write_configuration
from tests.servers.peers import gone, silent, stands_by
from tests.servers.tcp_proxy import tcp_proxy
from tests.storage.checks import check_file, check_save, within
from tests.storage.conftest import use
from tests.support.coded import load_step, states
from tests.support.settings import forget_failure

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def short_timeouts() -> Iterator[None]:
    with (
        tuned(hdfs_first_contact=0.5, hdfs_first_write=0.5, hdfs_first_call=0.5),
        tuned(hdfs_call=8.0, hdfs_shortest_call=1.0),
    ):
        yield


# --- no NameNode ------------------------------------------------------------------------------------------------------


def refused(path: str) -> None:
    """Load and save are refused soon, by errors that say what, where and how often."""
    with within(60):
        for call in (
            lambda: load_step(path),
            lambda: resolve(path).list(),
            lambda: bytecheckpoint.save(path, states(step=1)),
            lambda: bytecheckpoint.save(path, states(step=1), async_checkpoint=True).result(60),
        ):
            with pytest.raises(StorageError, match=rf"cannot [\w ]+ {path}\S*: .*\(attempt \d+\)") as raised:
                call()
            assert "\n" not in str(raised.value)
            forget_failure()


@pytest.mark.parametrize("form", ["no such host", "nobody listens", "a name service nobody knows"])
def test_nobody_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    use(monkeypatch, {"HADOOP_CONF_DIR": str(write_configuration(tmp_path, {}, {})), "HADOOP_USER_NAME": "alice"})
    authority = {"no such host": "no-such-host.invalid:8020", "nobody listens": "127.0.0.1:1"}.get(form, "demo-nobody")
    refused(f"hdfs://{authority}/step")
    with pytest.raises(StorageUnavailableError, match=rf"NameNode \({authority}(:8020)?\)"):
        load_step(f"hdfs://{authority}/step")


def test_something_else_is_there(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, {"HADOOP_USER_NAME": "alice"})
    refused(f"hdfs://{peer}/step")


@pytest.mark.server
@pytest.mark.parametrize("port", ["web", "data"])
def test_another_port_of_the_same_cluster(hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    refused(f"hdfs://127.0.0.1:{hdfs._http if port == 'web' else hdfs.ports[0]}/step")


@pytest.mark.server
def test_a_file_where_a_folder_should_be(hdfs: Hdfs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = f"hdfs://demo_0/{tmp_path.name}"
    hdfs.client().create(f"/{tmp_path.name}").close()
    with pytest.raises(StorageError, match=rf"{path}/step/\S+: "):
        bytecheckpoint.save(f"{path}/step", states(step=1))
    with pytest.raises(bytecheckpoint.CheckpointError, match=path):
        load_step(f"{path}/step")
    with pytest.raises(StorageError, match=rf"{path}/\S+: "):
        bytecheckpoint.save(path, states(step=1))
    assert "could not be removed" not in caplog.text, "nothing was sent"


@pytest.mark.server
@pytest.mark.parametrize("writes", [False, True])
def test_a_cluster_that_has_answered_is_waited_for(hdfs: Hdfs, hdfs_path: str, writes: bool) -> None:
    """Every save and load of a process knows the cluster once one of them has had an answer."""
    bytecheckpoint.save(hdfs_path, states(step=1))
    hdfs.namenode.pause()
    timer = threading.Timer(6.0, hdfs.namenode.resume)
    timer.start()
    try:
        if writes:
            bytecheckpoint.save(hdfs_path, states(step=2))
        assert load_step(hdfs_path) == 1 + writes
    finally:
        timer.join()


# --- name services of two NameNodes, one of which is of no use, as while the other takes over; and both ----------------


def dead() -> AbstractContextManager[str]:
    return contextlib.nullcontext("127.0.0.1:1")


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


OF_NO_USE = {"dead": dead, "standby": stands_by, "hanging": silent, "gone": gone}


@pytest.mark.server
@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("kind", OF_NO_USE)
@tuned(hdfs_first_contact=2.0, hdfs_first_write=2.0, hdfs_first_call=4.0)
def test_one_of_two_is_of_no_use(
    hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, turn: bool
) -> None:
    bytecheckpoint.configure(writer="thread")  # a process of its own would have the default timeouts
    with tuned(hdfs_part_bytes=1 << 20), OF_NO_USE[kind]() as other, within(60):
        addresses = [other, f"127.0.0.1:{hdfs.port}"]
        use(monkeypatch, pair(tmp_path / "pair", *(addresses[::-1] if turn else addresses)))
        path = f"hdfs://demo_0/{tmp_path.name}/step"
        bytecheckpoint.save(path, states(step=1))
        check_save(path, 2, async_checkpoint=True)
        check_file(resolve(path), "model/large", content((3 << 20) + 77))


@pytest.mark.server
@tuned(hdfs_first_contact=2.0, hdfs_first_write=2.0, hdfs_first_call=4.0)
def test_a_namenode_that_hangs_on_the_way_is_left(hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays open, so the client would wait on it for ever; the other one has taken over."""
    with tcp_proxy(f"127.0.0.1:{hdfs.port}") as first:
        use(monkeypatch, pair(tmp_path / "pair", first.address, f"127.0.0.1:{hdfs.port}"))
        hang = first.add("addBlock", before=lambda: time.sleep(60), skip=1, times=-1)
        with tuned(hdfs_write_stall=4.0):
            check_save(f"hdfs://demo_0/{tmp_path.name}/step", 1)
        assert hang.hits


@pytest.mark.parametrize("kind", OF_NO_USE)
def test_both_are_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    bytecheckpoint.configure(storage_timeout=2.0)  # one that stands by has answered: the other may take over
    short = tuned(hdfs_first_write=2.0, hdfs_first_call=2.0)
    with short, OF_NO_USE[kind]() as first, OF_NO_USE[kind]() as second, within(40):
        use(monkeypatch, pair(tmp_path / "pair", first, second))
        for call in (
            lambda: load_step("hdfs://demo_0/x/step"),
            lambda: bytecheckpoint.save("hdfs://demo_0/x/step", states(step=1)),
        ):
            says = r"cannot \w+.* hdfs://demo_0/x/step/\S+: .*\(attempt \d+\)"
            with pytest.raises(StorageUnavailableError, match=says) as raised:
                call()
            assert first in str(raised.value) and second in str(raised.value), "both are named"
