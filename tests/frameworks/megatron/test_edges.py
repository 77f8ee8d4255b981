"""Rare situations of Megatron-Core: pending gathers, parts of the states, unusual optimizers, how much is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.megatron import edge_jobs as edge
from tests.frameworks.megatron.models import Layout
from tests.frameworks.megatron.variants import save_variant
from tests.frameworks.real_frameworks import saved_tensors, unequal_checkpoints
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("saved", "loaded", "most"),
    [
        # The model's trees have no values; of the optimizer's trees, those of the ranks that stepped what this rank steps.
        (Layout(dp=4, buckets=300), Layout(dp=4, buckets=300), 1),
        (Layout(tp=2, dp=2), Layout(tp=2, dp=2), 1),
        (Layout(dp=4), Layout(dp=2), 3),
        (Layout(pp=3, distributed=False), Layout(pp=3), 2),  # the embedding is on the first stage
        (Layout(tp=2, dp=2, distributed=False), Layout(dp=4), 1),
        (Layout(dp=2), Layout(dp=4), 2),
    ],
    ids=str,
)
def test_few_trees_are_read(worlds: Worlds, saved: Layout, loaded: Layout, most: int, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    worlds.run(saved.world, edge.save_stepped, saved, path)
    for model, optimizer in worlds.run(loaded.world, edge.trees_read, loaded, path):
        assert model == 0
        assert 1 <= optimizer <= most


@pytest.mark.parametrize(
    "layout", [Layout(dp=2, overlap=True), Layout(dp=2, overlap=True, bf16=True, buckets=300)], ids=str
)
def test_a_pending_gather_does_not_overwrite_loaded_parameters(worlds: Worlds, layout: Layout, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    worlds.run(1, save_variant, edge.VARIANT, Layout(bf16=layout.bf16), first)
    assert worlds.run(2, edge.load_during_gather, layout, first, second) == [[], []]
    assert unequal_checkpoints(first, second) == []


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, overlap=True, bf16=True, buckets=300), Layout(tp=2, dp=2, overlap=True), Layout(dp=3, overlap=True)],
    ids=str,
)
def test_a_save_before_parameters_are_gathered(worlds: Worlds, layout: Layout, tmp_path: Path) -> None:
    found = worlds.run(layout.world, edge.save_before_gather, layout, str(tmp_path / "step"))
    assert found == [[]] * layout.world


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Layout(dp=2, bf16=True), "context"),
        (Layout(tp=2, dp=2, overlap=True), "context"),
        (Layout(dp=4, bf16=True, buckets=300, overlap=True), "instances"),
        (Layout(tp=2, dp=2), "data innermost"),
        (Layout(pp=2, dp=2, distributed=False), "data innermost"),
    ],
    ids=str,
)
def test_other_process_groups(worlds: Worlds, layout: Layout, kind: str, tmp_path: Path) -> None:
    """Context parallelism, instances of the distributed optimizer, another order of the ranks."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    worlds.run(1, save_variant, edge.VARIANT, Layout(bf16=layout.bf16), first)
    for problems in worlds.run(layout.world, edge.load_and_save_in_groups, layout, kind, first, second):
        assert problems == []
    assert unequal_checkpoints(first, second) == []
    assert "optimizer/state/decoder.layers.5.mlp.linear_fc1.weight/exp_avg" in unequal_checkpoints(
        first, f"{second}-stepped"
    )


def test_a_model_alone(worlds: Worlds, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    worlds.run(1, save_variant, edge.VARIANT, Layout(bf16=True), first)
    assert worlds.run(2, edge.model_alone, Layout(dp=2, bf16=True), first, second) == [[], []]
    want, got = saved_tensors(first), saved_tensors(second)
    assert {k for k in want if k.startswith("model/")} == set(got)
    assert all(bool((want[key] == got[key]).all()) for key in got)


@pytest.mark.parametrize("layout", [Layout(ep=2, dp=2), Layout(ep=3, dp=3, bf16=True)], ids=str)
def test_the_links_of_a_chain(worlds: Worlds, layout: Layout, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    worlds.run(1, save_variant, "shared expert", Layout(bf16=layout.bf16), first)
    for problems in worlds.run(layout.world, edge.load_links, layout, first, second):
        assert problems == []
    assert unequal_checkpoints(first, second) == []


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, bf16=True), Layout(tp=2, distributed=False)], ids=str)
def test_a_checkpoint_from_before_the_first_step(worlds: Worlds, layout: Layout, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    worlds.run(1, save_variant, edge.VARIANT, Layout(bf16=layout.bf16), path, stepped=False)
    assert worlds.run(2, edge.load_stateless, layout, path) == [[], []]


def test_different_steps_in_one_group_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    worlds.run(1, save_variant, edge.VARIANT, Layout(), path)
    for message, *problems in worlds.run(2, edge.load_different_steps, Layout(dp=2), path):
        assert "optimizer: FusedAdam keeps one step for all parameters of a group" in message
        assert problems == []


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("layer-wise", "optimizer: LayerWiseDistributedOptimizer is not supported"),
        ("offload", "optimizer: DistributedOptimizer with optimizer_cpu_offload is not supported"),
        ("precision-aware", "optimizer: DistributedOptimizer with use_precision_aware_optimizer"),
    ],
)
def test_optimizers_that_are_refused(worlds: Worlds, what: str, message: str, tmp_path: Path) -> None:
    for found in worlds.run(2, edge.refusal, Layout(dp=2, bf16=True), str(tmp_path / "step"), what):
        assert found.startswith(message)
