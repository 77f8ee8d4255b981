"""Jobs in pods of one node: what a name says of a machine is not believed. No Kubernetes runs here."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.collectives.store_collective import StoreCollective
from tests.support.memory import as_on_disk
from tests.support.namespaces import lacks, machines
from tests.support.pods import Pod, run_in_pods

pytestmark = [
    pytest.mark.skipif(bool(lacks()), reason=f"NOT TESTED HERE: {lacks()}"),
    pytest.mark.timeout(240),
]


def save_and_load(folder: str) -> dict[str, Any]:
    """Save and load through a folder that all pods share, and through the memory of each."""
    lines = list[str]()
    told = logging.Handler()
    told.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bytecheckpoint").addHandler(told)
    bytecheckpoint.configure(message_tree="on")
    _rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))
    whole = torch.arange(3_000_000, dtype=torch.float32).reshape(600, 5000)
    state = {"model": {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "everywhere": whole.clone()}}
    tier = f"tier+file://{folder}/tier"
    bytecheckpoint.save(f"{folder}/plain", state)
    bytecheckpoint.save(tier, state, async_checkpoint=True).result()
    for path in (as_on_disk(f"{folder}/plain"), tier):
        wanted = torch.zeros_like(whole)
        loaded = {"model": {"sharded": distribute_tensor(wanted, mesh, [Shard(1)]), "everywhere": wanted.clone()}}
        bytecheckpoint.load(path, loaded)
        assert torch.equal(loaded["model"]["sharded"].full_tensor(), whole)
        assert torch.equal(loaded["model"]["everywhere"], whole)
    collective = current()
    assert isinstance(collective, StoreCollective)
    return {"lines": lines, "connected": len({link.rank for link in collective._star.below.values()})}


@pytest.mark.parametrize(
    ("networks", "names", "connected", "warned"),
    [
        pytest.param(2, ["trainer-0", "trainer-1"], 2, False, id="as of a StatefulSet"),
        pytest.param(2, ["trainer", "trainer"], 2, True, id="one name"),
        pytest.param(1, ["node", "node"], 3, True, id="hostNetwork"),
    ],
)
def test_pods_of_one_node(networks: int, names: list[str], connected: int, warned: bool) -> None:
    """Two pods of two ranks: one boot, and host names that nobody can resolve."""
    with machines(2) as hosts, tempfile.TemporaryDirectory() as folder:
        pods = [Pod(hosts[min(number, networks - 1)], name, 2) for number, name in enumerate(names)]
        found = run_in_pods(Path(folder), pods, "10.99.9.1", 29500, save_and_load)
    assert found[0]["connected"] == connected, "one rank carries the messages of a network"
    for facts in found:
        # Where two pods look like one machine, each rank finds out that they are not, and says so.
        assert ["cannot read the memory of other ranks" in line for line in facts["lines"]] == [True] * warned
