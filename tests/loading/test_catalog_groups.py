"""Loads of checkpoints whose catalogs are in groups: each rank reads those that it needs, and no damage is silent."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CorruptCheckpointError
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.names import CATALOG_NAME
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


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    def save(collective: Collective) -> None:
        bytecheckpoint.save(tmp_path / "step", states(collective.rank, RANKS, fresh=False))

    with using(writer="thread"), tuned(catalog_group_bytes=1):
        ThreadWorld(RANKS).run(save)
    return tmp_path / "step"


def load(path: Path, world: int) -> list[Any]:
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


def test_each_rank_reads_the_groups_that_it_needs(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Catalog] = []
    lock = threading.Lock()
    catalog = CatalogGroups.catalog

    def noted(self: CatalogGroups, groups: Any = None) -> Catalog:
        assert groups is not None, "the catalog was decoded whole"
        found = catalog(self, groups)
        with lock:
            reads.append(found)
        return found

    monkeypatch.setattr(CatalogGroups, "catalog", noted)
    load(saved, RANKS)
    assert len(reads) == 2 * RANKS  # the plain values, then what the rank wants
    assert all({*NAMES} <= {*read.fqn.to_list()} for read in reads)
    rows = sorted(int((read.boxes.lengths[:, 1] == SHAPE[1]).sum()) for read in reads)
    assert rows == [0] * RANKS + [len(NAMES)] * RANKS


def test_a_damaged_group_fails_the_load_and_is_named(saved: Path) -> None:
    file = saved / CATALOG_NAME
    data = bytearray(file.read_bytes())
    data[30] ^= 1  # in the first group, which the first rank alone needs
    file.write_bytes(data)
    found = load(saved, RANKS)
    assert all(isinstance(error, CorruptCheckpointError) for error in found), found
    assert all(CATALOG_NAME in str(error) and "row group 0" in str(error) for error in found)
