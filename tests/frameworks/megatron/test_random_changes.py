"""Changes of the state at random moments behind saves of Megatron's states in the background, on one rank or on all."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.megatron.models import Layout
from tests.support.megatron.training import Trainer
from tests.support.random_changes import Job, check_world
from tests.support.worlds import Worlds

DP2 = Layout(dp=2, bf16=True)
#: The rest runs with `-m slow`.
USUAL = (DP2, Layout(tp=2, bf16=True, distributed=False))
SLOW = (
    Layout(dp=2),
    replace(DP2, buckets=300),
    replace(DP2, overlap=True),
    Layout(dp=2, fp16=True),
    Layout(dp=2, bf16=True, distributed=False),
    Layout(moe=True, ep=2, dp=2, bf16=True),
    Layout(pp=2, vpp=2, bf16=True),
    Layout(tp=2, pp=2),
)


class MegatronJob(Job):
    """A training of a model with a large vocabulary, whose copy takes a while."""

    def __init__(self, layout: Layout) -> None:
        self.trainer = Trainer(replace(layout, vocabulary=8000))
        self.module: nn.Module = self.trainer.bare[0]
        self.advance()

    def states(self) -> dict[str, Any]:
        return self.trainer.states()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return weights, buffers, master weights and state."""
        found = {}
        for number, chunk in enumerate(self.trainer.bare):
            found |= {f"{number}/{name}": one for name, one in (*chunk.named_parameters(), *chunk.named_buffers())}
        for number, (_, master, state) in enumerate(self.trainer.named_states()):
            found |= {f"{number}.{slot}": one for slot, one in state.items() if isinstance(one, torch.Tensor)}
            if master is not None:
                found[f"{number}"] = master
        return found

    def advance(self) -> None:
        self.trainer.train(1)
        self.forward()  # gathers the weights, where that overlaps with it

    def forward(self) -> None:
        self.trainer.passes(forward_only=True)

    def step(self) -> None:
        self.trainer.train(1)


def check(worlds: Worlds, folder: Path, layout: Layout, rounds: int, seed: int) -> None:
    without = ("load_state_dict", "swap")
    check_world(worlds, layout.world, partial(MegatronJob, layout), folder, rounds, seed, without)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.short if one is DP2 else ()) for one in USUAL], ids=str
)
def test_some_changes(worlds: Worlds, tmp_path: Path, layout: Layout) -> None:
    check(worlds, tmp_path, layout, 15, seed=20240720)


@pytest.mark.slow
@pytest.mark.timeout(12_000)
@pytest.mark.parametrize("layout", USUAL + SLOW, ids=str)
def test_hundreds_of_changes(worlds: Worlds, tmp_path: Path, layout: Layout) -> None:
    check(worlds, tmp_path, layout, 300, seed=time.time_ns() % 1000)
