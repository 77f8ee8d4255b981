"""A load reads only the trees that mention its own parameters, however many ranks saved."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.frameworks.native import NativeFramework
from tests.frameworks.counted_trees import counted_trees
from tests.support.comparisons import assert_complete
from tests.support.extra_states import LinearWithExtraState

LAYERS = 12


def stage(layers: Sequence[int], value: float = 0.0) -> dict[str, Any]:
    """Build a pipeline stage of these layers, and its optimizer with a learning rate for each layer."""
    model = nn.ModuleDict({f"layer{n}": LinearWithExtraState(3, 3) for n in layers})
    optimizer = torch.optim.Adam([{"params": list(model[f"layer{n}"].parameters()), "lr": 0.5} for n in layers])
    if value:
        for n, group in zip(layers, optimizer.param_groups, strict=True):
            layer: Any = model[f"layer{n}"]
            layer.extra = {"calls": n}
            group["lr"] = (n + 1) / 64
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def layers_of(rank: int, world: int) -> list[int]:
    """Return the layers of a stage."""
    return list(range(rank * LAYERS // world, (rank + 1) * LAYERS // world))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of six stages."""
    path = tmp_path_factory.mktemp("trees") / "step"
    ThreadWorld(6).run(lambda collective: bytecheckpoint.save(path, stage(layers_of(collective.rank, 6), 1.0)))
    return path


@pytest.mark.parametrize(
    ("loading", "most"),
    # Trees of the model and of the optimizer: its own, and those of the stages whose layers it has.
    [(6, 2), (3, 6), (4, 6), (12, 4), (1, 12)],
)
def test_trees_of_other_stages_are_not_read(saved: Path, loading: int, most: int) -> None:
    def load(collective: Collective) -> int:
        layers = layers_of(collective.rank, loading)
        states = stage(layers)
        assert_complete(bytecheckpoint.load(saved, states, framework="counted"), ("missing", "unexpected", "notes"))
        for n, group in zip(layers, states["optimizer"].param_groups, strict=True):
            assert group["lr"] == (n + 1) / 64
            assert states["model"][f"layer{n}"].extra == {"calls": n}
            assert [float(states["optimizer"].state[p]["step"]) for p in group["params"]] == [1.0, 1.0]
        thread = threading.current_thread().name
        return sum(number for (name, _), number in found.items() if name == thread)

    with counted_trees(NativeFramework) as found:
        for trees in ThreadWorld(loading).run(load):
            assert 2 <= trees <= most


def test_a_parameter_in_no_tree_is_reported_as_missing(saved: Path) -> None:
    states = stage([0, 1, 99])
    report = bytecheckpoint.load(saved, states, strict=False)
    assert "optimizer/param_groups/layer99.weight" in report.missing
    assert [g["lr"] for g in states["optimizer"].param_groups] == [1 / 64, 2 / 64, 0.5]
