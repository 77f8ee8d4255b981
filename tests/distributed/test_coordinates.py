"""The place of a rank in its job's layout, as metrics show it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from bytecheckpoint.frameworks.coordinates import mesh_coordinates
from tests.support.worlds import on_ranks


@pytest.mark.parametrize("what", ["module", "state dict", "tensor in a list"])
@on_ranks(4)
def test_distributed_tensors_tell_the_mesh_of_the_job(what: str) -> None:
    """Also where a tensor is on a part of it only."""
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    module = fully_shard(nn.Linear(4, 4), mesh=mesh["dp_shard"])
    tensor = distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)])
    state = {"module": module, "state dict": module.state_dict(), "tensor in a list": {"x": [1, {"y": tensor}]}}[what]
    found = mesh_coordinates({"model": state, "step": 3}, "", rank, 4)
    assert found == {"dp": rank // 2, "dp_shard": rank // 2, "tp": rank % 2}


@on_ranks(2)
def test_other_states_tell_what_they_can() -> None:
    rank = dist.get_rank()
    model = nn.Linear(4, 4)
    assert mesh_coordinates({"model": model}, "", rank, 2) == {}
    assert mesh_coordinates({"model": DistributedDataParallel(model)}, "", rank, 2) == {"dp": rank}
    assert mesh_coordinates({"model": model}, "pp=2,dp=1", rank, 2) == {"pp": rank, "dp": 0}
    assert mesh_coordinates({"model": model}, "pp=3", rank, 2) == {}, "a mesh of another number of ranks"
