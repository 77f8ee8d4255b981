"""A model of uneven sizes under FSDP1, and the states that tests save and load."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from tests.frameworks.fsdp1_worlds import unit
from tests.frameworks.memory import MemoryCheckpoint
from tests.frameworks.memory import save as save_plain

States = MutableMapping[str, Any]


@torch.no_grad()
def coordinates(module: nn.Module) -> nn.Module:
    """Give every element a value that identifies its tensor and its place."""
    for number, (_, tensor) in enumerate([*module.named_parameters(), *module.named_buffers()], 1):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 1000 * number)
    return module


class UnevenModel(nn.Module):
    """A model with sizes that no world divides, and parameters with fewer elements than a world has ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.middle = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Conv2d(2, 3, 2), nn.LayerNorm(7))
        self.last = nn.Linear(7, 1)
        self.cube = nn.Parameter(torch.empty(2, 3, 5))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def uneven_model() -> UnevenModel:
    model = coordinates(UnevenModel())
    assert isinstance(model, UnevenModel)
    return model


def wrapped(
    units: str, use_orig_params: bool, strategy: str = "FULL_SHARD", model: UnevenModel | None = None
) -> nn.Module:
    """Wrap the model in FSDP1; `units` has a letter for each inner unit: first, middle, its Conv2d, last."""
    model = model or uneven_model()
    options: dict[str, Any] = {"use_orig_params": use_orig_params, "sharding_strategy": ShardingStrategy[strategy]}
    if "c" in units:
        model.middle[1] = unit(model.middle[1], **options)
    for letter, name in (("f", "first"), ("m", "middle"), ("l", "last")):
        if letter in units:
            setattr(model, name, unit(getattr(model, name), **options))
    return unit(model, **options)


def trained_states(model: nn.Module, *, step: float = 5.0, lr: float = 0.5) -> States:
    """Return the model with an AdamW whose state is computed from the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.25)
    for p in model.parameters():
        if p.numel():
            like = p.detach().clone()
            optimizer.state[p] = {"step": torch.tensor(step), "exp_avg": like * 2 + 1, "exp_avg_sq": like.float() * 4}
    return {"model": model, "optimizer": optimizer}


def fresh_states(model: nn.Module) -> States:
    """Return the model, zeroed, with an AdamW that has no state yet."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


@cache
def unsharded_checkpoint() -> MemoryCheckpoint:
    return save_plain(trained_states(uneven_model()))
