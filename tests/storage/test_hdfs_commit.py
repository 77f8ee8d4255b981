"""Commits on HDFS: renames, locks, jobs that save to one path, writers that are killed."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

import bytecheckpoint
from bytecheckpoint import StorageConflictError, StorageError
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.hdfs.storage import HdfsStorage
from bytecheckpoint.storage.testing import content
from bytecheckpoint.tuning import tuned
from tests.servers.hdfs import Hdfs, path_in_cluster
from tests.servers.tcp_proxy import TcpProxy
from tests.storage.checks import check_file
from tests.support.catalogs import catalog_at
from tests.support.coded import load_step, states
from tests.support.modes import MODES
from tests.support.ranks import succeeded
from tests.support.saves import ROWS, save

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

CATALOG = "metadata.parquet"
#: With sub-files of 1 MiB: a file of four.
LARGE = content((3 << 20) + 4097)


def past(hdfs: Hdfs, url: str) -> str:
    """Return the same place by an address that goes past the proxy."""
    return url.replace("demo_0", f"127.0.0.1:{hdfs.port}")


def hdfs_files(hdfs: Hdfs, storage: Storage) -> list[Any]:
    """Return all entries of the folder, hidden or not."""
    return list(hdfs.client().list_status(path_in_cluster(storage), True))


@pytest.mark.parametrize(("expected", "skip"), [("new", 0), ("replaced", 0), ("replaced", 1), ("any", 0)])
def test_a_rename_whose_answer_gets_lost(
    hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str, expected: str, skip: int
) -> None:
    storage = resolve(hdfs_path)
    if expected != "new":
        storage.publish(CATALOG, b"before")
    event = rpc_proxy.add("rename2", lose=True, skip=skip)
    storage.publish(CATALOG, b"mine", expected=None if expected == "any" else storage.version(CATALOG))
    assert event.hits == 1
    assert resolve(storage.url).read(CATALOG) == b"mine"
    assert [entry.path.rpartition("/")[2] for entry in hdfs_files(hdfs, storage)] == [CATALOG]


@pytest.mark.parametrize("replacing", [False, True])
def test_another_publisher_in_between(hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str, replacing: bool) -> None:
    """Another job commits between this one's look and its rename."""
    ours, theirs = resolve(hdfs_path), resolve(past(hdfs, hdfs_path))
    if replacing:
        ours.publish(CATALOG, b"before")
    version = ours.version(CATALOG)
    rpc_proxy.add("rename2", before=lambda: theirs.publish(CATALOG, b"theirs", expected=version))
    with pytest.raises(StorageConflictError, match=r"cannot publish hdfs://demo_0/.*another save"):
        ours.publish(CATALOG, b"ours", expected=version)
    assert ours.read(CATALOG) == b"theirs"
    assert len(hdfs_files(hdfs, ours)) == 1


@tuned(hdfs_lock_expiry=1.0)
def test_a_publisher_that_was_killed_half_way_is_no_obstacle(hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str) -> None:
    """Its lock expires and is removed; a publisher that was only slow then gets a conflict."""
    slow, quick = resolve(hdfs_path), resolve(past(hdfs, hdfs_path))
    slow.publish(CATALOG, b"before")
    version = slow.version(CATALOG)
    event = rpc_proxy.add("rename2", skip=1, before=lambda: quick.publish(CATALOG, b"quick", expected=version))
    with pytest.raises(StorageConflictError):
        slow.publish(CATALOG, b"slow", expected=version)
    assert event.hits == 1
    assert slow.read(CATALOG) == b"quick"
    assert len(hdfs_files(hdfs, slow)) == 1


def test_abandoned_files_go_with_a_later_save(hdfs: Hdfs, hdfs_storage: HdfsStorage) -> None:
    for name in (".bytecheckpoint-publishing-0123", ".bytecheckpoint-replacing-0123"):
        hdfs.client().create(f"{path_in_cluster(hdfs_storage)}/{name}").close()
    bytecheckpoint.save(hdfs_storage.url, states(step=1))
    assert sum(".bytecheckpoint" in entry.path for entry in hdfs_files(hdfs, hdfs_storage)) == 2, "they may be in use"
    with tuned(hdfs_abandoned=-1.0):
        bytecheckpoint.save(hdfs_storage.url, states(step=2))
    assert not any(".bytecheckpoint" in entry.path for entry in hdfs_files(hdfs, hdfs_storage))
    assert load_step(hdfs_storage.url) == 2


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
def test_the_slower_of_two_jobs_gets_a_conflict(
    hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str, mode: str, method: str, replacing: bool
) -> None:
    """The quicker one commits at any moment of the slower one, and takes its files for those of a killed save."""
    bytecheckpoint.configure(writer="thread")
    other = past(hdfs, hdfs_path)
    if replacing:
        succeeded(save(other, 1))
    skip = 1 if method == "addBlock" else 0
    event = rpc_proxy.add(method, before=lambda: succeeded(save(other, 2)), skip=skip)
    (raised,) = save(hdfs_path, 3, **MODES[mode])
    assert event.hits == 1
    assert type(raised) is StorageConflictError, repr(raised)
    assert hdfs_path in str(raised) and "another save" in str(raised) and "one job at a time" in str(raised)
    assert load_step(hdfs_path, rows=ROWS) == 2
    named = {file.name for file in catalog_at(hdfs_path).files}
    present = {entry.path.partition("/step/")[2] for entry in hdfs_files(hdfs, resolve(hdfs_path)) if not entry.isdir}
    assert present == {CATALOG, *named}, "nothing of the slower one is left"


@tuned(hdfs_part_bytes=1 << 20)
def test_a_file_that_is_removed_once_is_written_again(hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str) -> None:
    """A creation that timed out and takes effect late removes the file that replaced it."""
    storage, client = resolve(hdfs_path), hdfs.client()
    path = f"{hdfs_path}/model/file".removeprefix("hdfs://demo_0")
    event = rpc_proxy.add("complete", before=lambda: client.delete(path))
    check_file(storage, "model/file", LARGE)
    assert event.hits == 1
    assert [entry.path for entry in hdfs_files(hdfs, storage) if not entry.isdir] == [path]


def test_a_publisher_that_is_refused_leaves_nothing(
    hdfs: Hdfs, hdfs_storage: HdfsStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    hdfs_storage.publish(CATALOG, b"before")
    version = hdfs_storage.version(CATALOG)
    monkeypatch.setattr(hdfs_storage, "_rename", Mock(side_effect=StorageError("refused")))
    with pytest.raises(StorageError, match="refused"):
        hdfs_storage.publish(CATALOG, b"after", expected=version)
    assert hdfs_storage.read(CATALOG) == b"before" and len(hdfs_files(hdfs, hdfs_storage)) == 1
