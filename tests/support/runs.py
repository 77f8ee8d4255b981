"""Training runs of a `CheckpointManager`: their steps, and how they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.faulty_storage import Faults
from tests.support.processes import ROOT, environment, python, wait_until

__all__ = ["die_in_commit", "kill_demo", "steps_in"]


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
