"""Runs of Megatron-Core's GPTModel: as an ordinary module under torch and DeepSpeed, and under Megatron."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.support import deepspeed_engines as engines
from tests.support import fsdp1_layouts
from tests.support.deepspeed_engines import ENGINES
from tests.support.interchange.feed import Feed, neighbours
from tests.support.interchange.runs import (
    Settings,
    TrainingRun,
    named_groups,
    setting,
    settings_of,
    settings_of_engine,
)
from tests.support.megatron import models, training
from tests.support.megatron.full_state import full_state, param_groups_by_name
from tests.support.megatron.models import LENGTH, RATE, VOCABULARY, Layout
from tests.support.real_frameworks import mean_over_ranks
from tests.support.torch_layouts import mesh

_SEED = 2
_CLIP = 1.0  # gradient norm, as in Megatron's optimizers here


def one_process(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp1(model: nn.Module, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> nn.Module:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({TransformerLayer}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def fsdp1_grad(model: nn.Module) -> nn.Module:
    return fsdp1(model, ShardingStrategy.SHARD_GRAD_OP)


def fsdp2(model: nn.Module) -> nn.Module:
    over = mesh(dp=dist.get_world_size())
    for layer in model.decoder.layers:  # type: ignore[operator, union-attr]
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": one_process,
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp1-grad": fsdp1_grad,
    "fsdp2": fsdp2,
}


def replicated_model(layout: Layout) -> Any:
    """Return the whole model, in a world of data-parallel ranks."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    layout = replace(layout, dp=size)
    models.initialize_parallel(layout)
    (model,) = models.build_chunks(layout)
    models.fill(model, _SEED)
    return model


def optimizer_of(layout: Layout, parameters: Mapping[str, Any]) -> torch.optim.Optimizer:
    groups = training.param_groups_of(parameters, lr=0.0)
    if layout.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=0.9, foreach=False)
    return torch.optim.AdamW(groups, foreach=False)


def set_rates(optimizer: Any, step: int) -> None:
    """Set the learning rates as Megatron's scheduler does; the second group has half of the rate."""
    for group, top in zip(optimizer.param_groups, (RATE, RATE / 2), strict=True):
        group["lr"] = top * training.scale_at(step)


def feed_of(**coordinates: Any) -> Feed:
    """Return the data of a rank of these coordinates; see `Feed`."""
    return Feed(training.SEQUENCES, LENGTH + 1, VOCABULARY - 4, **coordinates)


def local_batch(feed: Feed) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor]:
    """Return what a data-parallel rank passes to the model, the labels last."""
    inputs, labels = feed.pair()
    return inputs, torch.arange(LENGTH)[None], None, labels


class TorchRun(TrainingRun):
    """An ordinary module, in one process or under DDP, FSDP1 or FSDP2, with an optimizer of torch."""

    def __init__(self, wrapping: str, layout: Layout) -> None:
        self.model = WRAPPERS[wrapping](replicated_model(layout))
        named = {fsdp1_layouts.bare_name(name): p for name, p in self.model.named_parameters()}
        self.optimizer = optimizer_of(layout, named)
        self.extra: dict[str, Any] = {"step": 0}
        self.feed = feed_of(**neighbours(1))

    def states(self) -> dict[str, Any]:
        own = {"model": self.model, "optimizer": self.optimizer}
        return {**own, "dataloader": self.feed.loader, "extra_states": self.extra}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            *inputs, labels = local_batch(self.feed)
            self.optimizer.zero_grad()
            loss = self.model(*inputs, labels=labels).float().mean()
            loss.backward()
            if isinstance(self.model, FullyShardedDataParallel):
                self.model.clip_grad_norm_(_CLIP)
            else:
                nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], _CLIP)
            self.optimizer.step()
            self.extra["step"] += 1
            set_rates(self.optimizer, self.extra["step"])
            losses.append(mean_over_ranks(loss))
        return losses

    def full_state(self) -> dict[str, Any]:
        return fsdp1_layouts.full_state(self)  # type: ignore[arg-type]

    def settings(self) -> Settings:
        return settings_of(self.model, self.optimizer)


class EngineRun(TrainingRun):
    """An ordinary module under ZeRO."""

    def __init__(self, engine: str, layout: Layout) -> None:
        model = replicated_model(layout)
        engines.prepare()
        import deepspeed

        configuration = engines.configuration(ENGINES[engine], gradient_clipping=_CLIP)
        parameters = dict(model.named_parameters())
        made = optimizer_of(layout, parameters)
        self._named = named_groups(parameters, made)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=configuration)
        self.extra: dict[str, Any] = {"step": 0}
        self.feed = feed_of(**neighbours(1))

    def states(self) -> dict[str, Any]:
        return {"model": self.engine, "dataloader": self.feed.loader, "extra_states": self.extra}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            *inputs, labels = local_batch(self.feed)
            loss = self.engine(*inputs, labels=labels).float().mean()
            self.engine.backward(loss)
            self.engine.step()
            self.extra["step"] += 1
            set_rates(self.engine.optimizer, self.extra["step"])
            losses.append(mean_over_ranks(loss))
        return losses

    def full_state(self) -> dict[str, Any]:
        return engines.full_state(self.engine)

    def settings(self) -> Settings:
        return settings_of_engine(self.engine, self._named)

    def progress(self) -> int:
        return self.engine.global_steps  # type: ignore[no-any-return]


class MegatronRun(training.Trainer):
    """Megatron's own training, in any layout."""

    def __init__(self, layout: Layout) -> None:
        from megatron.core import parallel_state as parallel

        super().__init__(layout, _SEED)
        self.feed = feed_of(
            rank=parallel.get_data_parallel_rank(),
            ranks=parallel.get_data_parallel_world_size(),
            first=parallel.get_tensor_model_parallel_rank() == 0 and parallel.get_pipeline_model_parallel_rank() == 0,
        )

    def states(self) -> dict[str, Any]:
        return super().states() | {"dataloader": self.feed.loader}

    def local_rows(self) -> torch.Tensor:
        return self.feed.rows()

    def loaded(self, states: Collection[str]) -> None:  # type: ignore[override]
        super().loaded()
        if "scheduler" not in states:
            # Other frameworks' programs do not save Megatron's scheduler: it follows from the step.
            self.scheduler.num_steps = self.step
            self.scheduler.step(0)

    def full_state(self) -> dict[str, Any]:
        return full_state(self)

    def settings(self) -> Settings:
        return {name: setting(group) for name, group in param_groups_by_name(self)}

    def progress(self) -> int:
        return self.scheduler.num_steps  # type: ignore[no-any-return]
