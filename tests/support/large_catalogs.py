"""Small checkpoints of many ranks whose catalogs are in groups, and a storage that counts the reads of a catalog."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.wrappers import Call, WrappedStorage
from bytecheckpoint.tuning import tuned
from tests.support.layouts import Leaf, coded, grid_boxes
from tests.support.ranks import outcomes
from tests.support.settings import using

RANKS = 12
NAMES = [f"w{i}" for i in range(6)]
SHAPE = (48, 3)


def states(rank: int, world: int, *, fresh: bool) -> dict[str, Any]:
    """Return the states of rank `rank` of an FSDP job: a box of each tensor, own values and shared ones."""
    box = grid_boxes(SHAPE, [[SHAPE[0] * r // world for r in range(1, world)], []])[rank]
    # The destination begins with other numbers than the saved ones.
    model = {
        name: Leaf(SHAPE, [box]).fill(coded(SHAPE, torch.float32, i) * (not fresh), False)
        for i, name in enumerate(NAMES)
    }
    values = {} if fresh else {"all": {"x": [1, 2]}, "own": rank}
    return {"model": model, "extra_states": values}


def save(path: str | Path | Storage, *, world: int = RANKS, group_bytes: int = 1) -> None:
    def run(collective: Collective) -> None:
        bytecheckpoint.save(path, states(collective.rank, world, fresh=False)).result(60)

    with using(writer="thread"), tuned(catalog_group_bytes=group_bytes):
        ThreadWorld(world).run(run)


def load(path: str | Path | Storage, world: int, hosts: Sequence[str] = (), *, group_bytes: int = 1) -> list[Any]:
    def run(collective: Collective) -> Any:
        destination = states(collective.rank, world, fresh=True)
        bytecheckpoint.load(path, destination, timeout=60)
        for i, name in enumerate(NAMES):
            destination["model"][name].check(coded(SHAPE, torch.float32, i))
        return destination["extra_states"]

    ranks = ThreadWorld(world)
    for collective, host in zip(ranks.ranks, hosts, strict=False):
        collective.host = host
    with using(writer="thread"), tuned(catalog_group_bytes=group_bytes):
        return outcomes(ranks, run)


class FarStorage(WrappedStorage):
    """No page cache keeps its files. Calls for the catalog are counted: (operation, bytes)."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.capabilities = replace(self.capabilities, page_cache=False)
        self.calls: list[tuple[str, int]] = []
        self.before: Callable[[str], None] = lambda operation: None

    def around(self, call: Call, function: Callable[[], Any]) -> Any:
        if call.names == (CATALOG_NAME,):
            self.before(call.operation)
            self.calls.append((call.operation, call.nbytes))
        return function()

    def count(self) -> Counter[str]:
        return Counter(operation for operation, _ in self.calls)
