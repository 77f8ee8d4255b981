"""Engines that are saved in the background: what waits for steps, what is copied in the call, what blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.deepspeed.adapter import DeepSpeedFramework
from tests.support.deepspeed_engines import build, full_state, in_engine_world, other, trained, trained_run
from tests.support.late_copies import copied_share, save_and_step, staging_under_a_manager
from tests.support.modes import MODES
from tests.support.real_frameworks import AFTER, assert_restored
from tests.support.worlds import on_ranks

pytestmark = pytest.mark.timeout(300)


ENGINES = [
    "z1x3",
    "b1x2-own",
    "b2x2",
    "b2x4",
    "h0x2",
    "h2x2",
    "z3x2",
    "b3x2",
    "b3x3",
    "b2x2-cpu",
    "b3x2-cpu",
    "b3x4-hpz",
]


@pytest.mark.parametrize("name", ENGINES)
@in_engine_world
def test_steps_right_after_the_call(name: str, path: str) -> None:
    run = trained_run(name)
    before, losses = full_state(run.engine), []
    save_and_step(path, run.states(), lambda: losses.extend(run.train(AFTER)))
    fresh = build(name, other)
    bytecheckpoint.load(f"{path}/behind", fresh.states())
    assert_restored(before, full_state(fresh.engine))
    assert fresh.train(AFTER) == losses
    assert copied_share(DeepSpeedFramework(), run.states()) < 0.1


@pytest.mark.parametrize(
    ("name", "kind"), [("b2x2", "FusedAdam"), ("b2x2-cpu", "DeepSpeedCPUAdam"), ("b3x2-part", "DeepSpeedCPUAdam")]
)
@in_engine_world
def test_optimizers_of_deepspeed(name: str, kind: str, path: str) -> None:
    from deepspeed.ops import adam

    run = trained_run(name, lambda named: getattr(adam, kind)(list(named.values()), lr=0.01))
    save_and_step(path, run.states(), lambda: run.train(1))


@pytest.mark.parametrize("name", ["h2x2", "h3x2"])
@in_engine_world
def test_buffers_and_the_loss_scale_are_those_of_the_call(name: str, path: str) -> None:
    run = trained_run(name)

    def change() -> None:
        run.engine.module.positions.zero_()
        run.engine.optimizer.loss_scaler.cur_scale /= 2

    save_and_step(path, run.states(), change)


def reason(states: dict[str, Any]) -> str:
    return DeepSpeedFramework().reason_to_block(states)


@pytest.mark.parametrize("name", ["b2x2", "b1x2-own", "b3x2"])
@in_engine_world
def test_a_module_without_its_optimizer(name: str, path: str) -> None:
    """Stage 3 links parameters to the optimizer that steps them, stages 1 and 2 do not."""
    run = trained_run(name)
    states = {"model": run.engine.module}
    linked = name == "b3x2"
    assert reason(states) == ("" if linked else "the optimizer of DeepSpeed that steps model is not in the states")
    assert reason(states | {"optimizer": run.engine.optimizer}) == reason(run.states()) == ""
    bytecheckpoint.save(f"{path}/before", states)
    handle = bytecheckpoint.save(f"{path}/behind", states, **MODES["background"])
    run.train(1)
    assert handle.result(60).staging.partition(":")[0] == ("background" if linked else "blocking")


@on_ranks(2)
def test_zenflow(path: str) -> None:
    """Its optimizers step beside the training; the model alone can be saved, in the call."""
    zenflow = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 2, "update_interval": 2}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {**zenflow, "overlap_step": False}}
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    run = build("b2x2", trained, None, optimizer=adam, zero_optimization=zero)
    assert "ZenFlow" in reason(run.states())
    assert "not in the states" in reason({"model": run.engine.module})
    with pytest.raises(UsageError, match="ZenFlow"):
        bytecheckpoint.save(path, run.states(), **MODES["background"])
    handle = bytecheckpoint.save(path, {"model": run.engine.module}, **MODES["background"])
    assert handle.result(60).staging.startswith("blocking: the optimizer of DeepSpeed")


@on_ranks(2)
def test_reasons_to_block() -> None:
    from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3

    run = build("b3x2", trained)
    wrapper, states = run.engine.optimizer, {"model": run.engine.module}
    unseen = torch.optim.SGD([torch.zeros(1)])
    unseen.step = lambda: None  # type: ignore[method-assign,assignment]
    for owner, name, value, message in (
        (
            wrapper,
            "__class__",
            SuperOffloadOptimizer_Stage3,
            "SuperOffloadOptimizer_Stage3 of DeepSpeed is not supported",
        ),
        (wrapper, "zenflow", True, "ZenFlow"),
        (wrapper, "swap_optimizer", True, "NVMe"),
        (wrapper.optimizer, "step", lambda: None, "hooks do not see the steps of AdamW"),
        (wrapper, "backup_optimizer", unseen, "hooks do not see the steps of SGD"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            assert message in reason(states)
            assert message in reason(run.states())
    assert reason(states) == ""
    wrapper.optimizer.param_groups[0]["capturable"] = True
    assert reason(states) == "steps of AdamW may be replayed as a graph (capturable=True)"


@pytest.mark.parametrize("name", ["b2x2", "b3x2"])
@in_engine_world
def test_parameters_that_are_frozen_for_a_while(name: str, path: str) -> None:
    """The engine steps them again, in memory that its optimizer does not show: the step waits for their bytes, too."""
    run = trained_run(name)
    frozen = dict(run.engine.module.named_parameters())["blocks.0.mlp.up.weight"]
    frozen.requires_grad = False
    assert {s.key.fqn for s in DeepSpeedFramework().capture(run.states())[0].shards if s.frozen} <= {"temperature"}
    save_and_step(f"{path}/1", run.states(), lambda: None, incremental=True)

    def step() -> None:
        frozen.requires_grad = True
        run.train(1)

    save_and_step(f"{path}/2", run.states(), step, incremental=True)


@pytest.mark.parametrize("name", ["b1x2-own", "h2x2", "b3x2"])
@in_engine_world
def test_a_manager_copies_behind_the_training(name: str, path: str) -> None:
    run = trained_run(name)
    assert staging_under_a_manager(path, run.states(), run.step, 4) == ["blocking"] * 2 + ["background"] * 2
