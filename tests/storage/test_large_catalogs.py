"""Large catalogs on real servers: ranks read them in parts, and ask the server for each part once per machine."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CorruptCheckpointError
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.hdfs.storage import HdfsStorage
from bytecheckpoint.tuning import tuned
from tests.servers.fault_proxy import fault_proxy
from tests.servers.hdfs import Hdfs, Operations, path_in_cluster
from tests.servers.s3 import S3Server
from tests.storage.conftest import ANYWHERE, use
from tests.support.large_catalogs import NAMES, RANKS, SHAPE, load, save
from tests.support.layouts import coded
from tests.support.memory import hot_folder, hot_tier
from tests.support.variants import crossed, quick

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """True for each decoded catalog that was read in parts, else False."""
    found: list[bool] = []
    catalog = CatalogGroups.catalog

    def noted(self: CatalogGroups, groups: Any = None, near: Any = None) -> object:
        found.append(groups is not None)
        return catalog(self, groups, near)

    monkeypatch.setattr(CatalogGroups, "catalog", noted)
    return found


@pytest.mark.parametrize("anywhere", quick(ANYWHERE, every=2), indirect=True)
def test_loads_read_parts(anywhere: str, parts: list[bool]) -> None:
    save(f"{anywhere}/step")
    parts.clear()
    for world in (1, 5):
        assert [found["own"] for found in load(f"{anywhere}/step", world)] == [*range(world)]
    with tuned(catalog_group_bytes=1), bytecheckpoint.open(f"{anywhere}/step") as checkpoint:
        for i, name in enumerate(NAMES):
            assert torch.equal(checkpoint[f"model/{name}"][...], coded(SHAPE, torch.float32, i))
    assert parts and all(parts)
    storage = resolve(f"{anywhere}/step")
    data = bytearray(storage.read(CATALOG_NAME))
    data[30] ^= 1  # in the first group
    storage.publish(CATALOG_NAME, bytes(data))
    for error in load(f"{anywhere}/step", RANKS):
        assert isinstance(error, CorruptCheckpointError) and "row group 0" in str(error)


@pytest.mark.parametrize(("anywhere", "hot"), crossed(ANYWHERE, [True, False]), indirect=["anywhere"])
def test_a_tier_before_it(anywhere: str, hot: bool, parts: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"tier+{anywhere}/step" if "://" in anywhere else f"tier+file://{anywhere}/step"
    with hot_tier(monkeypatch):
        save(path)
        if not hot:
            shutil.rmtree(hot_folder(path))
        parts.clear()
        assert [found["own"] for found in load(path, 5)] == [*range(5)]
        assert parts and all(parts)


def test_many_ranks_ask_s3_once(s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"s3://{bucket}/step"
    save(path, group_bytes=1 << 22)
    with fault_proxy(s3.endpoint) as between:
        use(monkeypatch, s3.environment(between.endpoint))
        assert len(load(path, 64, group_bytes=1 << 22)) == 64
        asked = [request.method for request in between.requests if request.path.endswith(CATALOG_NAME)]
    assert sorted(asked) == ["GET", "HEAD"], "its length and its bytes"


@pytest.mark.parametrize("machines", [1, 4])
def test_groups_are_asked_for_once_per_machine(
    s3: S3Server, bucket: str, machines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"s3://{bucket}/step"
    save(path)
    with fault_proxy(s3.endpoint) as between:
        use(monkeypatch, s3.environment(between.endpoint))
        assert len(load(path, 64, [f"m{rank * machines // 64}" for rank in range(64)])) == 64
        asked = [r.headers["range"] for r in between.requests if r.method == "GET" and r.path.endswith(CATALOG_NAME)]
    assert len(asked) > RANKS
    assert len(asked) - len(set(asked)) < machines, "two machines may share the group of one rank that saved"


def test_hdfs_opens_it_once(hdfs: Hdfs, hdfs_storage: HdfsStorage) -> None:
    save(hdfs_storage)
    files = len(hdfs_storage.list())
    operations = Operations(hdfs)
    with bytecheckpoint.open(hdfs_storage) as checkpoint:
        assert checkpoint["extra_states/own"] == 0
    operations.since()
    assert len(load(hdfs_storage, RANKS)) == RANKS
    assert operations.since()["GetBlockLocations"] <= 2 * files + RANKS


def test_a_catalog_that_another_program_is_writing(hdfs: Hdfs, hdfs_storage: HdfsStorage) -> None:
    """It has no length yet; the rank that reads it fails, and all ranks with it."""
    writer = hdfs.client().create(f"{path_in_cluster(hdfs_storage)}/{CATALOG_NAME}")
    writer.write(b"PAR1" * 1000)
    for error in load(hdfs_storage, 3):
        assert isinstance(error, CorruptCheckpointError) and CATALOG_NAME in str(error)
    writer.close()
    for error in load(hdfs_storage, 3):
        assert isinstance(error, CorruptCheckpointError) and CATALOG_NAME in str(error)
