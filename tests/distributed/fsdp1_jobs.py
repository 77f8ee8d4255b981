"""What ranks run in test_fsdp1.py."""

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
    settings,
    sgd,
    two_groups,
    whole,
)
from tests.distributed.layouts import Trainer, mesh
from tests.distributed.matrix_jobs import coordinates, differences, other, trained
from tests.distributed.model_jobs import checkpointed_blocks, compiled_blocks, same_names, tied_other, tied_values
from tests.support.tiny_model import Gpt, batch

BEFORE, AFTER = 3, 5
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "two": {"optimizer": two_groups},
    "sgd": {"optimizer": sgd},
    "adagrad": {"optimizer": adagrad},
}


def expected() -> dict[str, Any]:
    """The state of coordinates, from one process."""
    plain = build("one", coordinates)
    fill_state(plain)
    return whole(plain)


def save_both(layout: str, folder: str, optimizer: str = "adamw") -> dict[str, Any]:
    """Save a trained state, asynchronously while training goes on, and a state of coordinates."""
    trainer = build(layout, trained, **OPTIMIZERS[optimizer])
    before = trainer.train(BEFORE)
    handle = bytecheckpoint.save(f"{folder}/trained/{layout}", trainer.states(), async_checkpoint=True)
    after = trainer.train(AFTER)
    handle.result(60)
    if optimizer == "adamw":
        filled = build(layout, coordinates)
        fill_state(filled)
        bytecheckpoint.save(f"{folder}/coordinates/{layout}", filled.states())
    return {"before": before, "after": after}


def load_both(layout: str, sources: Sequence[str], folder: str, optimizer: str = "adamw") -> dict[str, dict[str, Any]]:
    """Per source: what is wrong in the state of coordinates, and the losses after loading the trained one."""
    want = expected() if optimizer == "adamw" else {}
    found: dict[str, dict[str, Any]] = {}
    for number, source in enumerate(sources):
        losses: list[float] = []
        problems: list[str] = []
        try:
            if optimizer == "adamw":
                fresh = build(layout, other)
                report = bytecheckpoint.load(f"{folder}/coordinates/{source}", fresh.states())
                problems += differences(want, whole(fresh))
                problems += [f"{n}: {x}" for n in ("missing", "unexpected", "cast") if (x := getattr(report, n))]
                problems += [f"{n}: {s}" for n, s in settings(fresh).items() if s["lr"] != 0.5]
            resumed = build(layout, other, **OPTIMIZERS[optimizer])
            if number % 2:
                resumed.step()  # so that state, schedule and counters are there already, and wrong
            bytecheckpoint.load(f"{folder}/trained/{source}", resumed.states())
            losses = resumed.train(AFTER)
        except bytecheckpoint.CheckpointError:
            problems = [traceback.format_exc()]
        found[source] = {"problems": problems, "losses": losses}
    return found


def open_all(sources: Sequence[str], folder: str) -> dict[str, list[str]]:
    """Compare what `open` shows of every state of coordinates with the whole tensors; problems by source."""
    want = {key: value for key, value in expected().items() if isinstance(value, torch.Tensor)}
    found = {}
    for source in sources:
        with bytecheckpoint.open(f"{folder}/coordinates/{source}") as checkpoint:
            found[source] = [
                key for key in want if key not in checkpoint or not torch.equal(checkpoint[key][...], want[key])
            ]
    return found


def low_precision(layout: str, path: str) -> list[str]:
    """Shards, state and buffers are float32 in the checkpoint; the run goes on bit for bit, and fits a plain model."""
    trainer = build(layout, trained, dtype=torch.float32)
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
    again = build(layout, other, dtype=torch.float32)
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
    """Counts every operation that reaches a process group in this thread; and, by name, calls of torch.distributed."""

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
def counted() -> Iterator[list[str]]:
    """What is communicated through torch.distributed meanwhile: in this thread by operation, in all threads by call."""
    found: list[str] = []

    def noted(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found.append(name)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, Collectives() as mode:
        for name in _CALLS:
            original = getattr(dist, name)
            patch.setattr(dist, name, partial(noted, name, original))
            patch.setattr(dist.distributed_c10d, name, partial(noted, name, original))
        yield found
    found += mode.found


def communication(layout: str, path: str) -> dict[str, list[str]]:
    """What a capture, a synchronous and an asynchronous save communicate over process groups; and FSDP1's own way."""
    trainer = build(layout, trained)
    trainer.train(1)
    states = trainer.states()
    bytecheckpoint.save(f"{path}/first", states)  # makes connections of its own
    found = {}
    with counted() as found["capture"]:
        FSDP1Framework().capture(states)
    with counted() as found["save"]:
        bytecheckpoint.save(f"{path}/second", states)
    trainer.train(1)
    with counted() as found["async"]:
        bytecheckpoint.save(f"{path}/third", states, async_checkpoint=True).result(60)
    fresh = build(layout, other)
    with counted() as found["load"]:
        bytecheckpoint.load(f"{path}/third", fresh.states())
    with counted() as found["own way"]:
        FullyShardedDataParallel.full_optim_state_dict(trainer.model, trainer.optimizer)
    return found


# --- what state the module is in ------------------------------------------------------------------------------


def gathered(layout: str, how: str, path: str) -> list[str]:
    """Save and load while parameters are gathered after a forward pass without a backward one."""
    undisturbed = build(layout, trained)
    undisturbed.train(2)
    trainer = build(layout, trained)
    trainer.train(2)
    _forward(trainer, how)
    bytecheckpoint.save(path, trainer.states())
    fresh = build(layout, other)
    _forward(fresh, how)
    bytecheckpoint.load(path, fresh.states())
    wrong = differences(whole(undisturbed), whole(fresh))
    if FSDP1[layout].low and "grad" in how:
        # FSDP1 itself cannot train on from here under mixed precision, with or without a checkpoint.
        return wrong
    fresh.model.train()
    trainer.model.train()
    losses = undisturbed.train(AFTER)
    assert fresh.train(AFTER) == losses
    assert trainer.train(AFTER) == losses, "the one that was saved goes on too"
    return wrong


def _forward(trainer: Trainer, how: str) -> None:
    inputs, _ = batch(0)
    trainer.model.train("train" in how)
    with torch.set_grad_enabled("grad" in how):
        trainer.model(inputs)
    handles = [m._handle for m in FullyShardedDataParallel.fsdp_modules(trainer.model) if m._handle is not None]
    whole_ones = [h for h in handles if not h.needs_unshard()]
    assert whole_ones, "something is gathered still"


def after_a_failed_forward(layout: str, path: str) -> list[str]:
    """An emergency save in an exception's handler: parameters are gathered, the shards are sound."""
    undisturbed = build(layout, trained)
    undisturbed.train(2)
    trainer = build(layout, trained)
    trainer.train(2)

    def fail(*_: object) -> None:
        raise MemoryError("in the middle of a forward pass")

    hook = trainer.bare.norm.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        trainer.model(batch(0)[0])
    hook.remove()
    bytecheckpoint.save(path, trainer.states())
    fresh = build(layout, other)
    bytecheckpoint.load(path, fresh.states())
    assert fresh.train(2) == undisturbed.train(2)
    return differences(whole(undisturbed), whole(fresh))


def summoned(layout: str, path: str) -> str:
    """The message of a save inside summon_full_params; the next save works."""
    trainer = build(layout, trained)
    with FullyShardedDataParallel.summon_full_params(trainer.model):
        with pytest.raises(bytecheckpoint.UsageError) as caught:
            bytecheckpoint.save(path, trainer.states())
        with torch.no_grad():
            trainer.bare.norm.weight += 1
    want = whole(trainer)
    bytecheckpoint.save(path, trainer.states())
    fresh = build(layout, other)
    bytecheckpoint.load(path, fresh.states())
    assert differences(want, whole(fresh)) == []
    return str(caught.value)


def wrapped_names(layout: str, path: str) -> list[str]:
    """Activation checkpointing and torch.compile inside FSDP1, and FSDP1 inside torch.compile."""
    wrapper = checkpointed_blocks if FSDP1[layout].units else compiled_blocks
    trainer = build(layout, coordinates, wrapped=wrapper)
    names = [name for name, _ in trainer.model.named_modules()]
    assert any("_checkpoint_wrapped_module" in name for name in names)
    states = {"model": torch.compile(trainer.model, backend="eager")}
    bytecheckpoint.save(path, states)
    wrong = same_names(path)
    fresh = build(layout, other, wrapped=wrapper)
    bytecheckpoint.load(path, {"model": fresh.model})
    return wrong + differences(whole(trainer), whole(fresh))


def tied(layout: str, folder: str, sources: Sequence[str]) -> dict[str, Any]:
    """Save a tied model; load what the sources saved. Losses by source, "" for the undisturbed run."""
    trainer = build(layout, tied_values, tied=True)
    trainer.train(2)
    bytecheckpoint.save(f"{folder}/{layout}", trainer.states())
    found: dict[str, Any] = {"": trainer.train(3)}
    for source in sources:
        fresh = build(layout, tied_other, tied=True)
        bytecheckpoint.load(f"{folder}/{source}", fresh.states())
        found[source] = fresh.train(3)
    return found


def steps_by_name(source: str, layout: str, path: str) -> list[str]:
    """Every parameter's own step and settings arrive with it."""
    plain = build("one", coordinates, optimizer=two_groups)
    fill_state(plain, named_steps=True)
    want = whole(plain)
    filled = build(source, coordinates, optimizer=two_groups)
    fill_state(filled, named_steps=True)
    bytecheckpoint.save(f"{path}/1", filled.states())
    fresh = build(layout, other, optimizer=two_groups)
    bytecheckpoint.load(f"{path}/1", fresh.states())
    bytecheckpoint.save(f"{path}/2", fresh.states())
    wrong = []
    for number in (1, 2):
        with bytecheckpoint.open(f"{path}/{number}") as checkpoint:
            wrong += [f"{number}: {k}" for k, v in want.items() if not torch.equal(checkpoint[k][...], v)]
    for name, group in settings(fresh).items():
        expected = (1.5, 0.0) if name.endswith("bias") or "norm" in name else (0.5, 0.1)
        if (group["lr"], group["weight_decay"]) != expected:
            wrong.append(f"{name}: {group}")
    return wrong


def prepared(layout: str, path: str) -> dict[str, Any]:
    """`prepare` before the first step, and saves that hit the plan."""
    trainer = build(layout, trained)
    trainer.train(1)
    bytecheckpoint.prepare(trainer.states()).result(60)
    reports = []
    for _ in range(3):
        handle = bytecheckpoint.save(path, trainer.states(), async_checkpoint=True)
        want = whole(trainer)
        trainer.train(1)
        reports.append(handle.result(60))
    fresh = build(layout, other)
    report = bytecheckpoint.load(path, fresh.states())
    return {
        "cached": [r.plan_cached for r in reports],
        "wrong": differences(want, whole(fresh)),
        "lists": [report.missing, report.unexpected, report.cast],
    }


def with_an_unused_parameter(path: str, source: str, layout: str) -> str:
    """What a flat parameter says to a checkpoint in which one of its parameters was stepped less often."""
    trainer = build(source, trained)
    trainer.train(1)
    state = trainer.optimizer.state[trainer.parameters()["norm.weight"]]
    if state:
        state["step"] += 3
    bytecheckpoint.save(path, trainer.states())
    dist.barrier()
    fresh = build(layout, other)
    with pytest.raises(bytecheckpoint.IncompatibleCheckpointError) as caught:
        bytecheckpoint.load(path, fresh.states())
    assert isinstance(fresh, FlatTrainer) and not fresh.optimizer.state
    return str(caught.value)


def hybrid_with_groups(path: str) -> list[str]:
    """HYBRID_SHARD with process groups instead of a mesh, and sharding within units that differ from the root's."""
    both = mesh(replicate=2, shard=2)
    groups = (both.get_group(1), both.get_group(0))
    model = Gpt().double()
    coordinates(model)
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
    coordinates(want)
    wrong = [n for n, t in plain.state_dict().items() if not torch.equal(t, want.state_dict()[n])]
    written = torch.tensor(float(report.bytes_written))
    dist.all_reduce(written)
    if not size <= written < 1.2 * size + 100_000:
        wrong.append(f"{written} bytes written of {size}")
    return wrong


def into_another_dtype(source: str, layout: str, path: str) -> list[str]:
    """float64 into float32: refused by name, unless a cast is asked for."""
    bytecheckpoint.save(path, {"model": build(source, coordinates).model})
    fresh = build(layout, other, dtype=torch.float32)
    with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match=r"is float64 .* and float32 here"):
        bytecheckpoint.load(path, {"model": fresh.model})
    report = bytecheckpoint.load(path, {"model": fresh.model}, cast=True)
    want = {k: v.float() if v.is_floating_point() else v for k, v in expected().items() if k.startswith("model/")}
    got = {k: v for k, v in whole(fresh).items() if k.startswith("model/")}
    return differences(want, got) + ([] if report.cast else ["no cast is reported"])


def module_with_rare_parts(path: str) -> list[str]:
    """Extra states and a non-persistent buffer beside flat parameters, over real ranks."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 5)
            self.calls = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    made = Counting()
    made.calls = 4
    model = FullyShardedDataParallel(made, device_id=torch.device("cpu"))
    bytecheckpoint.save(path, {"model": model})
    made.calls = 0
    bytecheckpoint.load(path, {"model": model})
    return [] if made.calls == 4 else [f"calls: {made.calls}"]
