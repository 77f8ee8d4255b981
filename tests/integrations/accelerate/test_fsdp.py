"""Accelerate with FSDP2, on the CPU: losses go on, also at another layout and number of ranks.

Accelerate shards on accelerators only; jobs.py pretends that there are some. FSDP1 then fails: it takes no "cpu:0".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.integrations.accelerate.jobs import Found, Run, joined, run
from tests.support.runs import steps_in
from tests.support.worlds import Worlds

LAYOUTS = {"one": 1, "ddp": 2, "fsdp2": 2}


def options(layout: str) -> dict[str, Any]:
    return {"fsdp": layout == "fsdp2", "split": True, "dropout": 0.0, "every": 8}


def begin(folder: Path, layout: str) -> None:
    job = Run(folder, **{name: value for name, value in options(layout).items() if name != "every"})
    job.train(stop=8, save=lambda step: step == 8)
    job.end()
    assert all(isinstance(w, DTensor) for w in job.model.parameters()) == (layout == "fsdp2")


def go_on(folder: Path, layout: str) -> Found:
    return run(folder, **options(layout))


@pytest.mark.parametrize(
    ("before", "now"),
    [("fsdp2", "fsdp2"), ("fsdp2", "one"), ("one", "fsdp2"), ("ddp", "fsdp2"), ("fsdp2", "ddp")],
)
def test_losses_go_on(worlds: Worlds, tmp_path: Path, before: str, now: str) -> None:
    wanted = joined(worlds.run(1, run, tmp_path / "whole", attached=False, **options("one")))
    worlds.run(LAYOUTS[before], begin, tmp_path / "run", before)
    assert steps_in(tmp_path / "run") == [8]
    got = joined(worlds.run(LAYOUTS[now], go_on, tmp_path / "run", now))
    assert {step: ids for step, (_, ids) in got.items()} == {step: wanted[step][1] for step in (9, 10, 11, 12)}
    assert {step: loss for step, (loss, _) in got.items()} == pytest.approx(
        {step: wanted[step][0] for step in (9, 10, 11, 12)}, rel=1e-5
    )


def scale(folder: Path) -> float:
    """Save and load with a gradient scaler, which accelerate itself has to load before the optimizer of FSDP2."""
    job = Run(folder, fsdp=True)
    job.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    job.train(1, stop=4)
    job.end()
    again = Run(folder, fsdp=True)
    again.accelerator.scaler = torch.amp.GradScaler("cpu")
    again.accelerator.load_state()
    again.end()
    return float(again.accelerator.scaler.get_scale())


def test_a_gradient_scaler(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, scale, tmp_path) == [8.0, 8.0]
