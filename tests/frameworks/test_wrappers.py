"""Wrappers of accelerate, as its `prepare` gives them to a program: the same checkpoints as without them."""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.frameworks.optimizer_tree import is_optimizer_tree
from bytecheckpoint.frameworks.wrappers import unwrap_states
from bytecheckpoint.representation.values.codec import decode


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Has the attributes and properties of accelerate 1.15's class of this name."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.scaler = None
        self._is_overflow = False

    state = property(lambda self: self.optimizer.state, lambda self, new: setattr(self.optimizer, "state", new))
    param_groups = property(lambda self: self.optimizer.param_groups, lambda self, new: None)
    defaults = property(lambda self: self.optimizer.defaults, lambda self, new: None)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """Derives from the other in accelerate too."""


class AcceleratedScheduler:
    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        self.scheduler, self.optimizers = scheduler, optimizers

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.scheduler.load_state_dict(state_dict)


@pytest.fixture(autouse=True)
def accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("optimizer", AcceleratedOptimizer), ("scheduler", AcceleratedScheduler)):
        module = types.ModuleType(f"accelerate.{name}")
        setattr(module, found.__name__, found)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def trained(seed: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 + seed)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduled: Any = scheduler if prepare is bare else AcceleratedScheduler(scheduler, [optimizer])
    return {"model": model, "optimizer": prepare(optimizer), "scheduler": scheduled, "extra_states": seed}


def bare(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer


FORMS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "bare": bare,
    "one": AcceleratedOptimizer,
    "derived": DeepSpeedOptimizerWrapper,
    "twice": lambda optimizer: AcceleratedOptimizer(AcceleratedOptimizer(optimizer)),
    "list": lambda optimizer: [AcceleratedOptimizer(optimizer)],
    "dict": lambda optimizer: {"only": AcceleratedOptimizer(optimizer)},
}


def test_a_save_sees_what_is_inside(tmp_path: Path) -> None:
    found = {}
    for form, prepare in FORMS.items():
        bytecheckpoint.save(tmp_path / form, trained(0, prepare))
        with bytecheckpoint.open(tmp_path / form) as checkpoint:
            assert checkpoint["scheduler/step_size"] == 1
            (tree,), _ = checkpoint._trees("optimizer")
            found[form] = decode(tree, on_tensor=str)
    assert all(map(is_optimizer_tree, found.values()))
    assert all(tree == found["bare"] for tree in found.values()), "the wrapper's class is in no checkpoint"


@pytest.mark.parametrize("form", FORMS)
def test_a_load_fills_what_is_inside(tmp_path: Path, form: str) -> None:
    saved, live = trained(0, bare), trained(1, FORMS[form])
    bytecheckpoint.save(tmp_path, saved)
    kept = dict(live)
    bytecheckpoint.load(tmp_path, live)
    inner = unwrap_states(kept)
    optimizer = inner["optimizer"]
    if form in ("list", "dict"):
        (optimizer,) = optimizer.values() if form == "dict" else optimizer
    assert type(optimizer) is torch.optim.AdamW and optimizer.param_groups[0]["lr"] == 0.1
    for one, other in zip(saved["model"].parameters(), live["model"].parameters(), strict=True):
        assert torch.equal(saved["optimizer"].state[one]["exp_avg"], optimizer.state[other]["exp_avg"])
    assert inner["scheduler"].step_size == 1
    assert live["extra_states"] == 0, "values that cannot change in place are replaced in the caller's mapping"
    assert all(live[state] is kept[state] for state in ("model", "optimizer", "scheduler"))


def test_other_containers_stay_the_callers_own() -> None:
    states = {"extra_states": {"s": AcceleratedScheduler(None, [])}, "mixed": [AcceleratedScheduler(None, []), 3]}
    assert unwrap_states(states) is states


@pytest.mark.parametrize("saved", [{"step": 100}, ["a", "b"]])
def test_an_empty_container_is_filled(path: str, saved: Any) -> None:
    """It is no container of wrapped optimizers."""
    bytecheckpoint.save(path, {"extra_states": saved})
    states: dict[str, Any] = {"extra_states": type(saved)()}
    bytecheckpoint.load(path, states)
    assert states["extra_states"] == saved


class Around(torch.optim.Optimizer):
    """An optimizer around another one, as Lookahead of timm: the state is in the inner one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, defaultdict(dict)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


@pytest.mark.parametrize("by_torch", [False, True])
def test_an_optimizer_around_another_one(tmp_path: Path, by_torch: bool) -> None:
    saved, live = (nn.Linear(2, 2) for _ in range(2))
    inner = torch.optim.Adam(saved.parameters(), lr=0.5)
    saved(torch.ones(1, 2)).sum().backward()
    inner.step()
    if by_torch:
        torch.save({"model": saved.state_dict(), "optimizer": inner.state_dict()}, tmp_path / "s")
    else:
        bytecheckpoint.save(tmp_path / "s", {"model": saved, "optimizer": Around(inner)})
    around = Around(torch.optim.Adam(live.parameters()))
    bytecheckpoint.load(tmp_path / "s", {"model": live, "optimizer": around})
    assert around.param_groups[0]["lr"] == 0.5
    assert torch.equal(around.inner.state[live.weight]["exp_avg"], inner.state[saved.weight]["exp_avg"])
