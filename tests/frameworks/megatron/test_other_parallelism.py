"""Megatron states at other degrees of tensor, pipeline and expert parallelism, each parameter with its own step.

Megatron's own checkpoints do not offer that. test_states.py shows that nothing is communicated.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import bytecheckpoint
from tests.frameworks.megatron import jobs
from tests.frameworks.megatron.variants import VariantModel, load_and_save_variant, save_variant
from tests.support.comparisons import assert_same_checkpoints, saved_tensors
from tests.support.megatron.models import Layout
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)


def shared_steps_of_own_load(layout: Layout) -> tuple[int, int]:
    """Return the number of steps, and of distinct step tensors, after Megatron's own load of its own state."""
    trained = VariantModel("thirds", layout)
    for optimizer in trained.optimizer.chained_optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
    states = trained.inner_states()
    return len(states), len({s["step"].data_ptr() for s in states})


def steps_after_load(layout: Layout, source: str) -> dict[str, float]:
    """Return the step of each parameter, by its local name, after a load and another training step."""
    trained = VariantModel("thirds", layout)
    bytecheckpoint.load(source, trained.states())
    trained.step()
    return {name: float(state["step"]) for name, _, state in trained.named_states()}


def test_every_parameter_has_its_own_step(worlds: Worlds, path: str) -> None:
    """Megatron 0.19.2 with AdamW of torch gives all parameters one step tensor, which each of them then advances."""
    layout = Layout(dp=2)
    for number, distinct in worlds.run(2, shared_steps_of_own_load, layout):
        if distinct == number:
            pytest.skip("this Megatron does not have the fault")
        assert distinct == 1 < number
    worlds.run(1, save_variant, "thirds", Layout(), path)
    saved = {
        key.removeprefix("optimizer/state/").removesuffix("/step"): float(value)
        for key, value in saved_tensors(path).items()
        if key.endswith("/step")
    }
    assert len(set(saved.values())) > 30
    for found in worlds.run(2, steps_after_load, layout, path):
        assert found
        assert found == {name: saved[name] + 1 for name in found}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Layout(dp=2, vocabulary=36), Layout(tp=2, vocabulary=36)),
        (Layout(tp=2, dp=2, vocabulary=36), Layout(pp=2, dp=2, vocabulary=36)),
        (Layout(pp=3, vocabulary=36), Layout(tp=3, vocabulary=36)),
        (Layout(tp=3, bf16=True, vocabulary=36), Layout(pp=2, dp=2, bf16=True, vocabulary=36)),
        (Layout(dp=2, bf16=True, vocabulary=36), Layout(dp=3, bf16=True, vocabulary=36, buckets=300)),
        (Layout(pp=2, vpp=3, vocabulary=36), Layout(pp=2, vocabulary=36, distributed=False)),
    ],
    ids=str,
)
def test_parallelism_may_change(worlds: Worlds, saved: Layout, loaded: Layout, tmp_path: Path) -> None:
    """Megatron's default format cannot; the other one gathers."""
    one = Layout(bf16=saved.bf16, vocabulary=saved.vocabulary)
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    worlds.run(1, save_variant, "thirds", one, first)
    for layout, source, path in ((saved, first, second), (loaded, second, third)):
        worlds.run(layout.world, load_and_save_variant, "thirds", layout, source, path, stepped=True)
        assert_same_checkpoints(first, path)


@pytest.mark.parametrize("half", [False, True])
def test_expert_parallelism_may_end(worlds: Worlds, half: bool, tmp_path: Path) -> None:
    """EP 2 -> 1, and back, with the optimizer."""
    one, two = Layout(moe=True, bf16=half), Layout(moe=True, ep=2, dp=2, bf16=half)
    first = str(tmp_path / "first")
    worlds.run(1, jobs.save_coordinates, one, first)
    worlds.run(2, jobs.load_and_save, two, {"two": first}, str(tmp_path))
    worlds.run(1, jobs.load_and_save, one, {"one": str(tmp_path / "two")}, str(tmp_path))
    assert_same_checkpoints(first, tmp_path / "two")
    assert_same_checkpoints(first, tmp_path / "one")
