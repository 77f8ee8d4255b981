"""Errors of a real HDFS: NameNodes that are gone or hang, permissions, quotas, damaged blocks, forks."""

from __future__ import annotations

import os
import time

import pytest

import bytecheckpoint
from bytecheckpoint import StorageError, StorageFullError, StorageUnavailableError
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.hdfs.rpc import _call, _number, _text
from bytecheckpoint.storage.hdfs.storage import HdfsStorage
from bytecheckpoint.storage.testing import content, write_file
from tests.servers.hdfs import USER, Hdfs
from tests.storage.checks import within
from tests.storage.conftest import use
from tests.support.coded import load_step, states
from tests.support.settings import forget_failure

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


def test_a_namenode_that_hangs(hdfs: Hdfs, hdfs_path: str) -> None:
    """It takes connections and answers nothing: the client alone waits for ever."""
    bytecheckpoint.save(hdfs_path, states(step=1))
    bytecheckpoint.configure(storage_timeout=3.0)
    hdfs.namenode.pause()
    says = rf"{hdfs_path}/metadata.parquet: no answer in 3 s \(attempt"
    try:
        with within(30):
            with pytest.raises(StorageUnavailableError, match=says):
                load_step(hdfs_path)
            with pytest.raises(StorageUnavailableError, match="no answer"):
                bytecheckpoint.save(hdfs_path, states(step=2))
    finally:
        hdfs.namenode.resume()
    bytecheckpoint.configure(storage_timeout=180.0)
    assert load_step(hdfs_path) == 1


def test_permission_denied(hdfs: Hdfs, hdfs_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bytecheckpoint.save(hdfs_path, states(step=1))
    client, step = hdfs.client(), hdfs_path.removeprefix("hdfs://demo_0")
    client.set_permission(step.removesuffix("/step"), 0o755)
    use(monkeypatch, {"HADOOP_CONF_DIR": os.environ["HADOOP_CONF_DIR"], "HADOOP_USER_NAME": "alice"})
    assert load_step(hdfs_path) == 1
    begun = time.monotonic()
    denied = "AccessControlException: Permission denied: user=alice"
    with pytest.raises(StorageError, match=rf"cannot \w+ {hdfs_path}.*: {denied}.*\(attempt 1\); check who") as raised:
        bytecheckpoint.save(hdfs_path, states(step=2))
    assert "\tat " not in str(raised.value) and "\\n" not in str(raised.value)
    with pytest.raises(StorageError, match=r"Permission denied: user=alice"):
        bytecheckpoint.save(hdfs_path.replace("/step", "/new"), states(step=2), async_checkpoint=True).result(60)
    forget_failure()
    client.set_permission(step, 0o700)
    with pytest.raises(StorageError, match=rf"cannot open .*metadata\.parquet: {denied}"):
        load_step(hdfs_path)
    assert time.monotonic() - begun < 20


def test_a_quota_of_names(hdfs: Hdfs, hdfs_path: str) -> None:
    """test_hdfs_room.py has the quotas of space."""
    bytecheckpoint.save(hdfs_path, states(step=1))
    folder, unlimited = hdfs_path.removesuffix("/step"), (1 << 63) - 1
    request = _text(1, folder.removeprefix("hdfs://demo_0")) + _number(2, 10) + _number(3, unlimited)
    _call(("127.0.0.1", hdfs.port), USER, "setQuota", request, os.urandom(16), 10)
    with pytest.raises(StorageFullError, match=rf"cannot \w+.* {folder}/.*QuotaExceeded.*raise the quota"):
        bytecheckpoint.save(hdfs_path, states(step=2, rows=10_000))
    assert load_step(hdfs_path) == 1


def test_a_damaged_block_is_read_from_its_other_copy(hdfs: Hdfs, hdfs_path: str) -> None:
    """HDFS has checksums of its own; a copy that is bad is passed over."""
    bytecheckpoint.save(hdfs_path, states(step=1, rows=1000))
    (name,) = [name for name, _ in resolve(hdfs_path).list() if name.startswith("model/rank")]
    data = resolve(hdfs_path).read(name)
    (block,) = [b for b in hdfs.blocks(0) if b.stat().st_size == len(data) and b.read_bytes() == data]
    block.write_bytes(b"\0" * len(data))
    assert load_step(hdfs_path, rows=1000) == 1


def test_a_folder_is_no_file(hdfs_storage: HdfsStorage) -> None:
    write_file(hdfs_storage, "model/file", content(10))
    for name in ("model", "model/file/below"):
        for call in (hdfs_storage.open, hdfs_storage.read, hdfs_storage.stat):
            with pytest.raises(FileNotFoundError):
                call(name)
    with pytest.raises(StorageError, match=r"cannot upload|no such file"):
        write_file(hdfs_storage, "model/file/below", content(10))
