"""What ranks run in test_progress.py. Each function returns plain data, mostly the problems that it found."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from tests.frameworks.deepspeed.engines import EngineTrainer, build, full_state, other, trained
from tests.frameworks.real_frameworks import AFTER, BEFORE, report_problems, without_tied_head
from tests.support.tiny_model import SEQUENCES, batch, loss_of


def micro_batch(run: EngineTrainer, part: int, parts: int, *, boundary: bool | None = None) -> None:
    """Run forward and backward of one part of this rank's batch."""
    inputs, targets = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(run.client["step"]))
    if boundary is not None:
        run.engine.set_gradient_accumulation_boundary(boundary)
    loss = loss_of(run.engine(inputs.chunk(parts)[part]).float(), targets.chunk(parts)[part])
    run.engine.backward(loss)


def accumulation(engine_name: str, folder: str) -> list[str]:
    """Save and load within steps, which is refused, and between them, with each way to mark a step's end."""
    problems = []
    parts = 2
    size = SEQUENCES // dist.get_world_size() // parts

    def attempt(run: EngineTrainer, name: str, refused: str) -> None:
        for verb in (bytecheckpoint.save, bytecheckpoint.load):
            path = f"{folder}/{name}" if verb is bytecheckpoint.save else f"{folder}/whole"
            if not refused:
                verb(path, run.states())
                continue
            with pytest.raises(
                UsageError, match=f"accumulated the gradients of {refused}.*{verb.__name__} between steps"
            ):
                verb(path, run.states())
        if refused and os.path.exists(f"{folder}/{name}"):
            problems.append(f"{name}: {os.listdir(f'{folder}/{name}')}")

    def engine(**options: Any) -> EngineTrainer:
        return build(
            engine_name, trained, train_micro_batch_size_per_gpu=size, gradient_accumulation_steps=parts, **options
        )

    counted = engine()
    bytecheckpoint.save(f"{folder}/whole", counted.states())
    micro_batch(counted, 0, parts)
    counted.engine.step()
    attempt(counted, "counted-within", "1 of 2 micro-batches")
    micro_batch(counted, 1, parts)
    counted.engine.step()
    attempt(counted, "counted-between", "")

    bounded = engine()
    micro_batch(bounded, 0, parts, boundary=False)
    attempt(bounded, "bounded-within", "some of 2 micro-batches")
    micro_batch(bounded, 1, parts, boundary=True)
    bounded.engine.step()  # once: the engine counts one micro-batch
    assert bounded.engine.micro_steps % parts
    attempt(bounded, "bounded-between", "")

    unmanaged = engine(managed_gradient_accumulation=False)
    micro_batch(unmanaged, 0, parts)
    attempt(unmanaged, "unmanaged-within", "1 micro-batches")
    micro_batch(unmanaged, 1, parts)
    unmanaged.engine.step()
    attempt(unmanaged, "unmanaged-between", "")
    return problems


def autocast(name: str, folder: str) -> list[Any]:
    """Return the state of torch's own gradient scaler, and the losses, before and after a resume."""
    options = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    run = build(name, trained, **options)
    run.train(BEFORE)
    scaler = scaler_of(run)
    scaler.update(512.0)
    scaler._growth_tracker.fill_(7)
    bytecheckpoint.save(f"{folder}/autocast", run.states())
    fresh = build(name, other, **options)
    bytecheckpoint.load(f"{folder}/autocast", fresh.states())
    return [scaler.state_dict(), scaler_of(fresh).state_dict(), run.train(AFTER), fresh.train(AFTER)]


def scaler_of(run: EngineTrainer) -> Any:
    scaler = run.engine.torch_autocast_z0_gradscaler
    return run.engine.optimizer.torch_autocast_gradscaler if scaler is None else scaler


class Sampler:
    """Stands in for DeepSpeed's, which needs an analysis of the data on disk."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"consumed_samples": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class Loader:
    def __init__(self) -> None:
        self.data_sampler = Sampler()


def data_efficiency(folder: str) -> list[Any]:
    """Return the progress of random layer-token dropping, and of a curriculum, of the saved and the loaded run."""
    import numpy as np

    runs = []
    for values in (trained, other):
        run = build("z2x2", values)
        run.engine.random_ltd_enabled = lambda: True
        run.engine.random_ltd_scheduler = Sampler()
        run.engine.curriculum_learning_enabled = lambda: True
        run.engine.training_dataloader = Loader()
        runs.append(run)
    first, second = runs
    first.engine.random_ltd_scheduler.state = {"current_value": 17, "consumed_layer_tokens": 3}
    first.engine.training_dataloader.data_sampler.state = {
        "batch": [3, 1],
        "consumed_samples": 24,
        "current_difficulties": {"seqlen": 8},
        "np_rng_state": ("MT19937", np.arange(624, dtype=np.uint32), 624, 0, 0.0),
    }
    bytecheckpoint.save(f"{folder}/efficiency", first.states())
    bytecheckpoint.load(f"{folder}/efficiency", second.states())
    found = [run.engine.random_ltd_scheduler.state for run in runs]
    samplers = [run.engine.training_dataloader.data_sampler.state for run in runs]
    rng_states = [state.pop("np_rng_state") for state in samplers]
    return [found, samplers, [[str(part) for part in state] + [state[1].dtype] for state in rng_states]]


def partial_offload(folder: str) -> list[str]:
    """Save and load where another optimizer steps a share of the sub-groups on the accelerator (here, the CPU)."""
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
    problems = [] if all(steps) else [f"one optimizer does all: {steps}"]
    bytecheckpoint.save(f"{folder}/part", run.states())
    after = run.train(AFTER)
    for trains_first in (False, True):
        fresh = start(other)
        if trains_first:
            fresh.train(1)
        report = bytecheckpoint.load(f"{folder}/part", fresh.states())
        problems += report_problems(report)
        if fresh.train(AFTER) != after:
            problems.append(f"losses differ, trained first: {trains_first}")
    return problems


def hierarchical(folder: str) -> list[str]:
    """Check that a load drops secondary partitions, from which parameters are gathered within a node."""
    run = build("b3x4-hpz", trained)
    run.train(BEFORE)
    problems = [] if any(p.ds_secondary_tensor is not None for p in run.engine.module.parameters()) else ["no hpZ"]
    bytecheckpoint.save(f"{folder}/hpz", run.states())
    expected = without_tied_head(full_state(run.engine))
    after = run.train(AFTER)
    fresh = build("b3x4-hpz", other)
    fresh.train(1)
    bytecheckpoint.load(f"{folder}/hpz", fresh.states())
    got = without_tied_head(full_state(fresh.engine))
    problems += [key for key in expected if not torch.equal(expected[key], got[key])]
    if fresh.train(AFTER) != after:
        problems.append("losses differ")
    return problems
