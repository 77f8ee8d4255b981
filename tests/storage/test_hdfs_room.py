"""A save that does not fit into an HDFS fails before its first byte, with the bytes needed and the bytes left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import StorageFullError
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.hdfs.cluster import cluster_of
from tests.servers.hdfs import Hdfs
from tests.servers.tcp_proxy import TcpProxy
from tests.support.coded import load_step, states
from tests.support.ranks import save_all
from tests.support.settings import forget_failure
from tests.support.variants import quick

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

#: Three tensors of 38.4 MB, two replicas each.
ROWS = 120_000


@pytest.fixture
def limited(hdfs: Hdfs, hdfs_path: str) -> Iterator[str]:
    """The folder of the step, with a quota of 200 MB for all replicas; its path for the NameNode."""
    run = hdfs_path.removeprefix("hdfs://demo_0").removesuffix("/step")
    hdfs.client().mkdirs(run, create_parent=True)
    hdfs.admin("-setSpaceQuota", "200000000", run)
    yield run
    hdfs.admin("-clrSpaceQuota", run)


@pytest.mark.parametrize("mode", quick([{"async_checkpoint": True}, {}], every=2))
def test_a_quota(limited: str, hdfs: Hdfs, rpc_proxy: TcpProxy, hdfs_path: str, mode: dict[str, Any]) -> None:
    """The quota is of all replicas, and of the folder above the checkpoint."""
    bytecheckpoint.save(hdfs_path, states(step=1))
    created = rpc_proxy.add("create", times=-1)
    says = rf"cannot save to {hdfs_path}: it takes (\d+) bytes, and the space quota of {limited} has (\d+) left"
    with pytest.raises(StorageFullError, match=says) as raised:
        bytecheckpoint.save(hdfs_path, states(step=2, rows=ROWS), **mode).result(60)
    needed, left = map(int, re.search(says, str(raised.value)).groups())  # type: ignore[union-attr]
    assert needed > 110_000_000 > left > 90_000_000
    assert not created.hits
    forget_failure()
    assert load_step(hdfs_path) == 1
    hdfs.admin("-setSpaceQuota", "2000000000", limited)
    bytecheckpoint.save(hdfs_path, states(step=3, rows=ROWS))
    assert load_step(hdfs_path, rows=ROWS) == 3


def test_the_bytes_of_all_ranks_count(limited: str, hdfs_path: str) -> None:
    bytecheckpoint.save(hdfs_path, states(step=1))  # by which the replicas are known
    files = resolve(hdfs_path).list()
    for raised in save_all(ThreadWorld(4), hdfs_path, 1, rows=ROWS):
        assert isinstance(raised, StorageFullError) and "the space quota of" in str(raised)
    assert resolve(hdfs_path).list() == files


@pytest.mark.parametrize("operation", ["getContentSummary", "getFsStats"])
def test_a_namenode_that_does_not_tell(rpc_proxy: TcpProxy, hdfs_path: str, operation: str) -> None:
    """The save continues without the answer."""
    unanswered = rpc_proxy.add(operation, lose=True, times=-1)
    bytecheckpoint.save(hdfs_path, states(step=1))
    assert unanswered.hits
    assert load_step(hdfs_path) == 1


def test_a_folder_without_a_quota_is_asked_once(rpc_proxy: TcpProxy, hdfs_path: str) -> None:
    for step in range(3):
        bytecheckpoint.save(hdfs_path, states(step=step))
    asked = rpc_proxy.add("getContentSummary", times=-1)
    bytecheckpoint.save(hdfs_path, states(step=4))
    assert not asked.hits


def test_the_room_of_the_cluster(hdfs: Hdfs) -> None:
    remaining = cluster_of("demo_0").remaining_bytes(10.0)
    assert remaining is not None
    assert remaining == pytest.approx(hdfs.bean("NameNode", "FSNamesystemState")["CapacityRemaining"], rel=0.2)
