"""A part of an engine's states, under ZeRO."""

from __future__ import annotations

import pytest
import torch

import bytecheckpoint
from tests.support.deepspeed_engines import build, full_state, in_engine_world, other, trained_run
from tests.support.selections import assert_part_loaded

pytestmark = pytest.mark.timeout(300)

PATTERN = "*/blocks.1.*"


@pytest.mark.parametrize("name", ["z0x2", "b2x2", "b3x2"])
@in_engine_world
def test_a_part_of_the_states(name: str, path: str) -> None:
    """ZeRO joins parameters of one group: the step of the selected ones is also that of the others."""
    source = trained_run(name)
    saved = full_state(source.engine)
    bytecheckpoint.save(path, source.states(), include=[PATTERN])
    with bytecheckpoint.open(path) as checkpoint:
        assert all(".1." in key for key in checkpoint if key != "optimizer/param_groups")
    target = build(name, other)
    target.train(1)
    before, steps = full_state(target.engine), target.engine.global_steps
    report = bytecheckpoint.load(path, target.states(), include=[PATTERN])
    assert not report.missing and not report.unexpected
    assert_part_loaded(saved, before, full_state(target.engine), "*blocks.1.*", joined=True)
    assert target.engine.global_steps == steps
    assert all(torch.tensor(loss).isfinite() for loss in target.train(2))


@pytest.mark.parametrize("name", ["b2x2", "b3x2"])
@in_engine_world
def test_the_model_alone(name: str, path: str) -> None:
    """The master weights follow the weights, although the optimizer is not selected."""
    source = trained_run(name)
    saved = full_state(source.engine)
    bytecheckpoint.save(path, source.states())
    target = build(name, other)
    bytecheckpoint.load(path, target.states(), include=["model/*"])
    after = full_state(target.engine)
    weights = [key for key in after if key.startswith("model/") or key.endswith("/master")]
    assert any(key.endswith("/master") for key in weights)
    assert all(torch.equal(after[key], saved[key]) for key in weights)
    assert not any(key.endswith("/exp_avg") and after[key].any() for key in after)
