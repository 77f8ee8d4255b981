"""Changes of the state at random moments behind saves of engines in the background, on one rank or on all."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.deepspeed_engines import ENGINES, build, trained
from tests.support.random_changes import Job, add_ballast, check_world, named_slots
from tests.support.worlds import Worlds

#: An engine of each stage; the rest runs with `-m slow`. With two ranks stage 3 pads only the frozen parameter.
USUAL = ("b1x2", "b2x2", "z3x2")
SLOW = ("z1x3", "z2x2", "b1x2-own", "b2x4", "h2x2", "b2x2-cpu", "b3x2-cpu")


def values(model: Any) -> None:
    add_ballast(model.blocks["0"], columns=100)
    trained(model)


class EngineJob(Job):
    """A training of an engine."""

    def __init__(self, name: str) -> None:
        self.run = build(name, values)
        self.module: nn.Module = self.run.engine.module
        self.advance()

    def states(self) -> dict[str, Any]:
        return self.run.states()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return weights or partitions of them, buffers, and what the wrapped optimizer steps, with its state."""
        found = {name: getattr(p, "ds_tensor", p) for name, p in self.module.named_parameters()}
        found |= dict(self.module.named_buffers())
        state = self.run.engine.optimizer.optimizer.state
        return found | {f"{number}": partition for number, partition in enumerate(state)} | named_slots(state)

    def advance(self) -> None:
        self.run.step()
        for parameter in self.module.parameters():
            if hasattr(parameter, "ds_tensor"):  # its padding has values of chance, and is not saved
                own = parameter.ds_numel - dist.get_rank() * parameter.ds_tensor.numel()
                parameter.ds_tensor.view(-1)[max(own, 0) :] = 0

    def forward(self) -> None:
        engine = self.run.engine
        engine.eval()
        with torch.no_grad():
            engine(self.run.local_batch()[0])
        engine.train()

    def step(self) -> None:
        self.run.step()


def check(worlds: Worlds, folder: Path, name: str, rounds: int, seed: int) -> None:
    without = ("load_state_dict", "swap")
    check_world(worlds, ENGINES[name].size, partial(EngineJob, name), folder, rounds, seed, without)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.short if n == "b2x2" else ()) for n in USUAL])
def test_some_changes(worlds: Worlds, tmp_path: Path, name: str) -> None:
    check(worlds, tmp_path, name, 15, seed=20240720)


@pytest.mark.slow
@pytest.mark.timeout(12_000)
@pytest.mark.parametrize("name", USUAL + SLOW)
def test_hundreds_of_changes(worlds: Worlds, tmp_path: Path, name: str) -> None:
    check(worlds, tmp_path, name, 300, seed=time.time_ns() % 1000)
