"""FSDP1 over real ranks: gathered parameters, wrappers, tied weights, dtypes, steps, and what is communicated."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import bytecheckpoint
from bytecheckpoint.frameworks.fsdp1.adapter import FSDP1Framework
from tests.support.communication import check_no_communication
from tests.support.comparisons import assert_complete, assert_same, wrong_entries
from tests.support.fsdp1_layouts import FSDP1, build, full_state, in_layout
from tests.support.tiny_model import Gpt, batch, fill_by_coordinates, source_values, target_values
from tests.support.torch_layouts import Trainer, mesh
from tests.support.torch_layouts import adamw as two_groups
from tests.support.variants import crossed, quick
from tests.support.worlds import on_ranks

pytestmark = pytest.mark.timeout(400)

AFTER = 3  # steps whose losses are compared


def trained(layout: str, steps: int = 2) -> Trainer:
    trainer = build(layout, source_values)
    trainer.train(steps)
    return trainer


@cache
def undisturbed(layout: str) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """Return the full state of a trained run, the losses that follow, and the state after those; computed once."""
    trainer = trained(layout)
    return full_state(trainer), trainer.train(AFTER), full_state(trainer)


@pytest.mark.parametrize("layout", ["low2-orig", "low3-flat"])
@in_layout
def test_mixed_precision(layout: str, path: str) -> None:
    """Shards, state and buffers are saved in float32; the run continues bit for bit, and a plain model loads it."""
    trainer = build(layout, source_values, dtype=torch.float32)
    trainer.train(2)
    bytecheckpoint.save(path, trainer.states())
    after = trainer.train(3)
    with bytecheckpoint.open(path) as checkpoint:
        for key in checkpoint:
            if key.startswith(("model/", "optimizer/state")) and "steps_seen" not in key:
                assert checkpoint[key].dtype == torch.float32, key
    again = build(layout, target_values, dtype=torch.float32)
    again.step()  # casts buffers, gathers parameters
    bytecheckpoint.load(path, again.states())
    assert again.train(3) == after
    assert_complete(bytecheckpoint.load(path, {"model": Gpt()}), ("missing", "cast"))


@pytest.mark.parametrize("layout", quick(["full4-orig", "hybrid4-flat", "full3-flat"], every=2))
@in_layout
def test_nothing_is_communicated_over_process_groups(layout: str, path: str) -> None:
    def own_state_dict(trainer: Trainer) -> None:
        FullyShardedDataParallel.full_optim_state_dict(trainer.model, trainer.optimizer)

    check_no_communication(FSDP1Framework(), lambda: build(layout, source_values), path, own_state_dict)


# --- states of the module ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "how"),
    crossed(
        ["full4-orig", "full3-flat", "grad2-flat", "grad3-orig", "low2-orig", "low3-flat"],
        ["evaluation", "evaluation with grad", "train with grad"],
    ),
)
@in_layout
def test_parameters_that_are_still_gathered(layout: str, how: str, path: str) -> None:
    """Save and load after a forward pass without a backward one."""

    def forward(trainer: Trainer) -> None:
        trainer.model.train("train" in how)
        with torch.set_grad_enabled("grad" in how):
            trainer.model(batch(0)[0])
        handles = [m._handle for m in FullyShardedDataParallel.fsdp_modules(trainer.model) if m._handle is not None]
        assert any(not h.needs_unshard() for h in handles), "some parameters are still gathered"

    state, losses, _ = undisturbed(layout)
    trainer, fresh = trained(layout), build(layout, target_values)
    forward(trainer)
    bytecheckpoint.save(path, trainer.states())
    forward(fresh)
    bytecheckpoint.load(path, fresh.states())
    assert_same(state, full_state(fresh))
    if FSDP1[layout].mixed_precision and "grad" in how:
        return  # FSDP1 itself cannot train on from here under mixed precision, with or without a checkpoint
    fresh.model.train()
    trainer.model.train()
    assert fresh.train(AFTER) == losses
    assert trainer.train(AFTER) == losses, "the run that saved continues too"


@pytest.mark.parametrize("layout", quick(["full2-deep", "low2-orig", "grad2-flat", "none2-orig"], every=2))
@in_layout
def test_a_save_after_a_failed_forward_pass(layout: str, path: str) -> None:
    """In an exception handler parameters are gathered, and the shards are valid."""

    def fail(*_: object) -> None:
        raise MemoryError("in the middle of a forward pass")

    _, losses, last = undisturbed(layout)
    trainer, fresh = trained(layout), build(layout, target_values)
    hook = trainer.unwrapped.norm.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        trainer.model(batch(0)[0])
    hook.remove()
    bytecheckpoint.save(path, trainer.states())
    bytecheckpoint.load(path, fresh.states())
    assert fresh.train(AFTER) == losses
    assert_same(last, full_state(fresh))


@on_ranks(4)
def test_hybrid_sharding_by_groups_writes_everything_once(path: str) -> None:
    """HYBRID_SHARD with process groups instead of a mesh, in units inside the root unit."""
    both = mesh(replicate=2, shard=2)
    options: dict[str, Any] = {
        "process_group": (both.get_group(1), both.get_group(0)),
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
    }
    model, plain, expected = (Gpt().double() for _ in range(3))
    fill_by_coordinates(model)
    fill_by_coordinates(expected)
    for block in model.blocks.values():
        block.attention = FullyShardedDataParallel(block.attention, **options)
    report = bytecheckpoint.save(path, {"model": FullyShardedDataParallel(model, **options)}).result()
    bytecheckpoint.load(path, {"model": plain})
    assert_same(expected.state_dict(), plain.state_dict())
    size = sum(t.nbytes for t in expected.state_dict().values())
    written = torch.tensor(float(report.bytes_written))
    dist.all_reduce(written)
    assert size <= written < 1.2 * size + 100_000, f"{written} bytes written of {size}"


# --- steps, settings, dtypes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "target"),
    quick([("grad3-orig", "fsdp3"), ("full4-orig", "full4-orig"), ("fsdp3", "grad3-orig")], every=3),
)
@in_layout
def test_steps_and_settings_by_name(layout: str, target: str, path: str) -> None:
    """Save and load a step and settings of its own for every parameter."""
    plain, filled = (build(name, fill_by_coordinates, optimizer=two_groups) for name in ("one", layout))
    fresh = build(target, target_values, optimizer=two_groups)
    plain.fill_optimizer()
    filled.fill_optimizer()
    bytecheckpoint.save(f"{path}/1", filled.states())
    bytecheckpoint.load(f"{path}/1", fresh.states())
    bytecheckpoint.save(f"{path}/2", fresh.states())
    expected = full_state(plain)
    for number in (1, 2):
        assert wrong_entries(f"{path}/{number}", expected) == []
    for name, group in fresh.settings().items():
        settings = (1.5, 0.0) if name.endswith("bias") or "norm" in name else (0.5, 0.1)
        assert (group["lr"], group["weight_decay"]) == settings, name
