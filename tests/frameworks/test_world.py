"""Real DTensors, of FSDP2 and tensor parallelism too, in one world of 6 gloo processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.representation.shards import LiveShard
from bytecheckpoint.representation.values.codec import equal
from tests.frameworks.memory import MemoryCheckpoint, detached
from tests.support.torch_layouts import mesh
from tests.support.worlds import on_ranks

WORLD = 6


def checkpoint(states: dict[str, Any]) -> MemoryCheckpoint:
    """Save on all ranks: every rank gets the captures of all."""
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, detached(NativeFramework().capture(states)))
    return MemoryCheckpoint(gathered, dist.get_rank())


def arange(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def check_box(shard: LiveShard, whole: torch.Tensor) -> None:
    box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.lengths, strict=True))
    assert torch.equal(shard.data, whole[box]), (shard.offsets, shard.lengths)


def check_model(net: Any, whole: dict[str, torch.Tensor]) -> None:
    """Check this rank's shards, and the checkpoint of all ranks, against whole tensors by name."""
    (state,) = NativeFramework().capture({"model": net})
    for shard in state.shards:
        check_box(shard, whole[shard.key.fqn])
    for key, stored in checkpoint({"model": net}).whole.items():
        assert torch.equal(stored, whole[key.fqn]), key


@on_ranks(WORLD)
def test_distributed_aranges() -> None:
    strided = _StridedShard
    placements: list[tuple[dict[str, int], list[Any]]] = [
        ({"dp": 6}, [Shard(0)]),
        ({"dp": 6}, [Replicate()]),
        ({"dp": 2, "tp": 3}, [Shard(0), Shard(0)]),
        ({"dp": 2, "tp": 3}, [Replicate(), Shard(0)]),
        ({"dp": 3, "tp": 2}, [Shard(1), Shard(0)]),
        ({"dp": 3, "tp": 2}, [strided(0, split_factor=2), Shard(0)]),
        ({"dp": 2, "tp": 3}, [strided(0, split_factor=3), Shard(0)]),
        ({"dp": 2, "tp": 3}, [strided(1, split_factor=3), Shard(1)]),
        ({"dp": 6}, [strided(0, split_factor=2)]),
        ({"rep": 1, "shard": 3, "tp": 2}, [Replicate(), strided(0, split_factor=2), Shard(0)]),
        ({"rep": 3, "shard": 2, "tp": 1}, [strided(0, split_factor=2), Shard(0), Shard(1)]),
    ]
    shapes = ((7, 5), (12, 6), (13, 4), (1, 3), (5, 2), (4, 9), (0, 3), (3, 0))
    wholes = {str(shape): arange(*shape) for shape in shapes}
    for extents, placed in placements:
        over = mesh(**extents)
        check_model({n: distribute_tensor(w, over, placed, src_data_rank=None) for n, w in wholes.items()}, wholes)


def tensor_parallel(net: nn.Module, tp: DeviceMesh) -> nn.Module:
    return parallelize_module(net, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def stack(hidden: int = 7, width: int = 5) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.Linear(width, 3))
    for p in net.parameters():
        nn.init.zeros_(p)
        p.data += torch.arange(float(p.numel())).reshape(p.shape) / 16
    return net


def parameters(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in net.named_parameters()}


@on_ranks(WORLD)
def test_fully_shard_over_tensor_parallelism() -> None:
    """On meshes of two and of three dimensions, with modules that no degree divides."""
    whole = nn.Sequential(*(stack(hidden) for hidden in (7, 12, 5, 1, 13)))
    for rep, shard, tp in ((2, 3, 1), (1, 3, 2), (3, 1, 2), (1, 2, 3), (1, 1, 6)):
        cube, net = mesh(rep=rep, shard=shard, tp=tp), copy.deepcopy(whole)
        for part in net:
            tensor_parallel(part, cube["tp"])
        check_model(fully_shard(net, mesh=cube["rep", "shard"]), parameters(whole))


@on_ranks(WORLD)
def test_sharding_another_dimension() -> None:
    whole = nn.Sequential(nn.Linear(12, 6, bias=False), nn.Linear(6, 18, bias=False))
    for layer in whole:
        dist.broadcast(layer.weight.data, 0)
    net = fully_shard(copy.deepcopy(whole), mesh=mesh(dp=6), shard_placement_fn=lambda _: Shard(1))
    (state,) = NativeFramework().capture({"model": net})
    assert [s.lengths for s in state.shards] == [(6, 2), (18, 1)]
    check_model(net, parameters(whole))


@on_ranks(WORLD)
def test_ranks_outside_the_mesh_have_no_shards() -> None:
    part = DeviceMesh("cpu", [0, 1, 2, 3])
    whole = arange(5, 2)
    tensor = distribute_tensor(whole, part, [Shard(0)])
    (state,) = NativeFramework().capture({"model": {"w": tensor}})
    assert len(state.shards) == (1 if dist.get_rank() < 3 else 0)
    for shard in state.shards:
        check_box(shard, whole)


class OwnState(torch.optim.Optimizer):
    """An optimizer that only makes and updates state: `update(parameter, its state)`."""

    def __init__(self, params: Any, update: Callable[[torch.Tensor, dict[str, Any]], None]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, self.state[p])


def local_state(p: torch.Tensor, state: dict[str, Any]) -> None:
    """Make state from local tensors, as some custom optimizers do."""
    local = p.to_local() if isinstance(p, DTensor) else p.detach()
    state.update(local=local * 2, count=torch.tensor(1.0))


@on_ranks(WORLD)
def test_state_made_from_local_tensors() -> None:
    whole = stack()
    net = fully_shard(copy.deepcopy(whole), mesh=mesh(dp=6))
    optimizer = OwnState(net.parameters(), local_state)
    optimizer.step()
    saved = checkpoint({"model": net, "optimizer": optimizer})
    for key, stored in saved.whole.items():
        if key.slot == "local":
            assert torch.equal(stored, whole.get_parameter(key.fqn) * 2)
    again = OwnState(net.parameters(), local_state)
    again.step()
    for p in net.parameters():
        again.state[p]["local"].zero_()
    saved.load({"model": net, "optimizer": again})
    for p in net.parameters():
        assert equal(dict(optimizer.state[p]), dict(again.state[p]))


def weighed_state(p: torch.Tensor, state: dict[str, Any]) -> None:
    """Make a plain tensor of one element beside DTensors, as QHAdam does."""
    state.update(average=torch.zeros_like(p) + p.detach(), weight=torch.full((1,), 3.0))


@on_ranks(WORLD)
def test_one_value_beside_shards_of_one_element() -> None:
    """It was taken for a part of the parameter, which the optimizer got back six times as long."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = fully_shard(nn.Linear(2, WORLD), mesh=mesh(dp=WORLD))
        return net, OwnState(net.parameters(), weighed_state)

    (net, one), (live, two) = build(), build()
    one.step()
    saved = checkpoint({"model": net, "optimizer": one})
    for again in (False, True):  # into the memory of the first load, then
        saved.load({"model": live, "optimizer": two})
        for p, q in zip(net.parameters(), live.parameters(), strict=True):
            assert two.state[q]["weight"].shape == (1,) and float(two.state[q]["weight"]) == 3, again
            assert equal(one.state[p]["average"], two.state[q]["average"])
            two.state[q]["weight"].zero_()
    local = OwnState(live.parameters(), weighed_state)
    local.step()
    saved.load({"model": live, "optimizer": local})
    assert local.state[live.bias]["weight"] == 3 and type(local.state[live.bias]["weight"]) is torch.Tensor


def factored_state(p: torch.Tensor, state: dict[str, Any]) -> None:
    """Update state in place that has another shape than the parameter."""
    rows = p.detach().mean(dim=-1, keepdim=True)
    if not state:
        state.update(rows=torch.zeros_like(rows), history=[rows * 3, {"squares": p.detach() ** 2}])
    state["rows"].lerp_(rows, 0.5)


@on_ranks(WORLD)
def test_factored_and_nested_state() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        both = mesh(dp=3, tp=2)
        net = parallelize_module(stack(), both["tp"], {"0": ColwiseParallel(), "2": ColwiseParallel()})
        fully_shard(net, mesh=both["dp"])
        return net, OwnState([p for p in net.parameters() if p.ndim == 2], factored_state)

    (net, one), (live, two) = build(), build()
    one.step()
    checkpoint({"model": net, "optimizer": one}).load({"model": live, "optimizer": two})
    one.step()
    two.step()
    for p, q in zip(net.parameters(), live.parameters(), strict=True):
        assert equal(dict(one.state.get(p, {})), dict(two.state.get(q, {})))


@on_ranks(WORLD)
def test_dtensors_in_extra_states() -> None:
    whole = arange(7, 2)
    tensor = distribute_tensor(whole, mesh(dp=6), [Shard(0)], src_data_rank=None)
    saved = checkpoint({"extra_states": {"average": tensor, "rank": dist.get_rank()}})
    live: dict[str, Any] = {}
    saved.load({"extra_states": live})
    assert torch.equal(live["average"], whole) and live["rank"] == dist.get_rank()
    target = distribute_tensor(torch.zeros(7, 2), mesh(dp=2, tp=3), [Shard(1), Shard(0)], src_data_rank=None)
    live = {"average": target}
    saved.load({"extra_states": live})
    assert live["average"] is target and torch.equal(target.full_tensor(), whole)
