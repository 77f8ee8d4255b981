"""A model of odd sizes under FSDP1, and the states that tests save and load."""

from __future__ import annotations

from collections.abc import MutableMapping
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
    """Every element says which element of which parameter it is."""
    for number, (_, tensor) in enumerate([*module.named_parameters(), *module.named_buffers()], 1):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 1000 * number)
    return module


class Odd(nn.Module):
    """Sizes that no world divides; more parameters than a small world has elements for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.middle = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Conv2d(2, 3, 2), nn.LayerNorm(7))
        self.last = nn.Linear(7, 1)
        self.cube = nn.Parameter(torch.empty(2, 3, 5))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def odd() -> Odd:
    model = coordinates(Odd())
    assert isinstance(model, Odd)
    return model


def wrapped(units: str, originals: bool, strategy: str = "FULL_SHARD", model: Odd | None = None) -> nn.Module:
    """Odd under FSDP1; `units` has a letter for each inner unit: first, middle, its Conv2d, last."""
    model = model or odd()
    options: dict[str, Any] = {"use_orig_params": originals, "sharding_strategy": ShardingStrategy[strategy]}
    if "c" in units:
        model.middle[1] = unit(model.middle[1], **options)
    for letter, name in (("f", "first"), ("m", "middle"), ("l", "last")):
        if letter in units:
            setattr(model, name, unit(getattr(model, name), **options))
    return unit(model, **options)


def adam_states(model: nn.Module, *, step: float = 5.0, lr: float = 0.5) -> States:
    """The model with an AdamW whose state follows from the parameters, as training would leave it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.25)
    for p in model.parameters():
        if p.numel():
            like = p.detach().clone()
            optimizer.state[p] = {"step": torch.tensor(step), "exp_avg": like * 2 + 1, "exp_avg_sq": like.float() * 4}
    return {"model": model, "optimizer": optimizer}


def fresh_states(model: nn.Module) -> States:
    """The model zeroed, with an AdamW that has no state yet."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def plain() -> MemoryCheckpoint:
    return save_plain(adam_states(odd()))
