"""The training runs of the matrix, with one interface for all frameworks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.support.fsdp1_layouts import bare_name
from tests.support.interchange.feed import Feed

#: Learning rate, weight decay, momentum.
Setting = tuple[float, float, float]
Settings = dict[str, Setting]


class TrainingRun(Protocol):
    """A training run, in one process of its world.

    Attributes:
        feed: the data of this rank.
    """

    feed: Feed

    def states(self) -> dict[str, Any]:
        """Return the states that are saved, and loaded into."""
        ...

    def loaded(self, states: Collection[str]) -> None:
        """Do what the program does after a load of these kinds, before it trains: by default, nothing."""

    def train(self, steps: int) -> list[float]:
        """Train that many steps; return their losses over the whole batch."""
        ...

    def full_state(self) -> dict[str, Any]:
        """Return all live tensors of model and optimizer by the keys of `bytecheckpoint.open`. A collective."""
        ...

    def settings(self) -> Settings:
        """Return the param group's settings of each parameter that is trained on this rank."""
        ...

    def progress(self) -> int:
        """Return the number of steps that the framework itself has counted; by default, that of the program."""
        return int(self.states()["extra_states"]["step"])


def setting(group: Mapping[str, Any]) -> Setting:
    """Return the settings of one param group."""
    return float(group["lr"]), float(group["weight_decay"]), float(group.get("momentum", 0.0))


def settings_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Settings:
    """Return the settings by parameter name, of an optimizer that steps the module's own parameters."""
    names: dict[int, list[str]] = {}
    for prefix, unit in model.named_modules():
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            flat = unit._handle.flat_param
            names[id(flat)] = [bare_name(f"{prefix}.{name}").lstrip(".") for name in flat._fqns]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            names.setdefault(id(parameter), [bare_name(name)])
    return {
        name: setting(group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name in names.get(id(parameter), ())
    }


def named_groups(parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each group; call it before an engine takes the optimizer."""
    names = {id(p): name for name, p in parameters.items() if p.requires_grad}
    return [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]


def settings_of_engine(engine: Any, names: list[list[str]]) -> Settings:
    """Return the settings by parameter name of an engine's groups, which are in the order of the optimizer that it took."""
    groups = getattr(engine.optimizer, "optimizer", engine.optimizer).param_groups
    return {name: setting(group) for group, members in zip(groups, names, strict=True) for name in members}


@dataclass(frozen=True)
class Member:
    """One layout of a family.

    Attributes:
        name: in test ids.
        size: ranks.
        make: starts a run on each of them; importable.
        low: dtype of parameters that have float32 master weights; "": float32 alone.
        framework: argument `framework=`; half of the loads use "auto".
    """

    name: str
    size: int
    make: Callable[[], TrainingRun]
    low: str = ""
    framework: str = "auto"

    @property
    def joins_steps(self) -> bool:
        """True if parameters that the framework joins share one step."""
        return self.framework == "deepspeed" or "flat" in self.name
