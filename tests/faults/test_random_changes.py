"""Changes of the state at random moments behind a save in the background: the checkpoint is right, or the save fails.

What may be silent is what decision 0066 and docs/tutorial.md name: a few elements, written past torch.
"""

from __future__ import annotations

import collections
import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import StateChangedError
from tests.support.settings import using


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


class Job:
    """A network in training."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> None:
        self.net = Net()
        matrices = [self.net.large, self.net.small.weight]
        self.optimizer = make(matrices if make is torch.optim.Muon else self.net.parameters(), lr=1e-3, **options)

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.net(torch.rand(8, 96)).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        self.optimizer.step(self.backward)

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer}

    def still(self) -> list[torch.Tensor]:
        """Parameters, and the tensors of the optimizer's state."""
        slots = (slot for state in self.optimizer.state.values() for slot in state.values())
        return [*self.net.parameters(), *(slot for slot in slots if isinstance(slot, torch.Tensor))]

    def content(self) -> dict[str, bytes]:
        tensors = dict(self.net.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{number}.{name}": slot for name, slot in state.items() if isinstance(slot, torch.Tensor)}
        return {name: tensor.detach().cpu().numpy().tobytes() for name, tensor in tensors.items()}


def few(tensor: torch.Tensor, dice: random.Random) -> int:
    return dice.randrange(tensor.numel())


def half(tensor: torch.Tensor, dice: random.Random) -> slice:
    start = few(tensor, dice) // 2
    return slice(start, start + (tensor.numel() + 1) // 2)


#: What a program does to a tensor, given its view of one dimension and a new value.
_Change = Callable[[Job, torch.Tensor, random.Random], object]
NAMED: dict[str, _Change] = {
    "in place": lambda job, t, dice: t.mul_(dice.random()),
    "one element": lambda job, t, dice: t.view(-1).__setitem__(few(t, dice), dice.random()),
    "copy": lambda job, t, dice: t.copy_(torch.rand_like(t)),
    "foreach": lambda job, t, dice: torch._foreach_add_([t, job.net.large], dice.random()),
    "load_state_dict": lambda job, t, dice: job.net.load_state_dict({k: v + 1 for k, v in job.net.state_dict().items()}),
    "data": lambda job, t, dice: t.data.fill_(dice.random()),
    "half of data": lambda job, t, dice: t.data.view(-1)[half(t, dice)].fill_(dice.random()),
    "numpy": lambda job, t, dice: t.detach().numpy().fill(dice.random()),
    "storage": lambda job, t, dice: t.untyped_storage().fill_(dice.randrange(1, 60)),
    "data =": lambda job, t, dice: setattr(t, "data", torch.rand_like(t)),
    "swap": lambda job, t, dice: torch.utils.swap_tensors(t, other_of(t)),
    "forward": lambda job, t, dice: job.backward(),
    "step": lambda job, t, dice: job.step(),
}  # fmt: skip
FEW: dict[str, _Change] = {
    "element of data": lambda job, t, dice: t.data.view(-1).__setitem__(few(t, dice), dice.random()),
    "element of numpy": lambda job, t, dice: t.detach().numpy().reshape(-1).__setitem__(few(t, dice), dice.random()),
    "byte of storage": lambda job, t, dice: t.untyped_storage().__setitem__(few(t, dice), dice.randrange(1, 60)),
    "dlpack": lambda job, t, dice: torch.from_dlpack(t.detach()).view(-1)[few(t, dice)].fill_(dice.random()),
}


def other_of(tensor: torch.Tensor) -> torch.Tensor:
    other = torch.rand_like(tensor.detach())
    return nn.Parameter(other) if isinstance(tensor, nn.Parameter) else other


def outcome(job: Job, other: Job, path: Path, change: _Change, dice: random.Random) -> str:
    """Save, change a random tensor at a random moment, and say what the checkpoint is."""
    job.backward()
    before, tensor = job.content(), dice.choice(job.still())
    handle = bytecheckpoint.save(path, job.states, async_checkpoint=True, staging="background")
    end = time.perf_counter() + dice.choice([0, dice.uniform(0, 0.008)])
    while time.perf_counter() < end:
        pass
    with torch.no_grad() if change is not NAMED["forward"] and change is not NAMED["step"] else torch.enable_grad():
        change(job, tensor, dice)
    try:
        handle.result(60)
    except StateChangedError:
        return "named"
    bytecheckpoint.load(path, other.states)
    return "right" if other.content() == before else "silent"


def outcomes(folder: Path, rounds: int, seed: int, *, guard: bool) -> dict[str, collections.Counter[str]]:
    """Return how often each kind of change had which outcome."""
    dice, kinds = random.Random(seed), [*NAMED.items(), *FEW.items()]
    found: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind, _ in kinds}
    made = [*optimizers()]
    made = dice.sample(made, min(len(made), rounds // 5))
    with using(staging_guard=guard):
        for part in range(len(made)):
            job, other = Job(*made[part]), Job(*made[part])
            job.step(), other.step()
            for _ in range(part, rounds, len(made)):
                kind, change = dice.choice(kinds)
                found[kind][outcome(job, other, folder / "step", change, dice)] += 1
    print("\n", "guarded" if guard else "plain", {kind: dict(counts) for kind, counts in found.items()})
    return found


def check(folder: Path, rounds: int, seed: int) -> None:
    guarded = outcomes(folder, rounds, seed, guard=True)
    assert not any(counts["silent"] for counts in guarded.values()), guarded
    plain = outcomes(folder, rounds, seed, guard=False)
    assert not any(plain[kind]["silent"] for kind in NAMED), plain


@pytest.mark.timeout(200)
def test_some_changes(tmp_path: Path) -> None:
    check(tmp_path, 40, seed=20240720)


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_ten_thousand_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "bytecheckpoint")  # a kept record of an error keeps the state of its frames
    check(tmp_path, 5000, seed=time.time_ns() % 1000)
