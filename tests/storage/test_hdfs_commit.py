"""Commits on HDFS: renames, locks, jobs that save to one path, writers that are killed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import StorageConflictError, StorageError
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.hdfs.storage import HdfsStorage
from bytecheckpoint.storage.testing import content, read_all, write_file
from bytecheckpoint.tuning import tuned
from tests.faults.coded import load_step, states
from tests.servers.hdfs import Hdfs
from tests.servers.rpc_fault_proxy import FaultRule, RpcFaultProxy, rpc_fault_proxy
from tests.storage.conftest import use
from tests.storage.test_end_to_end import MODES, ROWS, save, succeeded

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

CATALOG = "metadata.parquet"
#: With sub-files of 1 MiB: a file of four.
LARGE = content((3 << 20) + 4097)


@pytest.fixture
def folder(hdfs: Hdfs) -> str:
    return f"hdfs://demo_0/tests/{uuid.uuid4().hex}"


@pytest.fixture
def between(hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RpcFaultProxy]:
    """A proxy before the NameNode, which everything of the test goes through."""
    with rpc_fault_proxy(hdfs.port) as made:
        use(monkeypatch, hdfs.configuration(tmp_path / "between", namenode=made.address))
        yield made


def past(hdfs: Hdfs, url: str) -> str:
    """The same place by an address that goes past what stands between."""
    return url.replace("demo_0", f"127.0.0.1:{hdfs.port}")


def hdfs_files(storage: Storage) -> list[Any]:
    """All that is in the folder, hidden or not."""
    assert isinstance(storage, HdfsStorage)
    return list(storage._cluster.client.list_status(storage._root, True))


@pytest.mark.parametrize(("expected", "skip"), [("new", 0), ("replaced", 0), ("replaced", 1), ("any", 0)])
def test_a_rename_whose_answer_gets_lost(between: RpcFaultProxy, folder: str, expected: str, skip: int) -> None:
    storage = resolve(f"{folder}/step")
    if expected != "new":
        storage.publish(CATALOG, b"before")
    event = FaultRule("rename2", lose=True, skip=skip)
    between.rules.append(event)
    storage.publish(CATALOG, b"mine", expected=None if expected == "any" else storage.version(CATALOG))
    assert event.hits == 1
    assert resolve(storage.url).read(CATALOG) == b"mine"
    assert [entry.path.rpartition("/")[2] for entry in hdfs_files(storage)] == [CATALOG]


@pytest.mark.parametrize("replacing", [False, True])
def test_another_publisher_in_between(hdfs: Hdfs, between: RpcFaultProxy, folder: str, replacing: bool) -> None:
    """Another job commits between this one's look and its rename."""
    ours, theirs = resolve(f"{folder}/step"), resolve(past(hdfs, f"{folder}/step"))
    if replacing:
        ours.publish(CATALOG, b"before")
    version = ours.version(CATALOG)
    event = FaultRule("rename2", before=lambda: theirs.publish(CATALOG, b"theirs", expected=version))
    between.rules.append(event)
    with pytest.raises(StorageConflictError, match=r"cannot publish hdfs://demo_0/.*another save"):
        ours.publish(CATALOG, b"ours", expected=version)
    assert ours.read(CATALOG) == b"theirs"
    assert len(hdfs_files(ours)) == 1


@tuned(hdfs_lock_expiry=1.0)
def test_a_publisher_that_was_killed_half_way_is_no_obstacle(hdfs: Hdfs, between: RpcFaultProxy, folder: str) -> None:
    """Its lock expires and is removed; a publisher that was only slow then gets a conflict."""
    slow, quick = resolve(f"{folder}/step"), resolve(past(hdfs, f"{folder}/step"))
    slow.publish(CATALOG, b"before")
    version = slow.version(CATALOG)
    event = FaultRule("rename2", skip=1, before=lambda: quick.publish(CATALOG, b"quick", expected=version))
    between.rules.append(event)
    with pytest.raises(StorageConflictError):
        slow.publish(CATALOG, b"slow", expected=version)
    assert event.hits == 1
    assert slow.read(CATALOG) == b"quick"
    assert len(hdfs_files(slow)) == 1


def test_abandoned_files_go_with_a_later_save(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = resolve(f"{folder}/step")
    assert isinstance(storage, HdfsStorage)
    client = storage._cluster.client
    for name in (".bytecheckpoint-publishing-0123", ".bytecheckpoint-replacing-0123"):
        client.create(storage._path(name)).close()
    bytecheckpoint.save(storage.url, states(step=1))
    assert sum(".bytecheckpoint" in entry.path for entry in hdfs_files(storage)) == 2, "they may be in use"
    with tuned(hdfs_abandoned=-1.0):
        bytecheckpoint.save(storage.url, states(step=2))
    assert not any(".bytecheckpoint" in entry.path for entry in hdfs_files(storage))
    assert load_step(storage.url) == 2


# --- two jobs that save to one path ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "mode", "replacing"),
    [
        ("addBlock", "sync", True),
        ("addBlock", "async", False),
        ("concat", "sync", False),
        ("concat", "async", True),
        ("rename2", "sync", True),
        ("rename2", "async", False),
    ],
)
@tuned(hdfs_part_bytes=2 << 20)
def test_the_slower_of_two_jobs_hears_of_the_other(
    hdfs: Hdfs,
    between: RpcFaultProxy,
    folder: str,
    mode: str,
    method: str,
    replacing: bool,
) -> None:
    """Whatever it is doing when the other one commits, which takes its files for those of a killed save."""
    bytecheckpoint.configure(writer="thread")
    path = f"{folder}/step"
    if replacing:
        succeeded(save(past(hdfs, path), 1))
    event = FaultRule(
        method, before=lambda: succeeded(save(past(hdfs, path), 2)), skip=1 if method == "addBlock" else 0
    )
    between.rules.append(event)
    (raised,) = save(path, 3, **MODES[mode])
    assert event.hits == 1
    assert type(raised) is StorageConflictError, repr(raised)
    assert path in str(raised) and "another save" in str(raised) and "one job at a time" in str(raised)
    assert load_step(path, rows=ROWS) == 2
    named = {file.name for file in bytecheckpoint.open(path)._catalog.files}
    present = {entry.path.partition("/step/")[2] for entry in hdfs_files(resolve(path)) if not entry.isdir}
    assert present == {CATALOG, *named}, "nothing of the slower one is left"


@tuned(hdfs_part_bytes=1 << 20)
def test_a_file_that_is_removed_once_is_written_again(hdfs: Hdfs, between: RpcFaultProxy, folder: str) -> None:
    """A creation that timed out and takes effect late removes the file that replaced it."""
    storage, client = resolve(f"{folder}/step"), hdfs.client()
    path = f"{folder}/step/model/file".removeprefix("hdfs://demo_0")
    event = FaultRule("complete", before=lambda: client.delete(path))
    between.rules.append(event)
    write_file(storage, "model/file", LARGE)
    assert event.hits == 1
    assert np.array_equal(read_all(storage, "model/file"), LARGE)
    assert [entry.path for entry in hdfs_files(storage) if not entry.isdir] == [path]


def test_a_publisher_that_is_refused_leaves_nothing(hdfs: Hdfs, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = resolve(f"{folder}/step")
    storage.publish(CATALOG, b"before")
    assert isinstance(storage, HdfsStorage)

    def refuse(*_: Any, **__: Any) -> bool:
        raise StorageError("refused")

    monkeypatch.setattr(storage, "_rename", refuse)
    with pytest.raises(StorageError, match="refused"):
        storage.publish(CATALOG, b"after", expected=storage.version(CATALOG))
    assert storage.read(CATALOG) == b"before" and len(hdfs_files(storage)) == 1
