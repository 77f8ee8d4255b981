"""What ranks run in test_states.py. Each function returns plain data, mostly the problems that it found."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.deepspeed.adapter import DeepSpeedFramework
from tests.distributed.fsdp1_jobs import recorded_communication
from tests.distributed.fsdp1_layouts import build as build_torch
from tests.frameworks.deepspeed.engines import EngineTrainer, adamw, build, full_state, other, settings, trained
from tests.frameworks.real_frameworks import AFTER, BEFORE, report_problems, state_differences
from tests.support.tiny_model import Gpt, batch

#: The states that a program may pass for one engine.
STATES: dict[str, Callable[[EngineTrainer], dict[str, Any]]] = {
    "engine": lambda run: {"model": run.engine, "client": run.client},
    "beside": lambda run: {"model": run.engine, "optimizer": run.engine.optimizer, "client": run.client},
    "inner": lambda run: {"model": run.engine, "optimizer": run.engine.optimizer.optimizer, "client": run.client},
    "module": lambda run: {
        "model": run.engine.module,
        "optimizer": run.engine.optimizer,
        "lr_scheduler": run.engine.lr_scheduler,
        "client": run.client,
    },
    "named": lambda run: {"actor": run.engine, "client": run.client},
}


def every_way_to_pass_an_engine(name: str, folder: str) -> list[str]:
    """Save and load each of `STATES`; return what went wrong."""
    problems = []
    for form, states in STATES.items():
        run = build(name, trained)
        run.train(BEFORE)
        expected = full_state(run.engine)
        bytecheckpoint.save(f"{folder}/{form}", states(run), framework="deepspeed")
        after = run.train(AFTER)
        fresh = build(name, other)
        report = bytecheckpoint.load(f"{folder}/{form}", states(fresh))
        fields = ("missing", "unexpected", "cast", "notes")
        problems += [f"{form}: {x}" for x in report_problems(report, fields)]
        problems += [f"{form}: {x}" for x in state_differences(expected, full_state(fresh.engine))]
        if fresh.train(AFTER) != after:
            problems.append(f"{form}: losses differ")
        steps = fresh.engine.global_steps
        if steps != (AFTER if form == "module" else BEFORE + AFTER):
            problems.append(f"{form}: {steps} steps")
    with bytecheckpoint.open(f"{folder}/engine") as engine, bytecheckpoint.open(f"{folder}/beside") as beside:
        if set(engine) != set(beside):
            problems.append("an engine alone and with its optimizer save different tensors")
    with bytecheckpoint.open(f"{folder}/named") as named:
        kinds = {key.partition("/")[0] for key in named}
        if not kinds >= {"actor", "actor_optimizer"}:
            problems.append(f"kinds {kinds}")
    return problems


def counters(name: str, folder: str) -> list[Any]:
    """Return the engine's counters before and after a resume, with skipped steps and a changed loss scale."""
    run = build(name, trained)
    run.train(BEFORE)
    run.engine.skipped_steps += 2
    run.engine.optimizer.loss_scaler.cur_hysteresis = 1
    bytecheckpoint.save(f"{folder}/fp16", run.states())
    fresh = build(name, other)
    bytecheckpoint.load(f"{folder}/fp16", fresh.states())
    found = []
    for engine in (run.engine, fresh.engine):
        scaler = engine.optimizer.loss_scaler
        counts = [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.lr_scheduler.last_epoch]
        found.append([*counts, scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis])
    return found


def communication(name: str, folder: str) -> dict[str, list[str]]:
    """Return what a capture, saves and a load communicate over process groups, and what DeepSpeed's own way does."""
    run = build(name, trained)
    run.train(1)
    bytecheckpoint.save(f"{folder}/first", run.states())  # makes connections of its own
    found = {}
    with recorded_communication() as found["capture"]:
        DeepSpeedFramework().capture(run.states())
    with recorded_communication() as found["save"]:
        bytecheckpoint.save(f"{folder}/second", run.states())
    run.train(1)
    with recorded_communication() as found["async"]:
        bytecheckpoint.save(f"{folder}/third", run.states(), async_checkpoint=True).result(60)
    fresh = build(name, other)
    with recorded_communication() as found["load"]:
        bytecheckpoint.load(f"{folder}/third", fresh.states())
    with recorded_communication() as found["own way"]:
        full_state(run.engine)
    return found


def weights_only(name: str, folder: str) -> list[str]:
    """Load into a module alone, with and without master weights in the checkpoint; its master weights are filled too."""
    run = build(name, trained)
    run.train(BEFORE)
    expected = full_state(run.engine)
    bytecheckpoint.save(f"{folder}/engine", run.states())
    fresh = build(name, other)
    bytecheckpoint.load(f"{folder}/engine", {"model": fresh.engine.module})
    weights = {k: v for k, v in expected.items() if k.startswith("model") or k.endswith("master")}
    got = full_weights(fresh.engine)
    problems = state_differences(weights, got)
    plain = Gpt(tied=True).to(torch.bfloat16)
    plain.positions = plain.positions.to(torch.bfloat16)
    bytecheckpoint.load(f"{folder}/engine", {"model": plain})
    bytecheckpoint.save(f"{folder}/plain", {"model": plain})
    fresh = build(name, other)
    report = bytecheckpoint.load(f"{folder}/plain", {"model": fresh.engine.module})
    if not any("no master weights" in note for note in report.notes):
        problems.append(f"nothing is said: {report.notes}")
    low = {k: v for k, v in expected.items() if k.startswith("model")}
    problems += state_differences(low, full_weights(fresh.engine))
    return problems


def full_weights(engine: Any) -> dict[str, Any]:
    """Return the weights and master weights of an engine that has no optimizer state yet."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    found: dict[str, Any] = {f"model/{n}": b.clone() for n, b in engine.module.named_buffers()}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p]):
            found[f"model/{name}"] = p.detach().clone()
        if p.requires_grad:
            found[f"optimizer/state/{name}/master"] = safe_get_full_fp32_param(p).reshape(found[f"model/{name}"].shape)
    return found


def after_evaluation(name: str, folder: str) -> list[str]:
    """Save and load while parameters are still gathered."""
    run = build(name, trained)
    run.train(BEFORE)
    fresh = build(name, other)
    for each in (run, fresh):
        with torch.no_grad():
            each.engine(batch(0)[0].chunk(dist.get_world_size())[dist.get_rank()])
    bytecheckpoint.save(f"{folder}/step", run.states())
    bytecheckpoint.load(f"{folder}/step", fresh.states())
    problems = state_differences(full_state(run.engine), full_state(fresh.engine))
    with torch.no_grad():
        inputs = batch(1)[0].chunk(dist.get_world_size())[dist.get_rank()]
        if not torch.equal(run.engine(inputs), fresh.engine(inputs)):
            problems.append("evaluation differs")
    if run.train(AFTER) != fresh.train(AFTER):
        problems.append("losses differ")
    return problems


def own_optimizers(name: str, folder: str, kind: str) -> list[str]:
    """Save and load an optimizer that DeepSpeed makes, which counts steps in plain numbers where torch uses tensors."""
    made = {"optimizer": {"type": kind, "params": {"lr": 3e-3, "weight_decay": 0.1}}}
    run = build(name, trained, None, **made)
    run.train(BEFORE)
    base = run.engine.optimizer.optimizer
    assert type(base).__module__.startswith("deepspeed."), type(base)
    expected = full_state(run.engine)
    bytecheckpoint.save(f"{folder}/own", run.states())
    after = run.train(AFTER)
    fresh = build(name, other, None, **made)
    bytecheckpoint.load(f"{folder}/own", fresh.states())
    problems = state_differences(expected, full_state(fresh.engine))
    if fresh.train(AFTER) != after:
        problems.append("losses differ")
    # Into torch's, whose step is a tensor, and back.
    plain = build(name, other, lambda named: torch.optim.AdamW(named.values(), lr=1.0, foreach=False))
    bytecheckpoint.load(f"{folder}/own", plain.states())
    losses = plain.train(AFTER)
    if not all(abs(a - b) < 0.02 for a, b in zip(losses, after, strict=True)):
        problems.append(f"losses {losses} instead of {after}")
    bytecheckpoint.save(f"{folder}/torch", plain.states())
    bytecheckpoint.load(f"{folder}/torch", fresh.states())
    steps = {s["step"] for s in fresh.engine.optimizer.optimizer.state.values()}
    if steps != {BEFORE + AFTER} or {type(s) for s in steps} != {int}:
        problems.append(f"steps {steps}")
    return problems


def without_optimizer(folder: str) -> list[str]:
    """Load into an engine for inference."""
    run = build("b3x2", trained)
    run.train(1)
    bytecheckpoint.save(f"{folder}/step", run.states())
    fresh = build("b3x2", other, None)
    bytecheckpoint.load(f"{folder}/step", {"model": fresh.engine})
    inputs = batch(0)[0]
    with torch.no_grad():
        same = torch.equal(run.engine(inputs), fresh.engine(inputs))
    return [] if same else ["outputs differ"]


def joined_parameters(name: str, folder: str) -> list[str]:
    """Load state of parameters that were stepped one by one into one flat tensor: missing state, and different steps."""
    plain = build_torch("ddp2", trained, tied=True, dtype=torch.float32, optimizer=lambda named: adamw(dict(named)))
    plain.train(BEFORE)
    states = {"model": plain.model, "optimizer": plain.optimizer, "client": {"step": BEFORE}}
    optimizer = plain.optimizer
    named = dict(plain.unwrapped.named_parameters())
    unused = named["blocks.0.mlp.up.weight"]
    own_state = optimizer.state.pop(unused)
    bytecheckpoint.save(f"{folder}/without", states)
    run = build(name, other)
    run.train(1)
    report = bytecheckpoint.load(f"{folder}/without", run.states())
    problems = [] if any("begin at zero" in note for note in report.notes) else [f"nothing is said: {report.notes}"]
    for slot in ("exp_avg", "exp_avg_sq"):
        if full_state(run.engine)[f"optimizer/state/blocks.0.mlp.up.weight/{slot}"].any():
            problems.append(f"{slot} is not zero")
    optimizer.state[unused] = own_state | {"step": torch.tensor(9.0)}
    bytecheckpoint.save(f"{folder}/steps", states)
    with pytest.raises(IncompatibleCheckpointError, match="step differs in the checkpoint"):
        bytecheckpoint.load(f"{folder}/steps", build(name, other).states())
    optimizer.state[unused]["step"] = own_state["step"].clone()
    one_group = build(name, other, lambda named: torch.optim.AdamW(named.values()))
    with pytest.raises(IncompatibleCheckpointError, match="settings differ"):
        bytecheckpoint.load(f"{folder}/without", one_group.states())
    return problems


class RowState(torch.optim.SGD):
    """An optimizer with state that is not elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = torch.zeros(3)


class OneBit(torch.optim.SGD):
    """An optimizer from the module of DeepSpeed's compressing ones."""


OneBit.__module__ = "deepspeed.runtime.fp16.onebit.adam"


def refusals(folder: str) -> list[str]:
    """Check what is refused; return what was written all the same."""
    import deepspeed

    path = f"{folder}/refused"
    two, three = build("b2x2", trained), build("b3x2", trained)

    def refused(states: dict[str, Any], message: str, framework: str = "auto") -> None:
        with pytest.raises(UsageError, match=message):
            bytecheckpoint.save(path, states, framework=framework)

    base = two.engine.optimizer.optimizer
    refused({"model": two.engine}, "belongs to an engine of DeepSpeed", "torch")
    refused({"model": three.engine.module}, "belongs to an engine of DeepSpeed", "ddp")
    refused({"nested": {"engine": two.engine}}, "inside a container")
    refused({"model": [two.engine]}, "inside a container")
    refused({"optimizer": two.engine.optimizer}, "in none of the modules")
    refused({"model": two.engine.module, "optimizer": base}, "pass engine.optimizer")
    refused({"model": two.engine, "optimizer": three.engine.optimizer}, "is not the optimizer of the engine")
    refused({"model": two.engine, "engine": {"a": 1}}, "choose another")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed, "__version__", "0.20.1")
        refused({"model": two.engine}, r"0\.20\.1 is not supported")
    for change, message in (
        ({"offloaded_states": {"x"}}, "reload_states"),
        ({"zenflow": True}, "ZenFlow"),
        ({"swap_optimizer": True}, "NVMe"),
        ({"optimizer": OneBit([nn.Parameter(torch.zeros(1))], lr=1.0)}, "OneBit"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in change.items():
                patch.setattr(two.engine.optimizer, name, value, raising=False)
            refused({"model": two.engine}, message)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(three.engine, "__class__", type("Hybrid", (type(three.engine),), {}))
        refused({"model": three.engine}, "engine of type Hybrid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(three.engine, "autotp_size", lambda: 2)
        refused({"model": three.engine}, "tensor-parallel over 2")
    rows = build("b2x2", trained, lambda named: RowState(named.values(), lr=0.1))
    rows.train(1)
    refused({"model": rows.engine}, r"rows is a tensor of shape \(3,\), and ZeRO keeps")
    half = build("b2x2", trained, gradient_accumulation_steps=2)
    two.train(1)
    bytecheckpoint.save(f"{folder}/step", two.states())
    half.step()
    with pytest.raises(UsageError, match="1 of 2 micro-batches"):
        bytecheckpoint.load(f"{folder}/step", half.states())
    return os.listdir(path) if os.path.exists(path) else []


def layouts() -> dict[str, Any]:
    """Return what `inspect` shows."""
    run = build("b3x2", trained)
    return DeepSpeedFramework().describe(run.states())


def frozen_in_group(folder: str) -> list[Any]:
    """Load a param group with a frozen parameter into plain AdamW, which has it in its group too."""
    run = build("z2x2", trained)
    run.train(BEFORE)
    bytecheckpoint.save(f"{folder}/step", run.states())
    model = Gpt(tied=True)
    model.temperature.requires_grad_(False)
    plain = adamw(dict(model.named_parameters()))
    report = bytecheckpoint.load(f"{folder}/step", {"model": model, "optimizer": plain})
    engine = [{k: s[k] for k in ("lr", "weight_decay")} for s in settings(run.engine)]
    return [list(report.missing), engine, [{k: g[k] for k in ("lr", "weight_decay")} for g in plain.param_groups]]
