"""A part of a Megatron run's states."""

from __future__ import annotations

import pytest
import torch

import bytecheckpoint
from tests.support.megatron.full_state import full_state
from tests.support.megatron.models import Layout, in_layout
from tests.support.megatron.training import Trainer
from tests.support.selections import assert_part_loaded

pytestmark = pytest.mark.timeout(600)

PATTERN = "*/decoder.layers.1.*"
LAYOUTS = [
    Layout(dp=2, bf16=True),
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2, distributed=False, bf16=True),
    Layout(moe=True, ep=2, dp=2),
]


def trained(layout: Layout, seed: int, steps: int) -> Trainer:
    trainer = Trainer(layout, seed=seed)
    trainer.train(steps)
    return trainer


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@in_layout
def test_a_part_of_the_states(layout: Layout, path: str) -> None:
    source = trained(layout, 1, 2)
    saved = full_state(source)
    bytecheckpoint.save(path, source.states(), include=[PATTERN])
    target = trained(layout, 2, 1)
    before, steps = full_state(target), target.scheduler.num_steps
    report = bytecheckpoint.load(path, target.states(), include=[PATTERN])
    assert not report.missing and not report.unexpected
    assert_part_loaded(saved, before, full_state(target), "*layers.1.*")
    assert target.scheduler.num_steps == steps
    assert all(torch.tensor(loss).isfinite() for loss in target.train(2))


@pytest.mark.parametrize("layout", [Layout(dp=2, bf16=True)], ids=str)
@in_layout
def test_the_model_alone(layout: Layout, path: str) -> None:
    """The next step rounds the master weights into the model, so a load of the model fills them too."""
    source = trained(layout, 1, 2)
    saved = full_state(source)
    bytecheckpoint.save(path, source.states())
    target = trained(layout, 2, 1)
    bytecheckpoint.load(path, target.states(), include=["model/*"])
    after = full_state(target)
    masters = [key for key in after if key.endswith("/master")]
    assert masters
    for key in masters:
        weight = f"model/{key.removeprefix('optimizer/state/').removesuffix('/master')}"
        assert torch.equal(after[weight], saved[weight])
        assert torch.equal(after[key].to(saved[weight].dtype), saved[weight]), key


@pytest.mark.parametrize("layout", [Layout(dp=2, bf16=True)], ids=str)
@in_layout
def test_a_weight_that_is_left_alone_keeps_its_master(layout: Layout, path: str) -> None:
    source, target = trained(layout, 1, 2), trained(layout, 2, 1)
    bytecheckpoint.save(path, source.states())
    before = full_state(target)
    bytecheckpoint.load(path, target.states(), exclude=["model/decoder.layers.1.*"])
    after = full_state(target)
    kept = [key for key in after if "layers.1." in key and (key.startswith("model/") or key.endswith("/master"))]
    assert any(key.endswith("/master") for key in kept)
    assert all(torch.equal(after[key], before[key]) for key in kept)
