"""What ranks run in the tests of DeepSpeed."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import bytecheckpoint
from tests.distributed.fsdp1_layouts import build as build_torch
from tests.distributed.fsdp1_layouts import whole as whole_torch
from tests.distributed.layouts import Trainer
from tests.frameworks.deepspeed.engines import ENGINES, OPTIMIZERS, EngineTrainer, build, other, trained, whole

BEFORE, AFTER = 3, 5


class TorchRun:
    """A run without DeepSpeed, with the same optimizer."""

    def __init__(self, name: str, values: Any, optimizer: str) -> None:
        self.trainer: Trainer = build_torch(
            name, values, tied=True, dtype=torch.float32, optimizer=lambda named: OPTIMIZERS[optimizer](dict(named))
        )
        self.client = {"step": 0}

    def states(self) -> dict[str, Any]:
        t = self.trainer
        return {"model": t.model, "optimizer": t.optimizer, "client": self.client}

    def train(self, steps: int) -> list[float]:
        self.trainer.extra["step"] = self.client["step"]
        losses = self.trainer.train(steps)
        self.client["step"] += steps
        return losses


def run_of(name: str, values: Any, optimizer: str) -> Any:
    return build(name, values, optimizer) if name in ENGINES else TorchRun(name, values, optimizer)


def whole_of(run: Any) -> dict[str, Any]:
    found = whole(run.engine) if isinstance(run, EngineTrainer) else whole_torch(run.trainer)
    found.pop("model/head.weight", None)  # tied to embed.weight
    found.pop("optimizer/state/head.weight/step", None)
    return {key: value for key, value in found.items() if value is not None and "/head.weight" not in key}


def save(name: str, folder: str, optimizer: str) -> dict[str, Any]:
    """Train, save while training goes on, and leave the whole of what was saved beside it."""
    run = run_of(name, trained, optimizer)
    before = run.train(BEFORE)
    expected = whole_of(run)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(expected, f"{folder}/{name}.pt")
    handle = bytecheckpoint.save(f"{folder}/{name}", run.states(), async_checkpoint=True)
    after = run.train(AFTER)
    handle.result(60)
    return {"before": before, "after": after}


def load(name: str, sources: Sequence[str], folder: str, optimizer: str) -> dict[str, dict[str, Any]]:
    """Load what every source saved; per source: what is wrong, and the losses that follow."""
    found: dict[str, dict[str, Any]] = {}
    for number, source in enumerate(sources):
        losses: list[float] = []
        try:
            run = run_of(name, other, optimizer)
            if number % 2:
                run.train(1)  # so that state, schedule and counters are there already, and wrong
            # Buffers and frozen parameters of a low-precision engine are in low precision.
            cast = precision(source) != precision(name)
            report = bytecheckpoint.load(f"{folder}/{source}", run.states(), cast=cast)
            problems = [f"{n}: {x}" for n in ("missing", "unexpected") if (x := getattr(report, n))]
            undivided = {f"model/{n}" for n in ("positions", "temperature")}
            problems += [f"cast {key}" for key in report.cast if key not in undivided]
            problems += differences(torch.load(f"{folder}/{source}.pt"), whole_of(run))
            if isinstance(run, EngineTrainer) and source in ENGINES and run.engine.global_steps != BEFORE:
                problems.append(f"{run.engine.global_steps} steps")
            losses = run.train(AFTER)
        except bytecheckpoint.CheckpointError:
            problems = [traceback.format_exc()]
        found[source] = {"problems": problems, "losses": losses}
    return found


def precision(name: str) -> str:
    return ENGINES[name].low if name in ENGINES else ""


def differences(saved: dict[str, Any], loaded: dict[str, Any]) -> list[str]:
    """What a load has not made of what was saved, bit for bit.

    A parameter in full precision is the master weight that was saved; one in low precision is the master rounded.
    """
    wrong = []
    for key, got in loaded.items():
        kind, _, rest = key.partition("/")
        fqn = rest if kind == "model" else rest.removeprefix("state/").rpartition("/")[0]
        want = saved.get(key)
        exact = saved.get(f"optimizer/state/{fqn}/master", saved.get(f"model/{fqn}"))
        if (kind == "model" and want.dtype != got.dtype) or key.endswith("/master"):
            want = exact.to(got.dtype)
        if want is None:
            wrong.append(f"{key} is there")
        elif want.dtype != got.dtype or not torch.equal(want, got):
            wrong.append(f"{key}: {got} instead of {want}")
    gone = {key for key in saved.keys() - loaded.keys() if not key.endswith("/master")}
    return wrong + [f"{key} is not there" for key in sorted(gone)]


def model_of(engine: Any) -> nn.Module:
    found: nn.Module = engine.module
    return found
