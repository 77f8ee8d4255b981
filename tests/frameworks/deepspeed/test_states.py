"""States with an engine: the ways to pass one, its counters, refusals, and that nothing is communicated."""

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
from tests.support.communication import check_no_communication
from tests.support.comparisons import assert_complete
from tests.support.deepspeed_engines import (
    EngineTrainer,
    adamw,
    build,
    full_state,
    in_engine_world,
    other,
    settings,
    trained,
    trained_run,
)
from tests.support.fsdp1_layouts import build as build_torch
from tests.support.real_frameworks import AFTER, BEFORE, assert_losses, assert_restored
from tests.support.tiny_model import Gpt, batch
from tests.support.worlds import on_ranks

pytestmark = pytest.mark.timeout(300)

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


@pytest.mark.parametrize("name", ["b2x2", "b3x2", "b1x2-own"])
@in_engine_world
def test_every_way_to_pass_an_engine(name: str, path: str) -> None:
    for form, states in STATES.items():
        run = trained_run(name)
        expected = full_state(run.engine)
        bytecheckpoint.save(f"{path}/{form}", states(run), framework="deepspeed")
        after = run.train(AFTER)
        fresh = build(name, other)
        report = bytecheckpoint.load(f"{path}/{form}", states(fresh))
        assert_complete(report, ("missing", "unexpected", "cast", "notes"))
        assert_restored(expected, full_state(fresh.engine))
        assert fresh.train(AFTER) == after, form
        assert fresh.engine.global_steps == (AFTER if form == "module" else BEFORE + AFTER), form
    with bytecheckpoint.open(f"{path}/engine") as engine, bytecheckpoint.open(f"{path}/beside") as beside:
        assert set(engine) == set(beside), "an engine alone and with its optimizer save different tensors"
    with bytecheckpoint.open(f"{path}/named") as named:
        assert {key.partition("/")[0] for key in named} >= {"actor", "actor_optimizer"}


@pytest.mark.parametrize("name", ["h2x2", "h3x2"])
@in_engine_world
def test_counters_and_loss_scale(name: str, path: str) -> None:
    """After skipped steps and a changed loss scale, a resume has the counters of the saved engine."""
    run = trained_run(name)
    run.engine.skipped_steps += 2
    run.engine.optimizer.loss_scaler.cur_hysteresis = 1
    bytecheckpoint.save(path, run.states())
    fresh = build(name, other)
    bytecheckpoint.load(path, fresh.states())
    saved, loaded = (
        [
            *(engine.global_steps, engine.global_samples, engine.skipped_steps, engine.lr_scheduler.last_epoch),
            *(scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis),
        ]
        for engine in (run.engine, fresh.engine)
        for scaler in [engine.optimizer.loss_scaler]
    )
    assert saved == loaded
    assert saved[:2] == [3, 36] and saved[-1] == 1


@pytest.mark.parametrize("name", ["z1x3", "b2x3", "b3x4", "b1x3-own"])
@in_engine_world
def test_nothing_is_communicated_over_process_groups(name: str, path: str) -> None:
    check_no_communication(DeepSpeedFramework(), lambda: build(name, trained), path, lambda run: full_state(run.engine))


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


@pytest.mark.parametrize("name", ["b2x2", "b3x2"])
@in_engine_world
def test_a_module_alone_takes_master_weights(name: str, path: str) -> None:
    """A load fills the master weights too, from the checkpoint's master weights or, if it has none, from the weights."""
    run = trained_run(name)
    expected = full_state(run.engine)
    bytecheckpoint.save(f"{path}/engine", run.states())
    fresh = build(name, other)
    bytecheckpoint.load(f"{path}/engine", {"model": fresh.engine.module})
    weights = {k: v for k, v in expected.items() if k.startswith("model") or k.endswith("master")}
    assert_restored(weights, full_weights(fresh.engine))
    plain = Gpt(tied=True).to(torch.bfloat16)
    plain.positions = plain.positions.to(torch.bfloat16)
    bytecheckpoint.load(f"{path}/engine", {"model": plain})
    bytecheckpoint.save(f"{path}/plain", {"model": plain})
    fresh = build(name, other)
    report = bytecheckpoint.load(f"{path}/plain", {"model": fresh.engine.module})
    assert any("no master weights" in note for note in report.notes), report.notes
    assert_restored({k: v for k, v in expected.items() if k.startswith("model")}, full_weights(fresh.engine))


def local_inputs(step: int) -> torch.Tensor:
    return batch(step)[0].chunk(dist.get_world_size())[dist.get_rank()]


@pytest.mark.parametrize("name", ["z3x2", "b3x2", "b2x2"])
@in_engine_world
def test_gathered_parameters(name: str, path: str) -> None:
    """Save and load after an evaluation, which leaves parameters gathered."""
    run, fresh = trained_run(name), build(name, other)
    with torch.no_grad():
        for each in (run, fresh):
            each.engine(local_inputs(0))
    bytecheckpoint.save(path, run.states())
    bytecheckpoint.load(path, fresh.states())
    assert_restored(full_state(run.engine), full_state(fresh.engine))
    with torch.no_grad():
        assert torch.equal(run.engine(local_inputs(1)), fresh.engine(local_inputs(1)))
    assert run.train(AFTER) == fresh.train(AFTER)


@pytest.mark.parametrize("name", ["b2x2", "b3x2", "b2x2-cpu"])
@in_engine_world
def test_optimizers_that_deepspeed_makes(name: str, path: str) -> None:
    """They count steps in plain numbers where torch uses tensors."""
    made = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}}}
    run = trained_run(name, None, **made)
    base = run.engine.optimizer.optimizer
    assert type(base).__module__.startswith("deepspeed."), type(base)
    expected = full_state(run.engine)
    bytecheckpoint.save(f"{path}/own", run.states())
    after = run.train(AFTER)
    fresh = build(name, other, None, **made)
    bytecheckpoint.load(f"{path}/own", fresh.states())
    assert_restored(expected, full_state(fresh.engine))
    assert fresh.train(AFTER) == after
    # Into torch's, whose step is a tensor, and back.
    settings = {"lr": 1.0, "weight_decay": 0.1, "torch_adam": True}
    plain = build(name, other, None, optimizer={"type": "AdamW", "params": settings})
    assert type(plain.engine.optimizer.optimizer) is torch.optim.AdamW
    bytecheckpoint.load(f"{path}/own", plain.states())
    assert_losses(plain.train(AFTER), after, 1e-6)
    bytecheckpoint.save(f"{path}/torch", plain.states())
    bytecheckpoint.load(f"{path}/torch", fresh.states())
    steps = [s["step"] for s in fresh.engine.optimizer.optimizer.state.values()]
    assert set(steps) == {BEFORE + AFTER} and {type(s) for s in steps} == {int}, steps


@on_ranks(2)
def test_an_engine_without_optimizer(path: str) -> None:
    """A load into an engine for inference."""
    run, fresh = build("b3x2", trained), build("b3x2", other, None)
    run.train(1)
    bytecheckpoint.save(path, run.states())
    bytecheckpoint.load(path, {"model": fresh.engine})
    with torch.no_grad():
        assert torch.equal(run.engine(batch(0)[0]), fresh.engine(batch(0)[0]))


@pytest.mark.parametrize("name", ["z2x2", "z3x2"])
@in_engine_world
def test_parameters_of_one_flat_tensor(name: str, path: str) -> None:
    """It loads parameters that were stepped one by one: missing state is zero, other steps or settings are refused."""
    plain = build_torch("ddp2", trained, tied=True, dtype=torch.float32, optimizer=lambda named: adamw(dict(named)))
    plain.train(BEFORE)
    states = {"model": plain.model, "optimizer": plain.optimizer, "client": {"step": BEFORE}}
    optimizer = plain.optimizer
    unused = dict(plain.unwrapped.named_parameters())["blocks.0.mlp.up.weight"]
    own_state = optimizer.state.pop(unused)
    bytecheckpoint.save(f"{path}/without", states)
    run = build(name, other)
    run.train(1)
    report = bytecheckpoint.load(f"{path}/without", run.states())
    assert any("begin at zero" in note for note in report.notes), report.notes
    found = full_state(run.engine)
    for slot in ("exp_avg", "exp_avg_sq"):
        assert not found[f"optimizer/state/blocks.0.mlp.up.weight/{slot}"].any(), slot
    optimizer.state[unused] = own_state | {"step": torch.tensor(9.0)}
    bytecheckpoint.save(f"{path}/steps", states)
    with pytest.raises(IncompatibleCheckpointError, match="step differs in the checkpoint"):
        bytecheckpoint.load(f"{path}/steps", build(name, other).states())
    optimizer.state[unused]["step"] = own_state["step"].clone()
    one_group = build(name, other, lambda named: torch.optim.AdamW(named.values()))
    with pytest.raises(IncompatibleCheckpointError, match="settings differ"):
        bytecheckpoint.load(f"{path}/without", one_group.states())


class RowState(torch.optim.SGD):
    """An optimizer with state that is not elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = torch.zeros(3)


class OneBit(torch.optim.SGD):
    """An optimizer from the module of DeepSpeed's compressing ones."""


class Grid:
    """A program's own tensor parallelism."""

    @staticmethod
    def get_tensor_model_parallel_world_size() -> int:
        return 2


def overlapping(optimizer: Any) -> list[list[int]]:
    """Return the offsets of an optimizer with the second parameter of each group one place too early."""
    return [[first, second - 1, *rest] for first, second, *rest in optimizer.round_robin_bit16_offsets]


OneBit.__module__ = "deepspeed.runtime.fp16.onebit.adam"


@on_ranks(2)
def test_refusals(path: str) -> None:
    """Refuse unsupported settings before anything is written."""
    import deepspeed

    two, three = build("b2x2", trained), build("b3x2", trained)

    def refused(states: dict[str, Any], message: str, framework: str = "auto") -> None:
        with pytest.raises(UsageError, match=message):
            bytecheckpoint.save(f"{path}/refused", states, framework=framework)

    base = two.engine.optimizer.optimizer
    refused({"model": two.engine}, "belongs to an engine of DeepSpeed", "torch")
    refused({"model": three.engine.module}, "belongs to an engine of DeepSpeed", "ddp")
    refused({"nested": {"engine": two.engine}}, "inside a container")
    refused({"model": [two.engine]}, "inside a container")
    refused({"optimizer": two.engine.optimizer}, "in none of the modules")
    refused({"model": two.engine.module, "optimizer": base}, "pass engine.optimizer")
    refused({"model": two.engine, "optimizer": three.engine.optimizer}, "is not the optimizer of the engine")
    refused({"model": two.engine, "engine": {"a": 1}}, "choose another")
    of_two, of_three, hybrid = two.engine.optimizer, three.engine.optimizer, type("Hybrid", (type(three.engine),), {})
    for owner, name, value, engine, message in (
        (
            deepspeed,
            "__version__",
            "0.19.6",
            two.engine,
            r"0\.19\.6 is not supported.*install 0\.19\.8",
        ),
        (deepspeed, "__version__", "0.20.1", two.engine, r"0\.20\.1 is not supported"),
        (of_two, "round_robin_bit16_offsets", [[0], [0]], two.engine, "is not built as in the versions.*ValueError"),
        (of_two, "round_robin_bit16_offsets", overlapping(of_two), two.engine, "after the previous one's end"),
        (of_three, "sub_group_to_group_id", {}, three.engine, "is not built as in the versions.*KeyError"),
        (of_two, "offloaded_states", {"x"}, two.engine, "reload_states"),
        (of_two, "zenflow", True, two.engine, "ZenFlow"),
        (of_two, "swap_optimizer", True, two.engine, "NVMe"),
        (of_two, "optimizer", OneBit([nn.Parameter(torch.zeros(1))], lr=1.0), two.engine, "OneBit"),
        (three.engine, "__class__", hybrid, three.engine, "engine of type Hybrid"),
        (three.engine, "mpu", Grid(), three.engine, "tensor-parallel over 2"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            refused({"model": engine}, message)
    rows = build("b2x2", trained, lambda named: RowState(named.values(), lr=0.1))
    rows.train(1)
    refused({"model": rows.engine}, r"rows is a tensor of shape \(3,\), and ZeRO keeps")
    half = build("b2x2", trained, gradient_accumulation_steps=2)
    two.train(1)
    bytecheckpoint.save(f"{path}/step", two.states())
    half.step()
    with pytest.raises(UsageError, match="1 of 2 micro-batches"):
        bytecheckpoint.load(f"{path}/step", half.states())
    assert not os.path.exists(f"{path}/refused") or os.listdir(f"{path}/refused") == []


@pytest.mark.parametrize("name", ["b2x2", "b3x2", "b1x2-own"])
@in_engine_world
def test_master_weights_that_do_not_round_to_the_weights(name: str, path: str) -> None:
    """The first save of an optimizer compares some of them: elsewhere than expected, they would get other names."""
    run = trained_run(name)
    wrapper = run.engine.optimizer
    flats = getattr(wrapper, "fp32_partitioned_groups_flat", None) or getattr(
        wrapper, "single_partition_of_fp32_groups", None
    )
    for flat in flats or wrapper.fp32_groups_flat_partition:
        flat.data.copy_(flat.data.roll(1))
    with pytest.raises(UsageError, match="do not round to the weights"):
        bytecheckpoint.save(path, run.states())
    assert not os.path.exists(path)


@on_ranks(2)
def test_a_layout_can_be_described() -> None:
    found = DeepSpeedFramework().capture(build("b3x2", trained).states())[0]
    assert found.name == "model" and found.layout()["layouts"].keys() == {"ZeRO-3", "plain"}


@pytest.mark.parametrize("name", ["b2x2", "z3x2", "z0x2"])
@in_engine_world
def test_leftovers_of_what_an_engine_stands_for(name: str, path: str) -> None:
    """State of layers that are frozen here is an error, or named in the report."""
    bytecheckpoint.save(path, trained_run(name).states())

    def frozen(parameters: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
        parameters.pop("blocks.0.mlp.up.weight").requires_grad_(False)
        return adamw(parameters)

    run = build(name, other, frozen)
    left = "optimizer/state/blocks.0.mlp.up.weight"
    with pytest.raises(IncompatibleCheckpointError, match=f"{left}/exp_avg"):
        bytecheckpoint.load(path, run.states())
    report = bytecheckpoint.load(path, run.states(), strict=False)
    assert report.unexpected and all(key.startswith(left) for key in report.unexpected), report.unexpected


@on_ranks(2)
def test_a_frozen_parameter_in_a_group(path: str) -> None:
    """Its param group loads into plain AdamW, which has the parameter in its group too."""
    run = trained_run("z2x2")
    bytecheckpoint.save(path, run.states())
    model = Gpt(tied=True)
    model.temperature.requires_grad_(False)
    plain = adamw(dict(model.named_parameters()))
    report = bytecheckpoint.load(path, {"model": model, "optimizer": plain})
    assert list(report.missing) == []
    of_engine, of_plain = (
        [(group["lr"], group["weight_decay"]) for group in groups]
        for groups in (settings(run.engine), plain.param_groups)
    )
    assert of_engine == of_plain


@on_ranks(1)
def test_random_numbers_of_activation_checkpointing(path: str) -> None:
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    def draw() -> float:
        with tracker.fork():
            return torch.rand(()).item()

    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 11)
    bytecheckpoint.save(path, {"rng": bytecheckpoint.rng_state()})
    wanted = draw()
    bytecheckpoint.load(path, {"rng": bytecheckpoint.rng_state()})
    assert draw() == wanted
    bytecheckpoint.load(path, {"rng": bytecheckpoint.rng_state(rank=0, ranks=2)})
    assert draw() != wanted
    tracker.reset()


@on_ranks(2)
def test_the_version_is_the_one_that_is_meant() -> None:
    """`make test-deepspeed-versions` puts others before the pinned one, which is in the environment."""
    import deepspeed

    assert deepspeed.__version__ == os.environ.get("BYTECHECKPOINT_DEEPSPEED", "0.19.8")
