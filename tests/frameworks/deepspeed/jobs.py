"""What ranks run in the tests of DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch

from tests.distributed.fsdp1_layouts import build as build_torch
from tests.distributed.fsdp1_layouts import whole as whole_torch
from tests.distributed.layouts import Trainer
from tests.frameworks.deepspeed.engines import OPTIMIZERS, EngineTrainer, whole

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


def whole_of(run: Any) -> dict[str, Any]:
    found = whole(run.engine) if isinstance(run, EngineTrainer) else whole_torch(run.trainer)
    found.pop("model/head.weight", None)  # tied to embed.weight
    found.pop("optimizer/state/head.weight/step", None)
    return {key: value for key, value in found.items() if value is not None and "/head.weight" not in key}


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
