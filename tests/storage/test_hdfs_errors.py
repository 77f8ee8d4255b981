"""Errors of a real HDFS: NameNodes that are gone or hang, permissions, quotas, damaged blocks, forks."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import StorageError, StorageFullError, StorageUnavailableError
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.hdfs.rpc import _call, _number, _text
from bytecheckpoint.storage.hdfs.storage import HdfsStorage
from bytecheckpoint.storage.testing import content, write_file
from tests.faults.coded import load_step, states
from tests.servers.hdfs import USER, Hdfs
from tests.storage.conftest import use

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


@pytest.fixture
def folder(hdfs: Hdfs) -> str:
    return f"hdfs://demo_0/tests/{uuid.uuid4().hex}"


@pytest.fixture
def storage(folder: str) -> HdfsStorage:
    made = resolve(f"{folder}/step")
    assert isinstance(made, HdfsStorage)
    return made


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_dead_namenode_is_an_error_in_seconds(
    hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """The client alone takes 182 s."""
    use(monkeypatch, hdfs.configuration(tmp_path / "dead", namenode="127.0.0.1:1"))
    begun = time.monotonic()
    with pytest.raises(StorageUnavailableError) as raised:
        bytecheckpoint.save("hdfs://demo_0/dead/step", states(step=1), async_checkpoint=asynchronous).result(60)
    bytecheckpoint.world.world_of(bytecheckpoint.collectives.current()).saves.forget_failure()
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
    bytecheckpoint.world.world_of(bytecheckpoint.collectives.current()).saves.forget_failure()
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
