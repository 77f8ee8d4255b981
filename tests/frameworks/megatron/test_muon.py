"""Muon of Megatron-Core, on all data-parallel ranks or layer by layer: every element, and the next losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from bytecheckpoint.tools import verify
from tests.formats.golden.make_megatron import digests
from tests.support.comparisons import assert_complete, assert_same_checkpoints
from tests.support.megatron.models import Layout
from tests.support.megatron.torch_dist import save_torch_dist
from tests.support.megatron.training import Trainer
from tests.support.real_frameworks import AFTER, BEFORE, assert_losses
from tests.support.worlds import Worlds

pytest.importorskip("emerging_optimizers", reason="NOT TESTED HERE: needs emerging-optimizers")
pytestmark = pytest.mark.timeout(600)

_MUON = Layout(optimizer="muon", distributed=False, tied=False)


def options(layer_wise: bool) -> dict[str, Any]:
    return {"use_layer_wise_distributed_optimizer": layer_wise}


def save(layout: Layout, layer_wise: bool, path: str) -> list[float]:
    trainer = Trainer(layout, seed=4, lr=0.02, **options(layer_wise))
    trainer.train(BEFORE)
    report = bytecheckpoint.save(path, trainer.states(), async_checkpoint=True, staging="background").result(60)
    assert report.staging.startswith("blocking: ranks of LayerWise" if layer_wise else "background")
    save_torch_dist(trainer, f"{path}-megatron", "fully_reshardable")
    return trainer.train(AFTER)


def load(layout: Layout, layer_wise: bool, path: str) -> list[float]:
    trainer = Trainer(layout, seed=9, lr=0.01, **options(layer_wise))
    trainer.train(1)
    assert_complete(bytecheckpoint.load(path, trainer.states()))
    trainer.loaded()
    bytecheckpoint.save(f"{path}-{layout}-{layer_wise}", trainer.states())
    return trainer.train(AFTER)


def load_megatron(layout: Layout, layer_wise: bool, path: str) -> None:
    """Load a checkpoint of Megatron: each parameter gets the hyperparameters of its group."""
    trainer = Trainer(layout, seed=9, lr=0.01, **options(layer_wise))
    states = {name: trainer.states()[name] for name in ("model", "optimizer")}
    assert_complete(bytecheckpoint.load(f"{path}-megatron", states), ("missing", "cast"))
    assert {group["max_lr"] for group in trainer.optimizer.param_groups} == {0.02, 0.01}


def refuse_older(layout: Layout, path: str) -> None:
    trainer = Trainer(layout, **options(True))
    with (
        mock.patch("bytecheckpoint.frameworks.megatron.main_params.is_older_than", return_value=True),
        pytest.raises(UsageError, match=r"LayerWiseDistributedOptimizer is supported from Megatron-Core 0.19 on"),
    ):
        bytecheckpoint.save(path, trainer.states())


def test_older_versions_are_refused(worlds: Worlds, path: str) -> None:
    worlds.run(2, refuse_older, replace(_MUON, dp=2, bf16=True), path, timeout=120)


#: Layout, and whether each rank steps some layers only, which Megatron 0.19 trains in bf16 alone.
CASES = {
    "dp2": (replace(_MUON, dp=2, bf16=True), True),
    "dp4": (replace(_MUON, dp=4, bf16=True), True),
    "tp2-dp2": (replace(_MUON, tp=2, dp=2, bf16=True), True),
    "whole": (replace(_MUON, bf16=True), False),
    "whole-tp2": (replace(_MUON, tp=2, bf16=True), False),
}
_EXPERTS = replace(_MUON, moe=True, bf16=True)
EXPERTS = {
    "ep2-dp4": (replace(_EXPERTS, ep=2, dp=4), True),
    "pp2-dp2": (replace(_EXPERTS, pp=2, dp=2), True),
    "whole": (_EXPERTS, False),
}


@pytest.mark.parametrize(
    ("cases", "source"),
    [(CASES, "dp2"), (CASES, "tp2-dp2"), (CASES, "whole-tp2"), (EXPERTS, "ep2-dp4")],
    ids=["dp2", "tp2-dp2", "whole-tp2", "experts"],
)
def test_any_layout_trains_on(
    worlds: Worlds, cases: dict[str, tuple[Layout, bool]], source: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "step")
    layout, layer_wise = cases[source]
    losses, *_ = worlds.run(layout.world, save, layout, layer_wise, path, timeout=300)
    assert verify(path).ok
    assert digests(f"{path}-megatron") == digests(path)
    one, layer_wise = [*cases.values()][-1]
    worlds.run(one.world, load_megatron, one, layer_wise, path, timeout=300)
    for name, (layout, layer_wise) in cases.items():
        found, *_ = worlds.run(layout.world, load, layout, layer_wise, path, timeout=300)
        assert_same_checkpoints(path, f"{path}-{layout}-{layer_wise}", more_than=20)
        if name == source:
            assert found == losses
        assert_losses(found, losses, 1e-2)
