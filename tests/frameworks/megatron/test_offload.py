"""Optimizers of Megatron-Core whose steps run on the CPU (`optimizer_cpu_offload`): every element, and the next losses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from tests.support.comparisons import assert_complete
from tests.support.megatron.models import Layout
from tests.support.megatron.training import Trainer
from tests.support.real_frameworks import check_every_pair
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)


def start(layout: Layout, fraction: float | None, options: dict[str, Any], seed: int) -> Trainer:
    """Return a new run, of which a fraction of the optimizer is on the CPU; None: without offload."""
    if fraction is not None:
        options |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction, "pin_cpu_grads": False}
    trainer = Trainer(layout, seed, lr=0.02 / seed, **options)
    for link in trainer.optimizer.chained_optimizers if fraction is not None else ():
        inner = link.optimizer
        assert type(inner).__name__ == "HybridDeviceOptimizer"
        assert bool(inner.cpu_optimizers) == (fraction > 0) and bool(inner.gpu_optimizer) == (fraction < 1)
    return trainer


_PRECISION_AWARE = {"use_precision_aware_optimizer": True}
_OVERLAPPING = {"overlap_cpu_optimizer_d2h_h2d": True}
CASES: dict[str, list[tuple[Layout, float | None, dict[str, Any]]]] = {
    "bf16": [
        (Layout(dp=2, bf16=True), 0.5, _PRECISION_AWARE),
        (Layout(tp=2, dp=2, bf16=True, overlap=True), 1.0, _PRECISION_AWARE | _OVERLAPPING),
        (Layout(pp=2, bf16=True), 0.5, {}),
        (Layout(dp=4, bf16=True), None, {}),
    ],
    "float32": [  # which Megatron 0.19 offloads without the distributed optimizer only
        (Layout(tp=2, distributed=False), 0.5, _OVERLAPPING),
        (Layout(distributed=False), 1.0, {}),
        (Layout(dp=2, tp=2), None, {}),
    ],
    "experts": [
        (Layout(moe=True, ep=2, dp=2, bf16=True), 0.5, _PRECISION_AWARE),
        (Layout(moe=True, bf16=True), None, {}),
    ],
}


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_any_layout_and_no_offload_train_on(
    worlds: Worlds, cases: list[tuple[Layout, float | None, dict[str, Any]]], tmp_path: Path
) -> None:
    layouts = [(case[0].world, partial(start, *case)) for case in cases]
    check_every_pair(worlds, tmp_path, layouts, 1e-2 if cases[0][0].bf16 else 1e-5, 50)


def load_precisions(paths: dict[bool, str]) -> None:
    """Save in bfloat16 and float32, load each into the other, and compare what Megatron has of each parameter."""
    layouts = {
        True: (Layout(bf16=True, frozen=False), 0.5, _PRECISION_AWARE),
        False: (Layout(distributed=False, frozen=False), 0.5, {}),
    }
    for is_half, case in layouts.items():
        trainer = start(*case, 1)
        trainer.train(2)
        bytecheckpoint.save(paths[is_half], trainer.states())
    for is_half, case in layouts.items():
        trainer = start(*case, 2)
        trainer.train(1)
        (hybrid,) = (link.optimizer for link in trainer.optimizer.chained_optimizers)
        for group in hybrid.param_groups:
            group["step"] = 1  # as a load of Megatron's own leaves it
        assert_complete(bytecheckpoint.load(paths[not is_half], trainer.states()))
        assert not any("step" in group for group in hybrid.param_groups)
        for parameter, inner in hybrid.param_to_inner_param.items():
            assert torch.equal(parameter, inner.to(parameter.dtype))
            assert hybrid.state[parameter]["master_param"] is inner and hybrid.state[parameter]["step"] == 2
        with bytecheckpoint.open(paths[not is_half]) as saved:
            name = "decoder.layers.1.mlp.linear_fc1.weight"
            parameter = dict(trainer.named_parameters())[name]
            exact = saved[f"optimizer/state/{name}/master" if not is_half else f"model/{name}"][...]
            assert torch.equal(parameter, exact.to(parameter.dtype))
        if is_half:
            notes = bytecheckpoint.load(paths[True], {"model": trainer.model}).notes
            assert any("load the optimizer too, or call its reload_model_params()" in note for note in notes)


def test_other_precision_and_the_model_alone(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(1, load_precisions, {half: str(tmp_path / f"{half}") for half in (True, False)}, timeout=120)
