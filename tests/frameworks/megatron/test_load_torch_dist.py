"""Checkpoints that Megatron itself saved, loaded as they lie at other layouts: the losses are those of the saving run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bytecheckpoint
from tests.formats.golden.make_megatron import digests
from tests.support.comparisons import assert_complete
from tests.support.megatron.models import LENGTH, Layout
from tests.support.megatron.torch_dist import save_torch_dist, start_with_own_shards
from tests.support.megatron.training import Trainer, plain_run, scale_at, tokens
from tests.support.real_frameworks import AFTER, BEFORE, assert_losses
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)

KINDS = ["fully_reshardable", "dp_reshardable"]
#: Layout of the save, and those of the loads. Both have one model.
CASES = {
    "dense": (
        Layout(tp=2, dp=2, bf16=True),
        [Layout(tp=2, dp=2, bf16=True), Layout(dp=4, bf16=True), Layout(tp=2, pp=2, bf16=True)],
    ),
    "whole": (Layout(tp=2, bf16=True, distributed=False), [Layout(pp=2, bf16=True, distributed=False)]),
    "experts": (Layout(ep=2, dp=2, moe=True), [Layout(dp=2, moe=True), Layout(pp=2, moe=True)]),
    "virtual": (Layout(pp=2, vpp=2, dp=2, tied=False), [Layout(dp=2, tied=False), Layout(tp=2, pp=2, tied=False)]),
}


def save(layout: Layout, folder: str) -> list[float]:
    trainer = start_with_own_shards(layout, lr=0.5)
    trainer.train(BEFORE)
    for kind in KINDS:
        save_torch_dist(trainer, f"{folder}/{kind}", kind)
    return trainer.train(AFTER)


def load(layout: Layout, path: str) -> list[float]:
    trainer = Trainer(layout, seed=9, lr=0.1)
    trainer.train(1)
    states = {**trainer.states(), "opt_param_scheduler": trainer.scheduler}
    del states["scheduler"], states["extra_states"]
    assert_complete(bytecheckpoint.load(path, states))
    trainer.step = BEFORE
    return trainer.train(AFTER)


def load_plain(layout: Layout, path: str) -> list[float]:
    """Load into one module, stepped by torch, and train as the scheduler and the clipping of Megatron do."""
    model, adam = plain_run(layout, seed=9)
    assert_complete(bytecheckpoint.load(path, {"model": model, "optimizer": adam}), ("unexpected",))
    losses = []
    for step in range(BEFORE, BEFORE + AFTER):
        rows = tokens(step)
        loss = model(
            rows[:, :-1].contiguous(), torch.arange(LENGTH)[None], None, labels=rows[:, 1:].contiguous()
        ).mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adam.param_groups:
            group["lr"] = scale_at(step) * (0.5 if group["weight_decay"] else 0.25)
        adam.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", CASES)
def test_any_layout_trains_on(worlds: Worlds, name: str, tmp_path: Path) -> None:
    source, layouts = CASES[name]
    losses, *_ = worlds.run(source.world, save, source, str(tmp_path), timeout=300)
    for layout in layouts:
        for kind in KINDS:
            found, *_ = worlds.run(layout.world, load, layout, f"{tmp_path}/{kind}", timeout=300)
            if layout == source:
                assert found == losses
            assert_losses(found, losses, 1e-2 if source.bf16 else 1e-5)
    if name == "virtual":
        (found,) = worlds.run(1, load_plain, Layout(tied=False), f"{tmp_path}/fully_reshardable", timeout=300)
        assert_losses(found, losses, 1e-5)


def save_without_momentum(layout: Layout, folder: str) -> list[float]:
    trainer = start_with_own_shards(layout, lr=0.5, sgd_momentum=0.0)
    trainer.train(BEFORE)
    save_torch_dist(trainer, folder, "fully_reshardable")
    return trainer.train(AFTER)


def test_groups_of_optimizers_without_state(worlds: Worlds, tmp_path: Path) -> None:
    """SGD without momentum has settings alone."""
    layout = Layout(tp=2, distributed=False, optimizer="sgd")
    losses, _ = worlds.run(2, save_without_momentum, layout, str(tmp_path / "saved"), timeout=300)
    found, _ = worlds.run(2, load, replace(layout, tp=1, pp=2), str(tmp_path / "saved"), timeout=300)
    assert_losses(found, losses, 1e-5)


def save_equal_norms(layout: Layout, folder: str) -> None:
    """Save a state whose norms are all 1 in the precision of the model, and differ in the masters and moments."""
    trainer = start_with_own_shards(layout, lr=1e-4)
    with torch.no_grad():
        for name, parameter in trainer.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
    trainer.optimizer.reload_model_params()
    trainer.train(BEFORE)
    assert all(bool((p == 1).all()) for name, p in trainer.named_parameters() if "norm" in name)
    save_torch_dist(trainer, f"{folder}/megatron", "dp_reshardable")
    states = trainer.states()
    bytecheckpoint.save(f"{folder}/own", {name: states[name] for name in ("model", "optimizer")})


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, tp=2, bf16=True, tied=False),
        Layout(pp=2, dp=2, bf16=True),
        Layout(dp=2, bf16=True, tied=False, buckets=2000),
    ],
    ids=str,
)
def test_equal_weights_in_buckets_are_told_apart(worlds: Worlds, layout: Layout, tmp_path: Path) -> None:
    worlds.run(layout.world, save_equal_norms, layout, str(tmp_path), timeout=300)
    assert digests(str(tmp_path / "megatron")) == digests(str(tmp_path / "own"))
