"""A load reads only the trees that mention its own parameters, however many ranks saved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.loading.saved import SavedView

LAYERS = 12


class Layer(nn.Linear):
    """A layer with a value that is no tensor."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def stage(layers: Sequence[int], value: float = 0.0) -> dict[str, Any]:
    """Build a pipeline stage of these layers, and its optimizer with a learning rate for each layer."""
    model = nn.ModuleDict({f"layer{n}": Layer() for n in layers})
    optimizer = torch.optim.Adam([{"params": list(model[f"layer{n}"].parameters()), "lr": 0.5} for n in layers])
    if value:
        for n, group in zip(layers, optimizer.param_groups, strict=True):
            layer: Any = model[f"layer{n}"]
            layer.calls = n
            group["lr"] = (n + 1) / 64
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def layers_of(rank: int, world: int) -> list[int]:
    """Return the layers of a stage."""
    return list(range(rank * LAYERS // world, (rank + 1) * LAYERS // world))


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the trees that each thread reads."""
    found: dict[str, int] = {}
    read: Callable[..., Any] = SavedView._read

    def counted(self: SavedView, tensors: Sequence[int]) -> Any:
        name = threading.current_thread().name
        found[name] = found.get(name, 0) + len(tensors)
        return read(self, tensors)

    monkeypatch.setattr(SavedView, "_read", counted)
    return found


@pytest.mark.parametrize(
    ("loading", "most"),
    # Trees of the model and of the optimizer: its own, and those of the stages whose layers it has.
    [(6, 2), (3, 6), (4, 6), (12, 4), (1, 12)],
)
def test_trees_of_other_stages_are_not_read(tmp_path: Path, trees: dict[str, int], loading: int, most: int) -> None:
    path = tmp_path / "step"

    def save(collective: Collective) -> None:
        bytecheckpoint.save(path, stage(layers_of(collective.rank, 6), 1.0))

    def load(collective: Collective) -> tuple[str, list[str]]:
        layers = layers_of(collective.rank, loading)
        states = stage(layers)
        report = bytecheckpoint.load(path, states)
        problems = [*report.missing, *report.unexpected, *report.notes]
        for n, group in zip(layers, states["optimizer"].param_groups, strict=True):
            if group["lr"] != (n + 1) / 64:
                problems.append(f"lr of {n}: {group['lr']}")
            if states["model"][f"layer{n}"].calls != n:
                problems.append(f"calls of {n}: {states['model'][f'layer{n}'].calls}")
            steps = [float(states["optimizer"].state[p]["step"]) for p in group["params"]]
            problems += [f"steps of {n}: {steps}"] if steps != [1.0, 1.0] else []
        return threading.current_thread().name, problems

    ThreadWorld(6).run(save)
    trees.clear()
    for name, problems in ThreadWorld(loading).run(load):
        assert problems == []
        assert 2 <= trees[name] <= most


def test_a_parameter_in_no_tree_is_reported_as_missing(tmp_path: Path, trees: dict[str, int]) -> None:
    path = tmp_path / "step"
    ThreadWorld(3).run(lambda c: bytecheckpoint.save(path, stage(layers_of(c.rank, 3), 1.0)))
    states = stage([0, 1, 99])
    report = bytecheckpoint.load(path, states, strict=False)
    assert "optimizer/param_groups/layer99.weight" in report.missing
    assert [g["lr"] for g in states["optimizer"].param_groups] == [1 / 64, 2 / 64, 0.5]
