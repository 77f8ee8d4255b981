"""The jobs that ranks run in test_fsdp1.py."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.utils._python_dispatch import TorchDispatchMode

import bytecheckpoint
from bytecheckpoint.frameworks.fsdp1.adapter import FSDP1Framework
from tests.distributed.fsdp1_layouts import (
    FSDP1,
    FlatTrainer,
    adagrad,
    build,
    fill_state,
    full_state,
    settings,
    sgd,
    two_groups,
)
from tests.distributed.layouts import Trainer, mesh
from tests.distributed.matrix_jobs import (
    differences,
    report_problems,
    source_values,
    target_values,
    wrong_entries,
)
from tests.distributed.model_jobs import (
    checkpointed_blocks,
    compiled_blocks,
    tied_source_values,
    tied_target_values,
    wrong_names,
)
from tests.support.tiny_model import Gpt, batch, fill_by_coordinates

BEFORE, AFTER = 3, 5
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "two": {"optimizer": two_groups},
    "sgd": {"optimizer": sgd},
    "adagrad": {"optimizer": adagrad},
}


def expected() -> dict[str, Any]:
    """Return the state of coordinates, from one process."""
    plain = build("one", fill_by_coordinates)
    fill_state(plain)
    return full_state(plain)


def save_both(layout: str, folder: str, optimizer: str = "adamw") -> dict[str, Any]:
    """Save a trained state, asynchronously while training goes on, and a state of coordinates."""
    trainer = build(layout, source_values, **OPTIMIZERS[optimizer])
    before = trainer.train(BEFORE)
    handle = bytecheckpoint.save(f"{folder}/trained/{layout}", trainer.states(), async_checkpoint=True)
    after = trainer.train(AFTER)
    handle.result(60)
    if optimizer == "adamw":
        filled = build(layout, fill_by_coordinates)
        fill_state(filled)
        bytecheckpoint.save(f"{folder}/coordinates/{layout}", filled.states())
    return {"before": before, "after": after}


def load_both(layout: str, sources: Sequence[str], folder: str, optimizer: str = "adamw") -> dict[str, dict[str, Any]]:
    """Load what every source saved; return the problems of the state of coordinates and the next losses, by source."""
    want = expected() if optimizer == "adamw" else {}
    found: dict[str, dict[str, Any]] = {}
    for number, source in enumerate(sources):
        losses: list[float] = []
        problems: list[str] = []
        try:
            if optimizer == "adamw":
                fresh = build(layout, target_values)
                report = bytecheckpoint.load(f"{folder}/coordinates/{source}", fresh.states())
                problems += differences(want, full_state(fresh))
                problems += report_problems(report)
                problems += [f"{n}: {s}" for n, s in settings(fresh).items() if s["lr"] != 0.5]
            resumed = build(layout, target_values, **OPTIMIZERS[optimizer])
            if number % 2:
                resumed.step()  # so that state, schedule and counters exist already, with other values
            bytecheckpoint.load(f"{folder}/trained/{source}", resumed.states())
            losses = resumed.train(AFTER)
        except bytecheckpoint.CheckpointError:
            problems = [traceback.format_exc()]
        found[source] = {"problems": problems, "losses": losses}
    return found


def open_all(sources: Sequence[str], folder: str) -> dict[str, list[str]]:
    """Compare every layout's opened state of coordinates with the whole tensors; return problems by source."""
    want = {key: value for key, value in expected().items() if isinstance(value, torch.Tensor)}
    return {source: wrong_entries(f"{folder}/coordinates/{source}", want) for source in sources}


def low_precision(layout: str, path: str) -> list[str]:
    """Shards, state and buffers are saved in float32; the run continues bit for bit, and a plain model loads it."""
    trainer = build(layout, source_values, dtype=torch.float32)
    trainer.train(2)
    bytecheckpoint.save(path, trainer.states())
    after = trainer.train(3)
    wrong = []
    with bytecheckpoint.open(path) as checkpoint:
        for key in checkpoint:
            if (
                key.startswith(("model/", "optimizer/state"))
                and "steps_seen" not in key
                and checkpoint[key].dtype != torch.float32
            ):
                wrong.append(f"{key} is {checkpoint[key].dtype}")
    again = build(layout, target_values, dtype=torch.float32)
    again.step()  # casts buffers, gathers parameters
    bytecheckpoint.load(path, again.states())
    if again.train(3) != after:
        wrong.append("losses differ")
    plain = Gpt()
    report = bytecheckpoint.load(path, {"model": plain})
    wrong += [str(x) for x in (report.missing, report.cast) if x]
    return wrong


# --- communication --------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Records every operation that reaches a process group in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


_CALLS = [
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "broadcast_object_list"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "gather", "gather_object", "all_to_all"),
    *("all_to_all_single", "barrier", "send", "recv", "isend", "irecv", "monitored_barrier", "new_group"),
]


@contextlib.contextmanager
def recorded_communication() -> Iterator[list[str]]:
    """Record communication through torch.distributed: in this thread by operation, in all threads by call."""
    found: list[str] = []

    def record(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found.append(name)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, Collectives() as mode:
        for name in _CALLS:
            original = getattr(dist, name)
            patch.setattr(dist, name, partial(record, name, original))
            patch.setattr(dist.distributed_c10d, name, partial(record, name, original))
        yield found
    found += mode.found


def communication(layout: str, path: str) -> dict[str, list[str]]:
    """Record what captures, saves and loads communicate over process groups, and what FSDP1's own state_dict does."""
    trainer = build(layout, source_values)
    trainer.train(1)
    states = trainer.states()
    bytecheckpoint.save(f"{path}/first", states)  # makes connections of its own
    found = {}
    with recorded_communication() as found["capture"]:
        FSDP1Framework().capture(states)
    with recorded_communication() as found["save"]:
        bytecheckpoint.save(f"{path}/second", states)
    trainer.train(1)
    with recorded_communication() as found["async"]:
        bytecheckpoint.save(f"{path}/third", states, async_checkpoint=True).result(60)
    fresh = build(layout, target_values)
    with recorded_communication() as found["load"]:
        bytecheckpoint.load(f"{path}/third", fresh.states())
    with recorded_communication() as found["FSDP1's own"]:
        FullyShardedDataParallel.full_optim_state_dict(trainer.model, trainer.optimizer)
    return found


# --- states of the module ------------------------------------------------------------------------------


def save_while_gathered(layout: str, how: str, path: str) -> list[str]:
    """Save and load while parameters are gathered after a forward pass without a backward one."""
    undisturbed = build(layout, source_values)
    undisturbed.train(2)
    trainer = build(layout, source_values)
    trainer.train(2)
    _forward(trainer, how)
    bytecheckpoint.save(path, trainer.states())
    fresh = build(layout, target_values)
    _forward(fresh, how)
    bytecheckpoint.load(path, fresh.states())
    wrong = differences(full_state(undisturbed), full_state(fresh))
    if FSDP1[layout].mixed_precision and "grad" in how:
        # FSDP1 itself cannot train on from here under mixed precision, with or without a checkpoint.
        return wrong
    fresh.model.train()
    trainer.model.train()
    losses = undisturbed.train(AFTER)
    assert fresh.train(AFTER) == losses
    assert trainer.train(AFTER) == losses, "the run that saved continues too"
    return wrong


def _forward(trainer: Trainer, how: str) -> None:
    inputs, _ = batch(0)
    trainer.model.train("train" in how)
    with torch.set_grad_enabled("grad" in how):
        trainer.model(inputs)
    handles = [m._handle for m in FullyShardedDataParallel.fsdp_modules(trainer.model) if m._handle is not None]
    gathered = [h for h in handles if not h.needs_unshard()]
    assert gathered, "some parameters are still gathered"


def save_after_failed_forward(layout: str, path: str) -> list[str]:
    """Save in an exception handler, while parameters are gathered; the shards are valid."""
    undisturbed = build(layout, source_values)
    undisturbed.train(2)
    trainer = build(layout, source_values)
    trainer.train(2)

    def fail(*_: object) -> None:
        raise MemoryError("in the middle of a forward pass")

    hook = trainer.unwrapped.norm.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        trainer.model(batch(0)[0])
    hook.remove()
    bytecheckpoint.save(path, trainer.states())
    fresh = build(layout, target_values)
    bytecheckpoint.load(path, fresh.states())
    assert fresh.train(2) == undisturbed.train(2)
    return differences(full_state(undisturbed), full_state(fresh))


def save_inside_summon(layout: str, path: str) -> str:
    """Return the error of a save inside summon_full_params; the next save works."""
    trainer = build(layout, source_values)
    with FullyShardedDataParallel.summon_full_params(trainer.model):
        with pytest.raises(bytecheckpoint.UsageError) as caught:
            bytecheckpoint.save(path, trainer.states())
        with torch.no_grad():
            trainer.unwrapped.norm.weight += 1
    want = full_state(trainer)
    bytecheckpoint.save(path, trainer.states())
    fresh = build(layout, target_values)
    bytecheckpoint.load(path, fresh.states())
    assert differences(want, full_state(fresh)) == []
    return str(caught.value)


def wrapped_names(layout: str, path: str) -> list[str]:
    """Activation checkpointing and torch.compile inside FSDP1, and FSDP1 inside torch.compile."""
    wrapper = checkpointed_blocks if FSDP1[layout].units else compiled_blocks
    trainer = build(layout, fill_by_coordinates, wrap=wrapper)
    names = [name for name, _ in trainer.model.named_modules()]
    assert any("_checkpoint_wrapped_module" in name for name in names)
    states = {"model": torch.compile(trainer.model, backend="eager")}
    bytecheckpoint.save(path, states)
    wrong = wrong_names(path)
    fresh = build(layout, target_values, wrap=wrapper)
    bytecheckpoint.load(path, {"model": fresh.model})
    return wrong + differences(full_state(trainer), full_state(fresh))


def save_and_load_tied(layout: str, folder: str, sources: Sequence[str]) -> dict[str, Any]:
    """Save a tied model, and load what the sources saved; return losses by source, and under "" without a load."""
    trainer = build(layout, tied_source_values, tied=True)
    trainer.train(2)
    bytecheckpoint.save(f"{folder}/{layout}", trainer.states())
    found: dict[str, Any] = {"": trainer.train(3)}
    for source in sources:
        fresh = build(layout, tied_target_values, tied=True)
        bytecheckpoint.load(f"{folder}/{source}", fresh.states())
        found[source] = fresh.train(3)
    return found


def steps_by_name(source: str, layout: str, path: str) -> list[str]:
    """Save and load a step and settings of its own for every parameter; return problems."""
    plain = build("one", fill_by_coordinates, optimizer=two_groups)
    fill_state(plain, named_steps=True)
    want = full_state(plain)
    filled = build(source, fill_by_coordinates, optimizer=two_groups)
    fill_state(filled, named_steps=True)
    bytecheckpoint.save(f"{path}/1", filled.states())
    fresh = build(layout, target_values, optimizer=two_groups)
    bytecheckpoint.load(f"{path}/1", fresh.states())
    bytecheckpoint.save(f"{path}/2", fresh.states())
    wrong = []
    for number in (1, 2):
        wrong += [f"{number}: {key}" for key in wrong_entries(f"{path}/{number}", want)]
    for name, group in settings(fresh).items():
        expected = (1.5, 0.0) if name.endswith("bias") or "norm" in name else (0.5, 0.1)
        if (group["lr"], group["weight_decay"]) != expected:
            wrong.append(f"{name}: {group}")
    return wrong


def prepare_and_save(layout: str, path: str) -> dict[str, Any]:
    """Call `prepare` before the first save, then save repeatedly with the cached plan."""
    trainer = build(layout, source_values)
    trainer.train(1)
    bytecheckpoint.prepare(trainer.states()).result(60)
    reports = []
    for _ in range(3):
        handle = bytecheckpoint.save(path, trainer.states(), async_checkpoint=True)
        want = full_state(trainer)
        trainer.train(1)
        reports.append(handle.result(60))
    fresh = build(layout, target_values)
    report = bytecheckpoint.load(path, fresh.states())
    return {
        "cached": [r.plan_cached for r in reports],
        "wrong": differences(want, full_state(fresh)),
        "report": report_problems(report),
    }


def load_different_steps(path: str, source: str, layout: str) -> str:
    """Return the error of loading a flat parameter whose parameters have different steps in the checkpoint."""
    trainer = build(source, source_values)
    trainer.train(1)
    state = trainer.optimizer.state[trainer.parameters()["norm.weight"]]
    if state:
        state["step"] += 3
    bytecheckpoint.save(path, trainer.states())
    dist.barrier()
    fresh = build(layout, target_values)
    with pytest.raises(bytecheckpoint.IncompatibleCheckpointError) as caught:
        bytecheckpoint.load(path, fresh.states())
    assert isinstance(fresh, FlatTrainer) and not fresh.optimizer.state
    return str(caught.value)


def hybrid_with_process_groups(path: str) -> list[str]:
    """Save and load HYBRID_SHARD with process groups instead of a mesh, in units inside the root unit."""
    both = mesh(replicate=2, shard=2)
    groups = (both.get_group(1), both.get_group(0))
    model = Gpt().double()
    fill_by_coordinates(model)
    options: dict[str, Any] = {
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
    }
    for block in model.blocks.values():
        block.attention = FullyShardedDataParallel(block.attention, process_group=groups, **options)
    root = FullyShardedDataParallel(model, process_group=groups, **options)
    report = bytecheckpoint.save(path, {"model": root}).result()
    size = sum(t.numel() * t.element_size() for t in Gpt().double().state_dict().values())
    plain = Gpt().double()
    bytecheckpoint.load(path, {"model": plain})
    want = Gpt().double()
    fill_by_coordinates(want)
    wrong = [n for n, t in plain.state_dict().items() if not torch.equal(t, want.state_dict()[n])]
    written = torch.tensor(float(report.bytes_written))
    dist.all_reduce(written)
    if not size <= written < 1.2 * size + 100_000:
        wrong.append(f"{written} bytes written of {size}")
    return wrong


def load_into_another_dtype(source: str, layout: str, path: str) -> list[str]:
    """Load float64 into float32: refused by name without `cast=True`."""
    bytecheckpoint.save(path, {"model": build(source, fill_by_coordinates).model})
    fresh = build(layout, target_values, dtype=torch.float32)
    with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match=r"is float64 .* and float32 here"):
        bytecheckpoint.load(path, {"model": fresh.model})
    report = bytecheckpoint.load(path, {"model": fresh.model}, cast=True)
    want = {k: v.float() if v.is_floating_point() else v for k, v in expected().items() if k.startswith("model/")}
    got = {k: v for k, v in full_state(fresh).items() if k.startswith("model/")}
    return differences(want, got) + ([] if report.cast else ["no cast is reported"])


def module_with_extra_state(path: str) -> list[str]:
    """Save and load an extra state beside flat parameters."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 5)
            self.calls = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    inner = Counting()
    inner.calls = 4
    model = FullyShardedDataParallel(inner, device_id=torch.device("cpu"))
    bytecheckpoint.save(path, {"model": model})
    inner.calls = 0
    bytecheckpoint.load(path, {"model": model})
    return [] if inner.calls == 4 else [f"calls: {inner.calls}"]
