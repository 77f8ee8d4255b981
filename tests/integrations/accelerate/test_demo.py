"""demo/accelerator.py under torchrun: killed whole, started again with another number of ranks."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integrations.transformers.jobs import prepare_rank, steps_in
from tests.support.processes import ROOT, environment, python, wait_until
from tests.support.worlds import Worlds

STEPS = 400


def demo(folder: Path) -> None:
    """Run the demo in a world of one rank."""
    from demo.accelerator import main

    prepare_rank()
    main(str(folder), STEPS)


def start(folder: Path, ranks: int) -> subprocess.Popen[Any]:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return subprocess.Popen(
        python(*run, ROOT / "demo" / "accelerator.py", folder, STEPS), env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def losses(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "losses.json").read_text())
    return found


@pytest.mark.timeout(600)
def test_killed_under_torchrun(worlds: Worlds, tmp_path: Path) -> None:
    """Losses are those of a run that nothing has stopped, within other orders of additions."""
    job = start(tmp_path / "run", 2)
    assert wait_until(lambda: bool(steps_in(tmp_path / "run")), 300)
    for process in [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]:
        process.kill()
    assert job.wait() == -signal.SIGKILL
    killed_at = steps_in(tmp_path / "run")
    assert killed_at and killed_at[-1] < STEPS
    worlds.fresh(1).run(demo, tmp_path / "whole", timeout=200)
    worlds.fresh(1).run(demo, tmp_path / "run", timeout=200)
    wanted = losses(tmp_path / "whole")
    assert len(wanted) == STEPS and wanted[-1] < wanted[0] / 2
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-3)
    assert len(steps_in(tmp_path / "run")) == 2
