"""The progress of an engine, saves within gradient accumulation, and rare configurations of ZeRO."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from tests.support.comparisons import assert_complete, assert_same
from tests.support.deepspeed_engines import (
    EngineTrainer,
    build,
    full_state,
    in_engine_world,
    other,
    trained,
    trained_run,
)
from tests.support.real_frameworks import AFTER, BEFORE, without_tied_head
from tests.support.tiny_model import SEQUENCES, batch, loss_of
from tests.support.worlds import Worlds, on_ranks

pytestmark = pytest.mark.timeout(300)

PARTS = 2  # micro-batches


def micro_batch(run: EngineTrainer, part: int, *, boundary: bool | None = None) -> None:
    """Run forward and backward of one part of this rank's batch."""
    inputs, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(run.client["step"]))
    if boundary is not None:
        run.engine.set_gradient_accumulation_boundary(boundary)
    loss = loss_of(run.engine(inputs.chunk(PARTS)[part]).float(), targets.chunk(PARTS)[part])
    run.engine.backward(loss)


@pytest.mark.parametrize("name", ["z1x3", "b2x2", "b3x2"])
@in_engine_world
def test_within_an_accumulation_nothing_is_saved_or_loaded(name: str, path: str) -> None:
    """Between steps it is, with each way to mark a step's end."""
    size = SEQUENCES // dist.get_world_size() // PARTS

    def engine(**options: Any) -> EngineTrainer:
        return build(name, trained, train_micro_batch_size_per_gpu=size, gradient_accumulation_steps=PARTS, **options)

    def works(run: EngineTrainer, where: str) -> None:
        bytecheckpoint.save(f"{path}/{where}", run.states())
        bytecheckpoint.load(f"{path}/whole", run.states())

    def refused(run: EngineTrainer, where: str, accumulated: str) -> None:
        message = f"accumulated the gradients of {accumulated}"
        with pytest.raises(UsageError, match=f"{message}.*save between steps"):
            bytecheckpoint.save(f"{path}/{where}", run.states())
        with pytest.raises(UsageError, match=f"{message}.*load between steps"):
            bytecheckpoint.load(f"{path}/whole", run.states())
        assert not os.path.exists(f"{path}/{where}"), os.listdir(f"{path}/{where}")

    counted = engine()
    bytecheckpoint.save(f"{path}/whole", counted.states())
    micro_batch(counted, 0)
    counted.engine.step()
    refused(counted, "counted-within", "1 of 2 micro-batches")
    micro_batch(counted, 1)
    counted.engine.step()
    works(counted, "counted-between")

    bounded = engine()
    micro_batch(bounded, 0, boundary=False)
    refused(bounded, "bounded-within", "some of 2 micro-batches")
    micro_batch(bounded, 1, boundary=True)
    bounded.engine.step()  # once: the engine counts one micro-batch
    assert bounded.engine.micro_steps % PARTS
    works(bounded, "bounded-between")

    unmanaged = engine(managed_gradient_accumulation=False)
    micro_batch(unmanaged, 0)
    refused(unmanaged, "unmanaged-within", "1 micro-batches")
    micro_batch(unmanaged, 1)
    unmanaged.engine.step()
    works(unmanaged, "unmanaged-between")


def scaler_of(run: EngineTrainer) -> Any:
    """Return torch's own gradient scaler."""
    scaler = run.engine.torch_autocast_z0_gradscaler
    return run.engine.optimizer.torch_autocast_gradscaler if scaler is None else scaler


def resume_autocast(name: str, path: str) -> None:
    options = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    run = trained_run(name, **options)
    scaler = scaler_of(run)
    scaler.update(512.0)
    scaler._growth_tracker.fill_(7)
    bytecheckpoint.save(path, run.states())
    fresh = build(name, other, **options)
    bytecheckpoint.load(path, fresh.states())
    saved = scaler.state_dict()
    assert saved["scale"] == 512 and saved["_growth_tracker"] == 7
    assert scaler_of(fresh).state_dict() == saved
    assert fresh.train(AFTER) == run.train(AFTER)


@pytest.mark.parametrize("name", ["z0x2", "z2x2", "z3x2"])
def test_the_scaler_of_torch_autocast(worlds: Worlds, name: str, path: str) -> None:
    worlds.run(2, resume_autocast, name, path)
    worlds.close()  # DeepSpeed leaves autocast switched on in its processes


@on_ranks(2)
def test_partial_offload(path: str) -> None:
    """Another optimizer steps a share of the sub-groups on the accelerator (here, the CPU)."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def start(values: Any) -> EngineTrainer:
        run = build(
            "b3x2-part", values, lambda named: DeepSpeedCPUAdam(list(named.values()), lr=3e-3, weight_decay=0.1)
        )
        wrapper = run.engine.optimizer
        numbers = sorted(wrapper.subgroup_to_device)
        assert len(numbers) > 2 and wrapper.partial_offload == 0.5
        wrapper.subgroup_to_device.update(dict.fromkeys(numbers[: len(numbers) // 2], "accelerator"))
        return run

    run = start(trained)
    run.train(BEFORE)
    steps = [len(o.state) for o in (run.engine.optimizer.optimizer, run.engine.optimizer.backup_optimizer)]
    assert all(steps), f"one optimizer does all: {steps}"
    bytecheckpoint.save(path, run.states())
    after = run.train(AFTER)
    for trains_first in (False, True):
        fresh = start(other)
        if trains_first:
            fresh.train(1)
        assert_complete(bytecheckpoint.load(path, fresh.states()))
        assert fresh.train(AFTER) == after


@on_ranks(4)
def test_secondary_partitions(path: str) -> None:
    """A load drops them: within a node, parameters are gathered from them."""
    run, fresh = trained_run("b3x4-hpz"), build("b3x4-hpz", other)
    assert any(p.ds_secondary_tensor is not None for p in run.engine.module.parameters())
    bytecheckpoint.save(path, run.states())
    expected = without_tied_head(full_state(run.engine))
    after = run.train(AFTER)
    fresh.train(1)
    bytecheckpoint.load(path, fresh.states())
    got = without_tied_head(full_state(fresh.engine))
    assert_same(expected, got)
    assert fresh.train(AFTER) == after
