"""Faults of Megatron's own checkpoints (DESIGN, section 5) that this package must not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.megatron import edge_jobs as edge
from tests.frameworks.megatron import jobs, state_jobs
from tests.frameworks.megatron.models import Layout
from tests.frameworks.megatron.variants import load_and_save_variant, save_variant
from tests.frameworks.real_frameworks import saved_tensors, unequal_checkpoints
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)


def test_one_step_is_not_shared_by_all_parameters(worlds: Worlds, tmp_path: Path) -> None:
    """Megatron 0.19.2 with AdamW of torch gives all parameters one step tensor, which each of them then advances."""
    layout = Layout(dp=2)
    for number, distinct in worlds.run(2, edge.shared_steps_of_own_load, layout):
        if distinct == number:
            pytest.skip("this Megatron does not have the fault")
        assert distinct == 1 < number
    path = str(tmp_path / "step")
    worlds.run(1, save_variant, edge.VARIANT, Layout(), path)
    saved = {
        key.removeprefix("optimizer/state/").removesuffix("/step"): float(value)
        for key, value in saved_tensors(path).items()
        if key.endswith("/step")
    }
    assert len(set(saved.values())) > 30
    for found in worlds.run(2, edge.steps_after_load, layout, path):
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
    worlds.run(1, save_variant, edge.VARIANT, one, first)
    for layout, source, path in ((saved, first, second), (loaded, second, third)):
        found = worlds.run(layout.world, load_and_save_variant, edge.VARIANT, layout, source, path, stepped=True)
        assert found == [[]] * layout.world
    assert unequal_checkpoints(first, second) == []
    assert unequal_checkpoints(first, third) == []


@pytest.mark.parametrize("half", [False, True])
def test_expert_parallelism_may_end(worlds: Worlds, half: bool, tmp_path: Path) -> None:
    """EP 2 -> 1, and back, with the optimizer."""
    one, two = Layout(moe=True, bf16=half), Layout(moe=True, ep=2, dp=2, bf16=half)
    first = str(tmp_path / "first")
    worlds.run(1, jobs.save_coordinates, one, first)
    for found in worlds.run(2, jobs.load_and_save, two, {"two": first}, str(tmp_path)):
        assert found == {"two": []}
    assert worlds.run(1, jobs.load_and_save, one, {"one": str(tmp_path / "two")}, str(tmp_path)) == [{"one": []}]
    assert unequal_checkpoints(first, tmp_path / "two") == []
    assert unequal_checkpoints(first, tmp_path / "one") == []


def test_nothing_is_gathered_over_the_data_parallel_ranks(worlds: Worlds, tmp_path: Path) -> None:
    for found in worlds.run(2, state_jobs.communication, Layout(dp=2, bf16=True, buckets=300), str(tmp_path)):
        assert found.pop("own way"), "the counter counts"
        assert found == {"capture": [], "save": [], "async": [], "load": []}
