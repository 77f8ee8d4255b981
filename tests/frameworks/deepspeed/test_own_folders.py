"""A run of DeepSpeed continues from a folder that DeepSpeed itself has saved, with its optimizer, and then from a step."""

from __future__ import annotations

from pathlib import Path

import pytest

import bytecheckpoint
from tests.support.deepspeed_engines import ENGINES, adamw, build, other, trained_run
from tests.support.real_frameworks import AFTER, BEFORE, assert_losses
from tests.support.tiny_model import Gpt, batch, loss_of
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(300)


def save(name: str, path: str) -> list[float]:
    run = trained_run(name, adamw)
    run.engine.save_checkpoint(path, tag="native")
    return run.train(AFTER)


def start(name: str, path: str, steps: int) -> list[float]:
    run = build(name, other, adamw)
    with bytecheckpoint.CheckpointManager(f"{path}/run", run.states(), every=2) as manager:
        if manager.restore_latest() is None:
            rest = {"lr_scheduler": run.engine.lr_scheduler}
            bytecheckpoint.load(f"{path}/native", {"model": run.engine, "extra_states": rest})
            for count in ("global_steps", "global_samples", "skipped_steps"):
                setattr(run.engine, count, rest[count])
            run.client["step"] = BEFORE
        assert run.engine.lr_scheduler.last_epoch == run.engine.global_steps == run.client["step"]
        assert run.engine.global_samples == 12 * run.client["step"]
        losses = []
        for _ in range(steps):
            losses += run.train(1)
            manager.maybe_save(run.client["step"])
    return losses


@pytest.mark.parametrize(("source", "target"), [("z2x2", "z3x3"), ("z3x2", "z1x3"), ("b2x2", "b3x2"), ("b2x2", "b2x2")])
def test_another_stage_goes_on(worlds: Worlds, source: str, target: str, tmp_path: Path) -> None:
    """Two starts; the weights of embedding and head are one tensor."""
    losses = worlds.run(ENGINES[source].size, save, source, str(tmp_path), timeout=200)[0]
    found = worlds.run(ENGINES[target].size, start, target, str(tmp_path), 1, timeout=200)[0]
    assert_losses(found, losses[:1], 2e-3 if source[0] == "b" else 1e-5)
    assert BEFORE + 1 == 4  # a step that is saved
    found += worlds.run(ENGINES[target].size, start, target, str(tmp_path), AFTER - 1, timeout=200)[0]
    assert_losses(found, losses, 2e-3 if source[0] == "b" else 1e-5)
    if source[0] != "b":
        assert_losses(worlds.run(1, train_plain, str(tmp_path))[0], losses, 1e-5)


def train_plain(path: str) -> list[float]:
    """Continue without DeepSpeed."""
    model = Gpt(tied=True)
    other(model)
    optimizer = adamw(dict(model.named_parameters()))
    bytecheckpoint.load(f"{path}/native", {"model": model, "optimizer": optimizer})
    losses = []
    for step in range(BEFORE, BEFORE + AFTER):
        inputs, targets = batch(step)
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        losses.append(loss.item())
    return losses
