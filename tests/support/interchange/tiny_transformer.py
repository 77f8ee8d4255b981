"""Runs of the tiny transformer of tests/support: under torch's layouts and FSDP1, and under DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.support import deepspeed_engines as engines
from tests.support import fsdp1_layouts
from tests.support.interchange.feed import Feed, neighbours
from tests.support.interchange.runs import Settings, TrainingRun, named_groups, settings_of, settings_of_engine
from tests.support.real_frameworks import without_tied_head
from tests.support.tiny_model import LENGTH, SEQUENCES, VOCABULARY, initialise
from tests.support.torch_layouts import Parallel, Trainer

Named = Mapping[str, torch.Tensor]

values = partial(initialise, seed=2, tied=True)


def groups(parameters: Named) -> list[dict[str, Any]]:
    """Return two param groups: the inside of attention, MLP and experts; and the rest, with the frozen parameter.

    They are not matrices and vectors, so FSDP1 can flatten each group into parameters of its own.
    """
    inside = {n for n in parameters if ".attention." in n or ".mlp." in n}
    return [
        {"params": [p for n, p in parameters.items() if n in inside], "lr": 3e-3, "weight_decay": 0.1},
        {"params": [p for n, p in parameters.items() if n not in inside], "lr": 1e-2, "weight_decay": 0.0},
    ]


def adamw(parameters: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(parameters), foreach=False)


def sgd(parameters: Named) -> torch.optim.Optimizer:
    first, second = groups(parameters)
    first |= {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    second |= {"lr": 0.1, "momentum": 0.8}
    return torch.optim.SGD([first, second], foreach=False)


OPTIMIZERS = {
    "adamw": adamw,
    "sgd": sgd,
    "adamw-one-group": fsdp1_layouts.adamw,
    "adagrad": fsdp1_layouts.adagrad,
}


def _feed(**place: Any) -> Feed:
    return Feed(SEQUENCES, LENGTH + 1, VOCABULARY, **place)


def _place(parallel: Parallel) -> dict[str, Any]:
    """Return the coordinates of this rank for its feed: the first rank of each part of the batch saves."""
    parts = [0] * dist.get_world_size()
    dist.all_gather_object(parts, parallel.dp_rank)
    first = parts.index(parallel.dp_rank) == dist.get_rank()
    return {"rank": parallel.dp_rank, "ranks": parallel.dp_size, "first": first}


class TorchRun(TrainingRun):
    """Under one of torch's layouts."""

    def __init__(self, layout: str, optimizer: str, dtype: torch.dtype = torch.float32, *, tied: bool = True) -> None:
        initial = partial(initialise, seed=2, tied=tied)
        self.trainer: Trainer = fsdp1_layouts.build(
            layout, initial, tied=tied, dtype=dtype, optimizer=OPTIMIZERS[optimizer]
        )
        self.extra: dict[str, Any] = {"step": 0}
        self.feed = _feed(**_place(self.trainer.parallel))
        self.trainer.local_batch = self.feed.pair  # type: ignore[method-assign]

    def states(self) -> dict[str, Any]:
        t = self.trainer
        own = {"model": t.model, "optimizer": t.optimizer}
        return {**own, "dataloader": self.feed.loader, "extra_states": self.extra}

    def train(self, steps: int) -> list[float]:
        self.trainer.extra["step"] = self.extra["step"]
        losses = self.trainer.train(steps)
        self.extra["step"] += steps
        return losses

    def full_state(self) -> dict[str, Any]:
        found = fsdp1_layouts.full_state(self.trainer)
        if (group := self.trainer.parallel.pp_group) is not None:
            stages: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(stages, found, group=group)
            found = {key: value for stage in stages for key, value in stage.items()}
        return without_tied_head(found) if self.trainer.tied else found

    def settings(self) -> Settings:
        found = settings_of(self.trainer.model, self.trainer.optimizer)
        if self.trainer.tied:  # the last stage of a pipeline has a copy of the embedding under this name
            found.pop("head.weight", None)
        return found


class EngineRun(TrainingRun):
    """Under DeepSpeed."""

    def __init__(self, engine: str, optimizer: str) -> None:
        self._named: list[list[str]] = []

        def make(parameters: Named) -> torch.optim.Optimizer:
            made = OPTIMIZERS[optimizer](parameters)
            self._named = named_groups(parameters, made)
            return made

        self.run = engines.build(engine, values, make)
        self.feed = _feed(**neighbours(1))
        self.run.local_batch = self.feed.pair  # type: ignore[method-assign]

    def states(self) -> dict[str, Any]:
        return {"model": self.run.engine, "dataloader": self.feed.loader, "extra_states": self.run.client}

    def train(self, steps: int) -> list[float]:
        return self.run.train(steps)

    def full_state(self) -> dict[str, Any]:
        return without_tied_head(engines.full_state(self.run.engine))

    def settings(self) -> Settings:
        return settings_of_engine(self.run.engine, self._named)

    def progress(self) -> int:
        return self.run.engine.global_steps  # type: ignore[no-any-return]
