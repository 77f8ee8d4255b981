"""demo/lightning_trainer.py under torchrun: killed whole, started again with another number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integrations.lightning.jobs import steps_in
from tests.support.processes import ROOT, environment, python, wait_until
from tests.support.worlds import Worlds

STEPS = 600


def demo(folder: Path) -> None:
    """Run the demo in a world of one rank."""
    from demo.lightning_trainer import main

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"):
        os.environ.pop(name, None)
    main(str(folder), STEPS)


def losses(folder: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / "losses.json").read_text())
    return found


@pytest.mark.timeout(600)
def test_killed_under_torchrun(worlds: Worlds, tmp_path: Path) -> None:
    """Losses are those of a run that nothing has stopped, within other orders of additions."""
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    job: subprocess.Popen[Any] = subprocess.Popen(
        python(*run, ROOT / "demo" / "lightning_trainer.py", tmp_path / "run", STEPS), env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert wait_until(lambda: bool(steps_in(tmp_path / "run")), 300)
    for process in [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]:
        process.kill()
    assert job.wait() == -signal.SIGKILL
    killed_at = steps_in(tmp_path / "run")
    assert killed_at and killed_at[-1] < STEPS
    worlds.fresh(1).run(demo, tmp_path / "whole", timeout=200)
    worlds.fresh(1).run(demo, tmp_path / "run", timeout=200)
    wanted = losses(tmp_path / "whole")
    assert len(wanted) == STEPS and wanted[str(STEPS)] < wanted["1"] / 2
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-2, abs=1e-5)
    assert (tmp_path / "run" / "weights.ckpt").is_file()
