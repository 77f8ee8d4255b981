"""Training runs of a `CheckpointManager`: their steps, and how they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bytecheckpoint import CheckpointManager
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.manager import Retention
from tests.support.faulty_storage import Faults
from tests.support.processes import ROOT, environment, python, wait_until

__all__ = ["Run", "die_in_commit", "eventually", "kill_demo", "numbers", "save_steps", "steps_in"]


class Run:
    """A run whose weights hold its step; each rank holds its own part of them."""

    def __init__(self, collective: Collective | None = None) -> None:
        self.rank = collective.rank if collective else 0
        self.weights = torch.zeros(50)
        self.progress = {"step": 0}

    def states(self) -> dict[str, Any]:
        return {"model": {f"part_{self.rank}": self.weights}, "progress": self.progress}

    def step(self) -> int:
        self.weights += 1
        self.progress["step"] += 1
        return self.progress["step"]

    def check(self, step: int) -> None:
        assert self.progress["step"] == step and torch.equal(self.weights, torch.full((50,), float(step)))


def numbers(manager: CheckpointManager) -> list[int]:
    """Return the committed steps of a manager's run."""
    return [info.step for info in manager.steps()]


def eventually(manager: CheckpointManager, wanted: list[int]) -> None:
    """Wait for the deletions in the background."""
    for _ in range(500):
        if numbers(manager) == wanted:
            return
        time.sleep(0.01)
    assert numbers(manager) == wanted


def save_steps(
    root: Path | str,
    *steps: int,
    metrics: dict[str, Any] | None = None,
    restore: bool = False,
    keep: Any = None,
    **options: Any,
) -> None:
    """Save steps of a run by a manager that deletes at once."""
    run = Run()
    retention = keep if isinstance(keep, Retention) else Retention(keep, grace=0)
    with CheckpointManager(root, run.states(), keep=retention, **options) as manager:
        if restore:
            manager.restore_latest()
        for step in steps:
            run.weights.fill_(step)
            run.progress["step"] = step
            manager.save(step, metrics).result(60)


def steps_in(root: Path) -> list[int]:
    """Return the committed steps of the run in a local folder."""
    return sorted(int(path.parent.name.removeprefix("step_")) for path in root.glob("step_*/metadata.parquet"))


def die_in_commit(number: int, train: Callable[[], object]) -> None:
    """Train, and die when the catalog of the save with this number is about to be published."""
    with pytest.MonkeyPatch.context() as patch:
        Faults().install(patch).add(
            "publish", name="metadata.parquet", skip=number - 1, before=lambda: os.kill(os.getpid(), signal.SIGKILL)
        )
        train()
    raise AssertionError("no save was killed")


def kill_demo(program: str, run: Path, steps: int) -> None:
    """Start a program of demo/ on two ranks of torchrun, and kill all of it after its first commit."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    job: subprocess.Popen[Any] = subprocess.Popen(
        python(*launch, ROOT / "demo" / program, run, steps), env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert wait_until(lambda: bool(steps_in(run)), 300)
    for process in [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]:
        process.kill()
    assert job.wait() == -signal.SIGKILL
    killed_at = steps_in(run)
    assert killed_at and killed_at[-1] < steps
