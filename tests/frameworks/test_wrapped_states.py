"""Optimizer state in tensor subclasses that wrap plain tensors: codes and scales of blocks, as torchao has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.tensors.dtensors import dtensor_of
from tests.support.comparisons import assert_complete
from tests.support.worlds import Worlds, on_ranks

BLOCK = 16


class Quantised(torch.Tensor):
    """Elements in 8 bits, with a scale for each block of them, and a table that all blocks share."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor, signed: bool) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor, signed: bool) -> None:
        self.codes, self.scale, self.qmap, self.signed = codes, scale, qmap, signed
        self.block_size = codes.numel() // scale.numel()

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale", "qmap"], [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: list[Any], *_: object) -> Quantised:
        return cls(inner["codes"], inner["scale"], inner["qmap"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            (x, *_) = args
            return cls(x.codes, x.scale, x.qmap, x.signed)
        raise NotImplementedError(f"{func}: the tensor has no memory of its own")


class Packed(Quantised):
    """A wrapper of unknown inner order: without `block_size`."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor, signed: bool) -> None:
        super().__init__(codes, scale, qmap, signed)
        del self.block_size


torch.serialization.add_safe_globals([Quantised, Packed])


class LowBit(torch.optim.Optimizer):
    """An optimizer with quantised state of parameters whose part on this rank is whole blocks."""

    def __init__(self, parameters: Any, form: type[Quantised] = Quantised) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.form = form

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
            if local.numel() % BLOCK:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter.detach())
                continue
            made: Any = self.form(
                torch.zeros(local.shape, dtype=torch.uint8), torch.zeros(local.numel() // BLOCK), torch.zeros(16), True
            )
            if isinstance(parameter, DTensor):
                made = dtensor_of(made, parameter)
            self.state[parameter]["exp_avg"] = made


def inner(state: Any) -> Any:
    return state._local_tensor if isinstance(state, DTensor) else state


def wanted(name: str, sharded: bool) -> torch.Tensor:
    """Return this rank's part of the codes or scales, whose values say which they are of the whole."""
    if name == "qmap":
        return torch.arange(16) / 16
    whole = (
        torch.arange(256).to(torch.uint8).view(8, 32) if name == "codes" else torch.arange(256.0 // BLOCK).view(8, 2)
    )
    if sharded:
        rank, size = dist.get_rank(), dist.get_world_size()
        whole = whole.split(-(-8 // size))[rank]
    return whole if name == "codes" else whole.flatten()


def start(
    sharded: bool, *, fill: bool = False, steps: bool = True, form: type[Quantised] = Quantised
) -> dict[str, Any]:
    """Return a model, whose bias has state that is not quantised, with its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(32, 8)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = LowBit(model.parameters(), form)
    if steps:
        optimizer.step()
    if fill:
        state = inner(optimizer.state[model.weight]["exp_avg"])
        for name in ("codes", "scale", "qmap"):
            getattr(state, name).copy_(wanted(name, sharded))
    return {"model": model, "optimizer": optimizer}


def check(states: dict[str, Any], sharded: bool, form: type[Quantised] = Quantised) -> None:
    weight, bias = states["model"].parameters()
    state = states["optimizer"].state[weight]["exp_avg"]
    assert isinstance(state, DTensor) == sharded and state.shape == weight.shape
    assert type(inner(state)) is form and inner(state).signed is True
    for name in ("codes", "scale", "qmap"):
        assert torch.equal(getattr(inner(state), name), wanted(name, sharded)), name
    assert type(inner(states["optimizer"].state[bias]["exp_avg"])) is torch.Tensor


def save(sharded: bool, path: str) -> None:
    bytecheckpoint.save(path, start(sharded, fill=True))


def load(sharded: bool, path: str) -> None:
    """Load into a new optimizer, and in place into one that has made a step."""
    for steps in (False, True):
        states = start(sharded, steps=steps)
        live = states["optimizer"].state.get(states["model"].weight, {}).get("exp_avg")
        assert_complete(bytecheckpoint.load(path, states))
        check(states, sharded)
        if steps:
            assert states["optimizer"].state[states["model"].weight]["exp_avg"] is live


def test_every_layout_loads_every_layout(worlds: Worlds, tmp_path: Path) -> None:
    layouts = [(1, False), (2, False), (2, True), (3, True)]  # whole, replicated, even and uneven shards
    for size, sharded in layouts:
        worlds.run(size, save, sharded, str(tmp_path / f"{size}-{sharded}"))
    for size, sharded in layouts:
        for other, from_sharded in layouts:
            worlds.run(size, load, sharded, str(tmp_path / f"{other}-{from_sharded}"))


@on_ranks(2)
def test_parts_that_cut_a_block(path: str) -> None:
    """A block has half of a row."""
    states = start(False, fill=True)
    bytecheckpoint.save(path, states)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(32, 8)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    with pytest.raises(
        UsageError, match="optimizer/state/weight/exp_avg is quantised in blocks, and sharded otherwise"
    ):
        bytecheckpoint.load(path, {"model": model, "optimizer": LowBit(model.parameters())})
    small = nn.Linear(8, 6, bias=False)
    optimizer = LowBit(small.parameters())
    optimizer.step()
    bytecheckpoint.save(f"{path}-small", {"model": small, "optimizer": optimizer})
    fully_shard(small, mesh=mesh)
    with pytest.raises(
        IncompatibleCheckpointError, match=r"this rank's part of it, 24 elements from number .*, cuts one"
    ):
        bytecheckpoint.load(f"{path}-small", {"model": small, "optimizer": LowBit(small.parameters())})


@on_ranks(2)
def test_a_class_whose_blocks_are_not_known(path: str) -> None:
    """Whole tensors of it are stored; parts are refused by name."""
    bytecheckpoint.save(path, start(False, fill=True, form=Packed))
    states = start(False, form=Packed, steps=False)
    assert_complete(bytecheckpoint.load(path, states))
    check(states, False, Packed)
    with pytest.raises(UsageError, match=r"optimizer/state/weight/exp_avg is a part of a .*Packed"):
        bytecheckpoint.save(f"{path}-parts", start(True, form=Packed))


def test_optimizers_that_cannot_go_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bytecheckpoint.save(tmp_path / "s", start(False, fill=True))
    states = start(False, steps=False)
    states["optimizer"].__class__ = type("Lion", (LowBit,), {})
    with pytest.raises(
        IncompatibleCheckpointError, match=r"weight/exp_avg is a .*\.Quantised in .*, of LowBit: Lion cannot"
    ):
        bytecheckpoint.load(tmp_path / "s", states)
    monkeypatch.setattr(torch.serialization, "get_safe_globals", list)
    states = start(False)
    bytecheckpoint.load(tmp_path / "s", states)  # its state shows the class
    with pytest.raises(IncompatibleCheckpointError, match=r"\.Quantised, which is not known here: .*add_safe_globals"):
        bytecheckpoint.load(tmp_path / "s", start(False, steps=False))


# --- torchao's own ----------------------------------------------------------------------------------------------------


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def torchao_run(name: str, sharded: bool, seed: int) -> tuple[Any, Any]:
    import torchao.optim

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, getattr(torchao.optim, name)(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@on_ranks(2)
@mock.patch("torch.compile", lambda step, **_: step)  # the step is the same, and compiling it takes a minute
def test_torchao(name: str, path: str) -> None:
    """Each layout loads each, and continues with the losses of the uninterrupted run."""
    after = {}
    for sharded in (False, True):
        run = torchao_run(name, sharded, 1)
        train(*run, range(2))
        bytecheckpoint.save(f"{path}-{sharded}", dict(zip(("model", "optimizer"), run, strict=True)))
        after[sharded] = train(*run, range(2, 5))
    for sharded in (False, True):
        for source, losses in after.items():
            run = torchao_run(name, sharded, 2)
            assert_complete(
                bytecheckpoint.load(f"{path}-{source}", dict(zip(("model", "optimizer"), run, strict=True)))
            )
            found = train(*run, range(2, 5))
            assert found == losses if sharded == source else found == pytest.approx(losses, rel=1e-5)
