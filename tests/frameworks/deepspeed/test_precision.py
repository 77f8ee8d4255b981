"""ZeRO steps float32 master weights: its state from, and for, optimizers over the bfloat16 weights themselves."""

from __future__ import annotations

import math

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError
from tests.support.deepspeed_engines import Values, adamw, build, full_state, in_engine_world, other, trained
from tests.support.tiny_model import Gpt, batch, loss_of

pytestmark = pytest.mark.timeout(300)

MOMENTS = ("exp_avg", "exp_avg_sq")


def plain(values: Values) -> tuple[Gpt, torch.optim.Optimizer]:
    model = Gpt(tied=True)
    values(model)
    return model.bfloat16(), adamw(dict(model.named_parameters()))


def step(model: Gpt, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    inputs, targets = batch(0)
    loss_of(model(inputs).float(), targets).backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["b1x2", "b2x2", "b3x2", "b1x2-own"])
@in_engine_world
def test_state_of_and_for_an_optimizer_in_bfloat16(name: str, path: str) -> None:
    model, optimizer = plain(trained)
    step(model, optimizer)
    bytecheckpoint.save(f"{path}/plain", {"model": model, "optimizer": optimizer})
    run = build(name, other)
    report = bytecheckpoint.load(f"{path}/plain", {"model": run.engine}, strict=False)
    assert report.cast and all(key.endswith(MOMENTS) for key in report.cast)
    assert math.isfinite(run.step()), "the engine steps with the state"
    fresh = build(name, other)
    bytecheckpoint.load(f"{path}/plain", {"model": fresh.engine}, strict=False)
    found = full_state(fresh.engine)
    for weight, parameter in model.named_parameters():
        for slot in MOMENTS if parameter.requires_grad else ():
            expected = optimizer.state[parameter][slot].float()
            assert torch.equal(found[f"optimizer/state/{weight}/{slot}"], expected), weight

    bytecheckpoint.save(f"{path}/engine", {"model": fresh.engine})
    again, own = plain(other)
    states = {"model": again, "optimizer": own}
    with pytest.raises(IncompatibleCheckpointError, match=r"optimizer/state/.* float32 .* bfloat16 here \(cast=True"):
        bytecheckpoint.load(f"{path}/engine", states, strict=False)
    report = bytecheckpoint.load(f"{path}/engine", states, strict=False, cast=True)
    assert any("are left out" in note for note in report.notes)
    for parameter, expected in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)
        for slot in MOMENTS if parameter.requires_grad else ():
            assert torch.equal(own.state[parameter][slot], optimizer.state[expected][slot])
    step(again, own)
    step(model, optimizer)
    for parameter, expected in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)
