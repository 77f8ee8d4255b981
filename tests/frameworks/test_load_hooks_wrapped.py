"""Hooks before load_state_dict below wrappers: a load of an old checkpoint does what torch's load_state_dict does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import bytecheckpoint
from tests.support.tiny_model import trained
from tests.support.torch_layouts import mesh
from tests.support.worlds import on_ranks

Wrap = Callable[[nn.Module], nn.Module]


class OldBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "qkv":
            setattr(self, name, nn.Linear(4, 6))
        self.register_buffer("unused", torch.ones(3))
        self.proj = nn.Linear(6, 4)


class Block(nn.Module):
    """q, k and v are `qkv` now, `proj` is `out.linear`, doubled; `unused` is gone; `extra` is new."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 18)
        self.out = nn.ModuleDict({"linear": nn.Linear(6, 4)})
        self.register_buffer("extra", torch.zeros(2))
        self.register_load_state_dict_pre_hook(merge)
        self._register_load_state_dict_pre_hook(rename)
        self.out._register_load_state_dict_pre_hook(double, with_module=True)


def merge(module: Any, entries: dict[str, Any], prefix: str, *_: object) -> None:
    for kind in ("weight", "bias"):
        keys = [f"{prefix}{name}.{kind}" for name in "qkv"]
        if all(key in entries for key in keys):
            whole = torch.zeros(18, *entries[keys[0]].shape[1:])
            for place, key in enumerate(keys):
                whole[place * 6 : place * 6 + 6] = entries.pop(key)
            entries[f"{prefix}qkv.{kind}"] = whole
    entries.pop(f"{prefix}unused", None)
    entries.setdefault(f"{prefix}extra", torch.full((2,), 7.0))


def rename(entries: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: object) -> None:
    for key in list(entries):
        if key.startswith(f"{prefix}proj."):
            entries[f"{prefix}out.linear.{key.rpartition('.')[2]}"] = entries.pop(key)


def double(module: Any, entries: dict[str, Any], prefix: str, *_: object) -> None:
    assert isinstance(module, nn.ModuleDict) and all(key.startswith(f"{prefix}linear.") for key in entries)
    entries[f"{prefix}linear.bias"] = entries[f"{prefix}linear.bias"].to("cpu", torch.float32) * 2


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], wrap: Wrap) -> None:
        super().__init__()
        self.layers = nn.ModuleList([wrap(block()) for _ in range(2)])
        self.head = nn.Linear(4, 2)


def model(block: Callable[[], nn.Module], inner: Wrap, outer: Wrap) -> Any:
    return outer(Model(block, inner))


def same(module: nn.Module) -> nn.Module:
    return module


def sharded(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=mesh(dp=2))


def unit(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


ONE_PROCESS: dict[str, tuple[Wrap, Wrap]] = {
    "none": (same, same),
    "checkpoint": (checkpoint_wrapper, same),
    "compile": (compiled, same),
    "compile all": (same, compiled),
    "both": (lambda block: compiled(checkpoint_wrapper(block)), compiled),
    "both, the other way": (lambda block: checkpoint_wrapper(compiled(block)), checkpoint_wrapper),
}
TWO_RANKS: dict[str, tuple[Wrap, Wrap]] = {
    "ddp": (same, nn.parallel.DistributedDataParallel),
    "ddp, both": (lambda block: checkpoint_wrapper(compiled(block)), nn.parallel.DistributedDataParallel),
    "fsdp2": (sharded, sharded),
    "fsdp2, both": (lambda block: sharded(checkpoint_wrapper(compiled(block))), sharded),
    "fsdp1": (unit, unit),
    "fsdp1, flat": (lambda block: FullyShardedDataParallel(block, device_id=torch.device("cpu")), unit),
    "fsdp1, checkpoint": (lambda block: checkpoint_wrapper(unit(block)), unit),
    "checkpoint, fsdp1": (lambda block: unit(checkpoint_wrapper(block)), unit),
}


def wanted(old: nn.Module) -> dict[str, torch.Tensor]:
    """Return what torch loads, without wrappers."""
    new = model(Block, same, same)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    return dict(new.state_dict())


def check(path: str, new: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Check a strict load, and a load of what the loaded model saves, by its names and without hooks' help."""
    report = bytecheckpoint.load(path, {"model": new})
    assert not report.missing and not report.unexpected and not report.notes
    bytecheckpoint.save(f"{path}-new", {"model": new})
    with bytecheckpoint.open(f"{path}-new") as checkpoint:
        found = {key.removeprefix("model/"): checkpoint[key][...] for key in checkpoint}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("wrappers", ONE_PROCESS)
def test_wrappers_of_one_process(path: str, wrappers: str) -> None:
    torch.manual_seed(1)
    old = model(OldBlock, same, same)
    bytecheckpoint.save(path, {"model": old})
    check(path, model(Block, *ONE_PROCESS[wrappers]), wanted(old))


@on_ranks(2)
def test_wrappers_of_ranks(tmp_path: Path) -> None:
    """The checkpoint is of FSDP2, so the load reshards; q, k and v are whole on every rank for a moment only."""
    torch.manual_seed(1)
    old = model(OldBlock, same, same)
    path = str(tmp_path / "old")
    bytecheckpoint.save(path, {"model": old})
    expected = wanted(old)
    shards = copy.deepcopy(old)
    for block in shards.layers:
        fully_shard(block, mesh=mesh(dp=2))
    bytecheckpoint.save(path, {"model": fully_shard(shards, mesh=mesh(dp=2))})
    for name, wrappers in TWO_RANKS.items():
        torch.manual_seed(2)
        new = model(Block, *wrappers)
        check(path, new, expected)
        report = bytecheckpoint.load(path, {"model": new}, strict=False, include=["model/layers.1.*"])
        assert not report.missing, name


def test_parts(path: str) -> None:
    """What is left out keeps its values, and is not missed."""
    torch.manual_seed(1)
    old = model(OldBlock, same, same)
    bytecheckpoint.save(path, {"model": old})
    expected = wanted(old)
    new = model(Block, checkpoint_wrapper, same)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    part = ("layers.0.qkv.weight", "layers.1.out.linear.bias", "layers.1.out.linear.weight")
    bytecheckpoint.load(path, {"model": new}, include=[f"model/{name}" for name in part])
    for name, tensor in new.state_dict().items():
        assert torch.equal(tensor, (expected if name in part else before)[name]), name
    bytecheckpoint.load(path, {"model": new}, exclude=["model/layers.0.qkv.weight", "model/head.*"], rename={})


def test_optimizer_state_follows_renamed_parameters_only(path: str) -> None:
    old = model(OldBlock, same, same)
    states = {"model": old, "optimizer": trained(old)}
    bytecheckpoint.save(path, states)
    new = model(Block, same, checkpoint_wrapper)
    optimizer = torch.optim.AdamW(new.parameters())
    with pytest.raises(bytecheckpoint.errors.IncompatibleCheckpointError, match=r"lacks optimizer/.*qkv"):
        bytecheckpoint.load(path, {"model": new, "optimizer": optimizer})
    bytecheckpoint.load(path, {"model": new, "optimizer": optimizer}, strict={"optimizer": False})
    parameters = dict(zip((name for name, _ in new.named_parameters()), new.parameters(), strict=True))
    found = optimizer.state[parameters["layers.0.out.linear.weight"]]["exp_avg"]
    assert torch.equal(found, states["optimizer"].state[old.layers[0].proj.weight]["exp_avg"])
