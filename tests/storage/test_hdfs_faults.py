"""Whole saves and loads on an HDFS whose servers die, hang, restart or fill up on the way."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import StorageFullError, StorageUnavailableError
from bytecheckpoint.cli.main import run
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.hdfs import upload
from bytecheckpoint.storage.hdfs.storage import HdfsStorage
from bytecheckpoint.storage.testing import content, read_all, write_file
from bytecheckpoint.tuning import tuned
from tests.servers.hdfs import Hdfs
from tests.servers.tcp_proxy import TcpProxy, tcp_proxy
from tests.storage.checks import check_outage, within
from tests.storage.conftest import use
from tests.support.coded import load_step
from tests.support.modes import MODES
from tests.support.mounts import small_tmpfs
from tests.support.processes import environment, python
from tests.support.ranks import succeeded
from tests.support.saves import ROWS, check_folder, load, save
from tests.support.variants import quick

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


# --- the NameNode -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writer", "mode", "method", "skip", "world"),
    [
        ("process", "async", "addBlock", 1, 1),
        *quick(
            [
                ("thread", "async", "addBlock", 2, 1),
                ("thread", "sync", "create", 1, 1),
                ("thread", "sync", "concat", 0, 2),
                ("thread", "background", "complete", 1, 2),
                ("thread", "background", "rename2", 1, 2),
                ("thread", "async", "rename2", 0, 2),
                ("thread", "sync", "delete", 0, 2),
            ],
            every=4,
        ),
    ],
)
@tuned(hdfs_part_bytes=2 << 20)
def test_a_namenode_killed_during_a_save_and_started_again(
    hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str, writer: str, mode: str, method: str, skip: int, world: int
) -> None:
    bytecheckpoint.configure(writer=writer)
    succeeded(save(hdfs_path, 1, world=world, async_checkpoint=writer == "process"))
    event = rpc_proxy.add(method, before=lambda: hdfs.namenode.kill_for(1.0), skip=skip)
    succeeded(save(hdfs_path, 2, world=world, **MODES[mode]))
    assert event.hits == 1
    assert load(hdfs_path, 3) == {2}
    check_folder(hdfs_path)


@pytest.mark.parametrize(
    ("mode", "method"), quick([("background", "rename2"), ("sync", "complete"), ("async", "create")], every=3)
)
def test_a_namenode_killed_during_a_save_that_stays_away(
    hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str, mode: str, method: str
) -> None:
    succeeded(save(hdfs_path, 1, world=2))
    rpc_proxy.add(method, before=hdfs.namenode.kill)
    check_outage(hdfs_path, mode, hdfs.start)


@pytest.mark.parametrize("stays_away", [False, True])
def test_a_namenode_killed_during_a_load(hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str, stays_away: bool) -> None:
    succeeded(save(hdfs_path, 1, world=2))
    # With three ranks only after each has had an answer, for its catalog: a NameNode that never answered is not waited for.
    skip, kill = (2, hdfs.namenode.kill) if stays_away else (4, lambda: hdfs.namenode.kill_for(1.0))
    rpc_proxy.add("getBlockLocations", before=kill, skip=skip)
    if not stays_away:
        assert load(hdfs_path, 3) == {1}
        return
    bytecheckpoint.configure(storage_timeout=3.0)
    with pytest.raises(StorageUnavailableError, match=rf"cannot \w+ {hdfs_path}/.*attempt \d+"):
        load_step(hdfs_path, rows=ROWS)


def test_a_restarted_namenode_is_waited_for(hdfs: Hdfs, hdfs_path: str) -> None:
    """In safe mode it answers, and refuses to write; then it knows no DataNode, and then no places of blocks."""
    succeeded(save(hdfs_path, 1))
    for datanode in hdfs.datanodes:
        datanode.kill()
    hdfs.namenode.kill()
    hdfs.namenode.start()
    assert hdfs.bean("NameNode", "NameNodeInfo")["Safemode"]
    # After both looks at the free space: a cluster without DataNodes has none.
    timers = [threading.Timer(9.0 + number, datanode.start) for number, datanode in enumerate(hdfs.datanodes)]
    for timer in timers:
        timer.start()
    succeeded(save(hdfs_path, 2))
    assert load(hdfs_path, 2) == {2}
    for timer in timers:
        timer.join()


# --- DataNodes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", quick(["process", "thread"], every=2))
def test_a_datanode_that_is_dead_before_a_save(hdfs: Hdfs, hdfs_path: str, writer: str) -> None:
    """The NameNode names it for ten more minutes, and the client cannot exclude it."""
    bytecheckpoint.configure(writer=writer)
    succeeded(save(hdfs_path, 1, world=2))
    hdfs.datanodes[1].kill()
    with within(90):
        succeeded(save(hdfs_path, 2, world=2, async_checkpoint=writer == "process"))
        assert load(hdfs_path, 3) == {2}
    check_folder(hdfs_path)
    hdfs.start()
    # What could have one copy only gets its second.
    client, root = hdfs.client(), hdfs_path.removeprefix("hdfs://demo_0")
    files = [entry for entry in client.list_status(root, True) if not entry.isdir]
    assert files and {entry.replication for entry in files} == {2}


def test_a_call_that_never_returns(hdfs_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own, when a chain of DataNodes breaks at the wrong moment. The stream is written again."""
    create, hung, over = upload.Upload._create, [], threading.Event()

    def create_hanging(*args: Any) -> Any:
        writer = create(*args)
        if hung:
            return writer
        hung.append(writer)
        return SimpleNamespace(write=lambda _: over.wait())

    monkeypatch.setattr(upload.Upload, "_create", create_hanging)
    bytecheckpoint.configure(writer="thread")
    try:
        with tuned(hdfs_shortest_stall=2.0), within(60):  # not the 120 s of `hdfs_write_stall`
            succeeded(save(hdfs_path, 1))
    finally:
        over.set()
    assert hung
    assert load(hdfs_path, 1) == {1}


def test_a_datanode_killed_in_the_middle_of_a_save(hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str) -> None:
    succeeded(save(hdfs_path, 1, world=2))
    event = rpc_proxy.add("addBlock", before=hdfs.datanodes[0].kill, skip=3)
    succeeded(save(hdfs_path, 2, world=2))
    assert event.hits == 1
    assert load(hdfs_path, 1) == {2}
    check_folder(hdfs_path)


def test_a_datanode_killed_in_the_middle_of_a_file(hdfs: Hdfs, hdfs_path: str) -> None:
    """While its blocks are on their way."""
    storage = resolve(hdfs_path)
    data = content(200 << 20)
    threading.Timer(0.7, hdfs.datanodes[0].kill).start()
    write_file(storage, "model/file", data, piece=8 << 20)
    assert np.array_equal(read_all(resolve(hdfs_path), "model/file"), data)


def test_a_datanode_killed_in_the_middle_of_a_load(hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str) -> None:
    succeeded(save(hdfs_path, 1, world=2))
    rpc_proxy.add("getBlockLocations", before=hdfs.datanodes[1].kill, skip=2)
    assert load(hdfs_path, 3) == {1}


def test_all_datanodes_die_and_come_back(hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str) -> None:
    succeeded(save(hdfs_path, 1))
    timers: list[threading.Timer] = []

    def kill() -> None:
        for datanode in hdfs.datanodes:
            datanode.kill()
            timers.append(threading.Timer(1.0, datanode.start))
            timers[-1].start()

    rpc_proxy.add("addBlock", before=kill, skip=1)
    succeeded(save(hdfs_path, 2))
    for timer in timers:
        timer.join()
    hdfs.wait(2)
    rpc_proxy.add("getBlockLocations", before=kill, skip=1)
    assert load(hdfs_path, 2) == {2}
    for timer in timers:
        timer.join()


def test_a_full_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    with small_tmpfs(disk, "300m", lazy=True):
        # By default a DataNode keeps a gibibyte free.
        spare = "dfs.datanode.round-robin-volume-choosing-policy.additional-available-space"
        cluster = Hdfs(tmp_path / "cluster", 1, disk, **{spare: "0", "dfs.blocksize": "16777216"})
        try:
            use(monkeypatch, cluster.start().configuration(tmp_path / "hadoop"))
            bytecheckpoint.configure(storage_timeout=5.0)
            succeeded(save("hdfs://demo_0/step", 1, rows=1000))
            (raised,) = save("hdfs://demo_0/step", 2, rows=20 * ROWS)
            assert isinstance(raised, StorageFullError), repr(raised)
            assert re.search(
                r"cannot save to hdfs://demo_0/step: it takes \d+ bytes, and the cluster has \d+ left", str(raised)
            )
            monkeypatch.setattr(HdfsStorage, "check_room", lambda self, nbytes: None)  # as with Kerberos
            (raised,) = save("hdfs://demo_0/step", 2, rows=20 * ROWS)
            assert isinstance(raised, StorageFullError | StorageUnavailableError), repr(raised)
            assert "cannot upload hdfs://demo_0/step/" in str(raised) and "attempt" in str(raised)
            assert load_step("hdfs://demo_0/step", rows=1000) == 1
        finally:
            cluster.stop()


# --- writers that are killed ------------------------------------------------------------------------------------------

_SAVE = """
import sys
import bytecheckpoint
from bytecheckpoint.tuning import tuned
from tests.support.coded import states

bytecheckpoint.configure(writer="thread")
with tuned(hdfs_part_bytes=2 << 20):
    bytecheckpoint.save(sys.argv[1], states(step=2, rows=20_000))
"""


@pytest.mark.parametrize(
    ("method", "skip"), quick([("concat", 0), ("create", 3), ("rename2", 1), ("complete", 2), ("rename2", 0)], every=4)
)
@tuned(hdfs_lock_expiry=3.0)  # the next save waits for the lock of the killed one
def test_a_writer_that_is_killed(hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str, method: str, skip: int) -> None:
    """kill -9 at any moment: the checkpoint before is whole, and the next save clears away what was left."""
    succeeded(save(hdfs_path, 1))
    child: list[subprocess.Popen[bytes]] = []
    killed = threading.Event()

    def kill() -> None:
        child[0].send_signal(signal.SIGKILL)
        child[0].wait(30)
        killed.set()

    rpc_proxy.add(method, before=kill, skip=skip)
    child.append(subprocess.Popen(python("-c", _SAVE, hdfs_path), env=environment()))
    assert killed.wait(120)
    rpc_proxy.rules.clear()
    assert load(hdfs_path, 2) <= {1, 2}, "the last operation may still have been carried out"
    assert run(["verify", hdfs_path]) == 0
    succeeded(save(hdfs_path, 3))
    assert load(hdfs_path, 1) == {3}
    check_folder(hdfs_path)
    paths = [entry.path for entry in hdfs.client().list_status(hdfs_path.removeprefix("hdfs://demo_0"), True)]
    assert not [path for path in paths if "/.bytecheckpoint-part" in path], "sub-files of the killed writer"


# --- slow lines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TcpProxy]]:
    """Proxies before the DataNodes, on the address by which clients know their hosts."""
    use(monkeypatch, hdfs.configuration(tmp_path / "limited", **{"dfs.client.use.datanode.hostname": "true"}))
    with contextlib.ExitStack() as proxies:
        yield [proxies.enter_context(tcp_proxy(f"127.0.0.1:{port}", "127.0.0.2", port)) for port in hdfs.ports]


def test_a_range_goes_over_several_connections(lines: list[TcpProxy], hdfs_path: str) -> None:
    """A file is read several times as fast as over one connection, if each is limited."""
    storage = resolve(hdfs_path)
    data = content(32 << 20)
    write_file(storage, "model/file", data)
    for proxy in lines:
        proxy.down.rate = 4 << 20
    out = np.zeros(len(data), np.uint8)
    seconds = []
    with contextlib.closing(storage.open("model/file")) as reader:
        for half, step in ((0, 2 << 20), (16 << 20, 16 << 20)):
            begun = time.monotonic()
            for start in range(half, half + (16 << 20), step):
                reader.read_into(start, [memoryview(out)[start : start + step]])
            seconds.append(time.monotonic() - begun)
    assert np.array_equal(out, data)
    assert seconds[0] > 2 * seconds[1], seconds


def test_sub_files_go_over_several_connections(lines: list[TcpProxy], hdfs_path: str) -> None:
    storage = resolve(hdfs_path)
    data = content(24 << 20)
    for proxy in lines:
        proxy.up.rate = 4 << 20
    seconds = []
    for name, part_bytes in (("model/one", 64 << 20), ("model/parts", 3 << 20)):
        begun = time.monotonic()
        with tuned(hdfs_part_bytes=part_bytes):
            write_file(storage, name, data)
        seconds.append(time.monotonic() - begun)
        assert np.array_equal(read_all(storage, name), data)
    assert seconds[0] > 2 * seconds[1], seconds


def test_lines_that_break_for_a_while(lines: list[TcpProxy], hdfs_path: str) -> None:
    succeeded(save(hdfs_path, 1))
    for proxy in lines:
        proxy.up.cut = 100_000
        threading.Timer(2.0, setattr, [proxy.up, "cut", 0]).start()
    succeeded(save(hdfs_path, 2))
    assert load(hdfs_path, 1) == {2}


def test_a_line_that_swallows_everything(lines: list[TcpProxy], hdfs_path: str) -> None:
    """A DataNode whose machine is gone without a word: the other copy is read, and it is not waited for each time."""
    storage = resolve(hdfs_path)
    data = content(64 << 20)
    write_file(storage, "model/file", data)
    lines[0].up.swallow = True
    with within(70):  # 20 s for the first ranges, 2 s for others
        assert np.array_equal(read_all(storage, "model/file"), data)
