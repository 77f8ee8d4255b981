"""The cases that every rank of the world of test_world.py runs: functions without arguments that raise when they fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.native import NativeFramework
from bytecheckpoint.representation.shards import LiveShard
from bytecheckpoint.representation.values.codec import equal
from tests.frameworks.memory import MemoryCheckpoint, detached

WORLD = 6
CASES: dict[str, Callable[[], None]] = {}
_MESHES: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def mesh(shape: tuple[int, ...], names: tuple[str, ...] = ()) -> DeviceMesh:
    names = names or tuple(f"d{i}" for i in range(len(shape)))
    if (shape, names) not in _MESHES:
        _MESHES[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _MESHES[shape, names]


def checkpoint(states: dict[str, Any]) -> MemoryCheckpoint:
    """Save on all ranks: every rank gets the captures of all."""
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, detached(NativeFramework().capture(states)))
    return MemoryCheckpoint(gathered, dist.get_rank())


def arange(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def check_boxes(shards: list[LiveShard], whole: torch.Tensor) -> None:
    for shard in shards:
        box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.lengths, strict=True))
        assert torch.equal(shard.data, whole[box]), (shard.offsets, shard.lengths)


@case
def distributed_aranges() -> None:
    strided = _StridedShard
    placements: list[tuple[tuple[int, ...], list[Any]]] = [
        ((6,), [Shard(0)]),
        ((6,), [Replicate()]),
        ((2, 3), [Shard(0), Shard(0)]),
        ((2, 3), [Replicate(), Shard(0)]),
        ((3, 2), [Shard(1), Shard(0)]),
        ((3, 2), [strided(0, split_factor=2), Shard(0)]),
        ((2, 3), [strided(0, split_factor=3), Shard(0)]),
        ((2, 3), [strided(1, split_factor=3), Shard(1)]),
        ((6,), [strided(0, split_factor=2)]),
        ((1, 3, 2), [Replicate(), strided(0, split_factor=2), Shard(0)]),
        ((3, 2, 1), [strided(0, split_factor=2), Shard(0), Shard(1)]),
    ]
    shapes = ((7, 5), (12, 6), (13, 4), (1, 3), (5, 2), (4, 9), (0, 3), (3, 0))
    for extents, placed in placements:
        wholes = {str(shape): arange(*shape) for shape in shapes}
        tensors = {n: distribute_tensor(w, mesh(extents), placed, src_data_rank=None) for n, w in wholes.items()}
        for key, stored in checkpoint({"model": tensors}).whole.items():
            assert torch.equal(stored, wholes[key.fqn]), (extents, placed, key)
        (state,) = NativeFramework().capture({"model": tensors})
        for shard in state.shards:
            check_boxes([shard], wholes[shard.key.fqn])


def tensor_parallel(net: nn.Module, tp: DeviceMesh) -> nn.Module:
    return parallelize_module(net, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def stack(hidden: int = 7, width: int = 5) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.Linear(width, 3))
    for p in net.parameters():
        nn.init.zeros_(p)
        p.data += torch.arange(float(p.numel())).reshape(p.shape) / 16
    return net


@case
def fully_shard_over_tensor_parallelism() -> None:
    for extents in ((3, 2), (2, 3), (6, 1), (1, 6)):
        for hidden in (7, 12, 5, 1, 13):
            whole = stack(hidden)
            both = mesh(extents, ("dp", "tp"))
            net = tensor_parallel(copy.deepcopy(whole), both["tp"])
            fully_shard(net, mesh=both["dp"])
            (state,) = NativeFramework().capture({"model": net})
            for shard in state.shards:
                check_boxes([shard], whole.get_parameter(shard.key.fqn))
            for key, stored in checkpoint({"model": net}).whole.items():
                assert torch.equal(stored, whole.get_parameter(key.fqn)), (extents, hidden, key)


@case
def hybrid_and_three_dimensional_meshes() -> None:
    whole = stack()
    nets = [fully_shard(copy.deepcopy(whole), mesh=mesh((2, 3), ("rep", "shard")))]
    for extents in ((1, 3, 2), (3, 1, 2), (1, 2, 3)):
        cube = mesh(extents, ("rep", "shard", "tp"))
        nets.append(fully_shard(tensor_parallel(copy.deepcopy(whole), cube["tp"]), mesh=cube["rep", "shard"]))
    for net in nets:
        for key, stored in checkpoint({"model": net}).whole.items():
            assert torch.equal(stored, whole.get_parameter(key.fqn)), key


@case
def sharding_another_dimension() -> None:
    whole = nn.Sequential(nn.Linear(12, 6, bias=False), nn.Linear(6, 18, bias=False))
    dist.broadcast(whole[0].weight.data, 0)
    dist.broadcast(whole[1].weight.data, 0)
    net = fully_shard(copy.deepcopy(whole), mesh=mesh((6,), ("dp",)), shard_placement_fn=lambda _: Shard(1))
    (state,) = NativeFramework().capture({"model": net})
    assert [s.lengths for s in state.shards] == [(6, 2), (18, 1)]
    for key, stored in checkpoint({"model": net}).whole.items():
        assert torch.equal(stored, whole.get_parameter(key.fqn))


@case
def a_module_still_gathered_after_an_evaluation_forward() -> None:
    whole = stack()
    net = fully_shard(copy.deepcopy(whole), mesh=mesh((6,), ("dp",)), reshard_after_forward=False)
    net.eval()
    with torch.no_grad():
        net(torch.ones(2, 5))
    for key, stored in checkpoint({"model": net}).whole.items():
        assert torch.equal(stored, whole.get_parameter(key.fqn))
    saved = checkpoint({"model": net})
    with torch.no_grad():
        net(torch.ones(2, 5))
        for tensor in saved.whole.values():
            tensor.add_(1)
    saved.load({"model": net})
    for name, parameter in net.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name) + 1)


@case
def ranks_outside_the_mesh_have_no_shards() -> None:
    part = DeviceMesh("cpu", [0, 1, 2, 3])
    whole = arange(5, 2)
    tensor = distribute_tensor(whole, part, [Shard(0)])
    (state,) = NativeFramework().capture({"model": {"w": tensor}})
    assert len(state.shards) == (1 if dist.get_rank() < 3 else 0)
    check_boxes(state.shards, whole)


@case
def partial_tensors_are_refused_by_name() -> None:
    tensor = DTensor.from_local(torch.ones(2), mesh((6,)), [Partial()])
    with pytest.raises(UsageError, match=r"model/inner\.w"):
        NativeFramework().capture({"model": {"inner": {"w": tensor}}})


class LocalState(torch.optim.Optimizer):
    """An optimizer that makes its state from local tensors, as some custom optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                local = p.to_local() if isinstance(p, DTensor) else p.detach()
                self.state[p] = {"local": local * 2, "count": torch.tensor(1.0)}


@case
def state_made_from_local_tensors() -> None:
    whole = stack()
    net = fully_shard(copy.deepcopy(whole), mesh=mesh((6,), ("dp",)))
    optimizer = LocalState(net.parameters())
    optimizer.step()
    saved = checkpoint({"model": net, "optimizer": optimizer})
    for key, stored in saved.whole.items():
        if key.slot == "local":
            assert torch.equal(stored, whole.get_parameter(key.fqn) * 2)
    again = LocalState(net.parameters())
    again.step()
    for p in net.parameters():
        again.state[p]["local"].zero_()
    saved.load({"model": net, "optimizer": again})
    for p in net.parameters():
        assert equal(dict(optimizer.state[p]), dict(again.state[p]))


class Factored(torch.optim.Optimizer):
    """An optimizer whose state has another shape than the parameter, updated in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.detach().mean(dim=-1, keepdim=True)
                state = self.state[p]
                if not state:
                    state["rows"] = torch.zeros_like(rows)
                    state["history"] = [rows * 3, {"squares": p.detach() ** 2}]
                state["rows"].lerp_(rows, 0.5)


@case
def factored_and_nested_state() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        both = mesh((3, 2), ("dp", "tp"))
        net = parallelize_module(stack(), both["tp"], {"0": ColwiseParallel(), "2": ColwiseParallel()})
        fully_shard(net, mesh=both["dp"])
        return net, Factored([p for p in net.parameters() if p.ndim == 2])

    (net, one), (live, two) = build(), build()
    one.step()
    checkpoint({"model": net, "optimizer": one}).load({"model": live, "optimizer": two})
    one.step()
    two.step()
    for p, q in zip(net.parameters(), live.parameters(), strict=True):
        assert equal(dict(one.state.get(p, {})), dict(two.state.get(q, {})))


Layout = Callable[[], tuple[Any, Any]]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=0.01, amsgrad=True)


def one_process() -> tuple[Any, Any]:
    net = stack()
    return net, adam(net.parameters())


def ddp() -> tuple[Any, Any]:
    net = DistributedDataParallel(stack())
    return net, adam(net.parameters())


def fsdp() -> tuple[Any, Any]:
    net = stack()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh((6,), ("dp",)))
    fully_shard(net, mesh=mesh((6,), ("dp",)))
    return net, adam(net.parameters())


def hsdp() -> tuple[Any, Any]:
    net = fully_shard(stack(), mesh=mesh((2, 3), ("rep", "shard")))
    return net, adam(net.parameters())


def tensor_and_fsdp(hidden: int = 7) -> tuple[Any, Any]:
    both = mesh((3, 2), ("dp", "tp"))
    net = tensor_parallel(stack(hidden), both["tp"])
    fully_shard(net, mesh=both["dp"])
    return net, adam(p for p in net.parameters())


class Stage(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.values():
            x = layer(x)
        return x


def pipeline_and_fsdp() -> tuple[Any, Any]:
    both = mesh((2, 3), ("pp", "dp"))
    whole = stack()
    first = both.get_local_rank("pp") == 0
    chunks = [Stage({n: whole[int(n)]}) for n in (("0",) if first else ("2", "3"))]
    for chunk in chunks:
        fully_shard(chunk, mesh=both["dp"])
    return chunks, [adam(chunk.parameters()) for chunk in chunks]


LAYOUTS: dict[str, Layout] = {f.__name__: f for f in (one_process, ddp, fsdp, hsdp, tensor_and_fsdp, pipeline_and_fsdp)}


def fill_by_coordinates(net: Any, optimizer: Any) -> None:
    """Give every state tensor values that are computed from its parameter."""
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        for group in one.param_groups:
            group["lr"] = 0.375
            for p in group["params"]:
                with torch.no_grad():
                    one.state[p] = {
                        "step": torch.tensor(float(p.numel())),
                        **{
                            name: p.detach() * factor
                            for name, factor in (("exp_avg", 2), ("exp_avg_sq", 3), ("max_exp_avg_sq", 5))
                        },
                    }


@case
def every_layout_loads_every_layout() -> None:
    reference = stack()
    for save_as, build in LAYOUTS.items():
        net, optimizer = build()
        fill_by_coordinates(net, optimizer)
        saved = checkpoint({"model": net, "optimizer": optimizer})
        for key, stored in saved.whole.items():
            factor = {"": 1, "exp_avg": 2, "exp_avg_sq": 3, "max_exp_avg_sq": 5}.get(key.slot)
            if factor is not None:
                assert torch.equal(stored, reference.get_parameter(key.fqn) * factor), (save_as, key)
        for load_as, other in LAYOUTS.items():
            live, fresh = other()
            for module in live if isinstance(live, list) else [live]:
                for p in module.parameters():
                    p.detach().zero_()
            found = saved.load({"model": live, "optimizer": fresh})
            assert not found.missing, (save_as, load_as, found.missing)
            for state in NativeFramework().capture({"model": live, "optimizer": fresh}):
                for shard in state.shards:
                    check_boxes([shard], saved.whole[shard.key])
            for one in fresh if isinstance(fresh, list) else [fresh]:
                assert all(group["lr"] == 0.375 for group in one.param_groups)


@case
def training_continues_on_a_fresh_optimizer() -> None:
    # torch cannot compute with uneven tensor-parallel pieces: 8 columns on 2 ranks, which FSDP then splits by 3.
    for build in (fsdp, hsdp, partial(tensor_and_fsdp, 8)):
        net, optimizer = build()

        def train(net: Any, optimizer: Any, steps: int) -> list[float]:
            losses = []
            for i in range(steps):
                loss = net(torch.full((2, 5), 1.0 + i)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            return losses

        train(net, optimizer, 2)
        saved = checkpoint({"model": net, "optimizer": optimizer})
        live, fresh = build()
        saved.load({"model": live, "optimizer": fresh})
        assert train(net, optimizer, 3) == train(live, fresh, 3)


@case
def dtensors_in_extra_states() -> None:
    whole = arange(7, 2)
    tensor = distribute_tensor(whole, mesh((6,)), [Shard(0)], src_data_rank=None)
    saved = checkpoint({"extra_states": {"average": tensor, "rank": dist.get_rank()}})
    live: dict[str, Any] = {}
    saved.load({"extra_states": live})
    assert torch.equal(live["average"], whole) and live["rank"] == dist.get_rank()
    target = distribute_tensor(torch.zeros(7, 2), mesh((2, 3)), [Shard(1), Shard(0)], src_data_rank=None)
    live = {"average": target}
    saved.load({"extra_states": live})
    assert live["average"] is target and torch.equal(target.full_tensor(), whole)


def run(name: str) -> None:
    """Run one case on this rank."""
    CASES[name]()
