"""Runs of DeepSpeed and of torch continue from a folder that DeepSpeed itself has saved, with its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from tests.support.deepspeed_engines import ENGINES, Named, adamw, build, other, sgd, trained_run
from tests.support.real_frameworks import AFTER, BEFORE, assert_losses, mean_over_ranks
from tests.support.tiny_model import Gpt, batch, loss_of
from tests.support.torch_layouts import mesh, shard_blocks
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(300)

MakeOptimizer = Callable[[Named], torch.optim.Optimizer]


def plain_sgd(parameters: Named) -> torch.optim.Optimizer:
    """Make an optimizer without state, of the groups that `sgd` has."""
    made = sgd(parameters)
    for group in made.param_groups:
        group["momentum"] = 0.0
    return made


def save(name: str, path: str, make: MakeOptimizer = adamw) -> list[float]:
    run = trained_run(name, make)
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
        assert_losses(worlds.run(1, train_torch, str(tmp_path), adamw)[0], losses, 1e-5)


def train_torch(path: str, make: MakeOptimizer) -> list[float]:
    """Continue without DeepSpeed, in float32: with fully_shard on several ranks."""
    model = Gpt(tied=True)
    other(model)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if ranks > 1:
        shard_blocks(model, mesh(dp=ranks))
    optimizer = make(dict(model.named_parameters()))
    with bytecheckpoint.open(f"{path}/native") as found:
        low = found["model/positions"].dtype != torch.float32  # as buffers and frozen parameters are
        masters = {key.split("/")[2]: found[key][...] for key in found.tensors if key.endswith("/master")}
    bytecheckpoint.load(f"{path}/native", {"model": model, "optimizer": optimizer}, cast=low)
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if ranks > 1 else parameter
        assert name not in masters or torch.equal(whole, masters.pop(name)), name
    assert not masters
    losses = []
    for step in range(BEFORE, BEFORE + AFTER):
        inputs, targets = (whole.chunk(ranks)[rank] for whole in batch(step))
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        losses.append(mean_over_ranks(loss) if ranks > 1 else loss.item())
    return losses


@pytest.mark.parametrize(
    "source", ["z1x3", "z2x2", pytest.param("z3x2", marks=pytest.mark.short), "z3x3", "b1x2", "b2x2", "b3x2"]
)
@pytest.mark.parametrize("make", [adamw, sgd, plain_sgd])
def test_fully_sharded_models_go_on(worlds: Worlds, source: str, make: MakeOptimizer, tmp_path: Path) -> None:
    losses = worlds.run(ENGINES[source].size, save, source, str(tmp_path), make, timeout=200)[0]
    for found in worlds.run(2, train_torch, str(tmp_path), make, timeout=200):
        assert_losses(found, losses, 1e-3 if source[0] == "b" else 1e-5)
