"""Changes of the state at random moments behind a save in the background, in one process, with every optimizer of torch."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.random_changes import Job, changes, check_counts, named_slots


class Net(nn.Module):
    """A weight of two pieces, small ones, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(96)
        self.large = nn.Parameter(torch.rand(96, 24_000))
        self.small = nn.Linear(96, 96, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.small(self.norm(rows)) @ self.large[:, :64]
        return result


_IMPLEMENTATIONS: tuple[dict[str, Any], ...] = ({}, {"foreach": False}, {"foreach": True}, {"fused": True})


def optimizers() -> Iterator[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]]:
    """All of torch.optim that take dense gradients, each plain, by foreach and fused, as far as it has these."""
    found: list[Any] = [made for made in vars(torch.optim).values() if isinstance(made, type)]
    for made in found:
        if not issubclass(made, torch.optim.Optimizer) or made in (torch.optim.Optimizer, torch.optim.SparseAdam):
            continue
        for options in _IMPLEMENTATIONS if made is not torch.optim.LBFGS else ({"history_size": 2},):
            try:
                made([nn.Parameter(torch.ones(2, 2))], lr=0.01, **options)
            except (TypeError, ValueError, RuntimeError):
                continue  # it has no such implementation
            yield made, options


class NetJob(Job):
    """A network in training."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> None:
        self.module = self.net = Net()
        matrices = [self.net.large, self.net.small.weight]
        self.optimizer = make(matrices if make is torch.optim.Muon else self.net.parameters(), lr=1e-3, **options)

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.net(torch.rand(8, 96)).square().mean()
        loss.backward()
        return loss

    def forward(self) -> None:
        self.backward()

    def step(self) -> None:
        self.optimizer.step(self.backward)

    def advance(self) -> None:
        self.step()
        self.backward()

    def states(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, torch.Tensor]:
        held = (*self.net.named_parameters(), *self.net.named_buffers())
        return dict(held) | named_slots(self.optimizer.state)


def check(folder: Path, jobs: int, rounds: int, seed: int, without: Collection[str] = ()) -> None:
    """Check changes behind saves of jobs with optimizers by chance."""
    made = [*optimizers()]
    chosen = [partial(NetJob, *one) for one in random.Random(seed).sample(made, min(len(made), jobs))]
    check_counts(*(changes(chosen, folder, rounds, seed, guard=guard, without=without) for guard in (True, False)))


@pytest.mark.timeout(200)
def test_some_changes(tmp_path: Path) -> None:
    check(tmp_path, 5, 4, seed=20240720)


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_ten_thousand_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "bytecheckpoint")  # a kept record of an error keeps the state of its frames
    made = len([*optimizers()])
    check(tmp_path, made, 5000 // made, seed=time.time_ns() % 1000)
