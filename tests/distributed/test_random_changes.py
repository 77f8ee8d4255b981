"""Changes of the state at random moments behind saves in the background, on one rank or on all, in the layouts of torch."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.random_changes import Job, add_ballast, check_world, named_slots
from tests.support.tiny_model import loss_of, source_values
from tests.support.torch_layouts import WORLD_SIZE, build
from tests.support.worlds import Worlds


def with_ballast(model: nn.Module) -> nn.Module:
    add_ballast(next(iter(model.blocks.values())))  # type: ignore[operator, union-attr]
    return model


class LayoutJob(Job):
    """A training in a layout of torch, which saves between the backward pass and the step of the optimizer."""

    def __init__(self, layout: str) -> None:
        self.trainer = build(layout, source_values, dtype=torch.float32, wrap=with_ballast)
        self.module = self.trainer.unwrapped
        self.trainer.step()
        self.forward()

    def states(self) -> dict[str, object]:
        return self.trainer.states()

    def tensors(self) -> dict[str, torch.Tensor]:
        held = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: getattr(one, "_local_tensor", one) for name, one in held} | named_slots(
            self.trainer.optimizer.state
        )

    def forward(self) -> None:
        trainer = self.trainer
        inputs, targets = trainer.local_batch()
        trainer.optimizer.zero_grad()
        if trainer.parallel.pipeline is not None:
            trainer.parallel.pipeline(inputs, targets)
        else:
            loss_of(trainer.model(inputs), targets).backward()

    def step(self) -> None:
        self.trainer.optimizer.step()

    def advance(self) -> None:
        self.step()
        self.trainer.extra["step"] += 1
        self.forward()


def check(worlds: Worlds, folder: Path, layout: str, rounds: int, seed: int) -> None:
    without = ("swap",)  # torch refuses it for a parameter to which DDP refers
    check_world(worlds, WORLD_SIZE[layout], partial(LayoutJob, layout), folder, rounds, seed, without)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("layout", "rounds"), [("ddp2", 3), ("fsdp2", 3), ("tp2-fsdp2", 2)])
def test_some_changes(worlds: Worlds, tmp_path: Path, layout: str, rounds: int) -> None:
    check(worlds, tmp_path, layout, rounds, seed=len(layout))


@pytest.mark.slow
@pytest.mark.timeout(12_000)
# The backward pass of experts under FSDP2 divides by a factor in reduce-scatter, which gloo cannot.
@pytest.mark.parametrize(
    "layout", [layout for layout, size in WORLD_SIZE.items() if size > 1 and layout != "ep2-fsdp2"]
)
def test_hundreds_of_changes(worlds: Worlds, tmp_path: Path, layout: str) -> None:
    check(worlds, tmp_path, layout, 300, seed=time.time_ns() % 1000)
