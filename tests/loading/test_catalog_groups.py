"""Loads of checkpoints whose catalogs are in groups: each rank reads those that it needs, and no damage is silent."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CorruptCheckpointError
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.objects.bucket import Bucket
from bytecheckpoint.storage.objects.storage import ObjectStorage
from bytecheckpoint.tuning import tuned
from tests.faults.ranks import outcomes
from tests.support.layouts import Leaf, coded, grid_boxes
from tests.support.settings import using

RANKS = 12
NAMES = [f"w{i}" for i in range(6)]
SHAPE = (48, 3)


def states(rank: int, world: int, *, fresh: bool) -> dict[str, Any]:
    """What rank `rank` of an FSDP job has: a box of each tensor, and values of its own and of all."""
    box = grid_boxes(SHAPE, [[SHAPE[0] * r // world for r in range(1, world)], []])[rank]
    # The destination begins with other numbers than the saved ones.
    model = {
        name: Leaf(SHAPE, [box]).fill(coded(SHAPE, torch.float32, i) * (not fresh), False)
        for i, name in enumerate(NAMES)
    }
    values = {} if fresh else {"all": {"x": [1, 2]}, "own": rank}
    return {"model": model, "extra_states": values}


def save(path: Path | Storage) -> None:
    def run(collective: Collective) -> None:
        bytecheckpoint.save(path, states(collective.rank, RANKS, fresh=False))

    with using(writer="thread"), tuned(catalog_group_bytes=1):
        ThreadWorld(RANKS).run(run)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "step")
    return tmp_path / "step"


def load(path: Path | Storage, world: int) -> list[Any]:
    def run(collective: Collective) -> Any:
        into = states(collective.rank, world, fresh=True)
        bytecheckpoint.load(path, into, timeout=60)
        for i, name in enumerate(NAMES):
            into["model"][name].check(coded(SHAPE, torch.float32, i))
        return into["extra_states"]

    with using(writer="thread"), tuned(catalog_group_bytes=1):
        return outcomes(ThreadWorld(world), run)


@pytest.mark.parametrize("world", [1, 5, RANKS, 16])
def test_other_layouts_load(saved: Path, world: int) -> None:
    for rank, found in enumerate(load(saved, world)):
        assert found == {"all": {"x": [1, 2]}, "own": rank if rank < RANKS else 0}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Catalog]:
    """What is decoded of catalogs in groups."""
    found: list[Catalog] = []
    lock = threading.Lock()
    catalog = CatalogGroups.catalog

    def noted(self: CatalogGroups, groups: Any = None) -> Catalog:
        decoded = catalog(self, groups)
        with lock:
            found.append(decoded)
        return decoded

    monkeypatch.setattr(CatalogGroups, "catalog", noted)
    return found


def test_each_rank_reads_the_groups_that_it_needs(saved: Path, reads: list[Catalog]) -> None:
    load(saved, RANKS)
    assert len(reads) == 2 * RANKS  # the plain values, then what the rank wants
    assert all({*NAMES} <= {*read.fqn.to_list()} for read in reads)
    rows = sorted(int((read.boxes.lengths[:, 1] == SHAPE[1]).sum()) for read in reads)
    assert rows == [0] * RANKS + [len(NAMES)] * RANKS


def test_many_ranks_read_parts_from_an_object_store(reads: list[Catalog], monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ObjectStorage("s3://bucket/step", Bucket("memory", obstore.store.MemoryStore(), 1.0))
    monkeypatch.setattr(ObjectStorage, "parts_from_ranks", 3)
    save(storage)
    reads.clear()
    for world, parts in ((2, False), (3, True)):
        assert [found["own"] for found in load(storage, world)] == [*range(world)]
        assert {read.files_read is not None for read in reads} == {parts}
        reads.clear()


def test_a_catalog_that_is_replaced_between_two_reads_is_read_whole(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(size: int, read_into: Any) -> None:
        raise CorruptCheckpointError("its bytes are those of two catalogs")

    monkeypatch.setattr(CatalogGroups, "open", torn)
    assert [found["own"] for found in load(saved, 2)] == [0, 1]


def test_a_damaged_group_fails_the_load_and_is_named(saved: Path) -> None:
    file = saved / CATALOG_NAME
    data = bytearray(file.read_bytes())
    data[30] ^= 1  # in the first group, which the first rank alone needs
    file.write_bytes(data)
    found = load(saved, RANKS)
    assert all(isinstance(error, CorruptCheckpointError) for error in found), found
    assert all(CATALOG_NAME in str(error) and "row group 0" in str(error) for error in found)
