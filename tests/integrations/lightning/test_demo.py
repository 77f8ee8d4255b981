"""demo/lightning_trainer.py: killed on two ranks, started again on one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.integrations.lightning.jobs import prepare_rank
from tests.support.runs import die_in_commit, kill_demo, steps_in
from tests.support.worlds import Worlds


def demo(folder: Path, steps: int) -> None:
    """Run the demo on the ranks of a world."""
    from demo.lightning_trainer import main

    prepare_rank()
    if dist.is_initialized():
        os.environ["RANK"] = str(dist.get_rank())
    main(str(folder), steps)


def die(folder: Path, steps: int) -> None:
    die_in_commit(2, lambda: demo(folder, steps))


def losses(folder: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / "losses.json").read_text())
    return found


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_killed_and_started_again(worlds: Worlds, tmp_path: Path, torchrun: bool) -> None:
    """Losses are those of a run that nothing has stopped, within other orders of additions."""
    steps = 600 if torchrun else 100
    if torchrun:
        kill_demo("lightning_trainer.py", tmp_path / "run", steps)
    else:
        worlds.fresh(2).start(die, tmp_path / "run", steps).outcomes(grace=1)
        assert steps_in(tmp_path / "run") == [10]
    worlds.fresh(1).run(demo, tmp_path / "whole", steps, timeout=200)
    worlds.fresh(1).run(demo, tmp_path / "run", steps, timeout=200)
    wanted = losses(tmp_path / "whole")
    assert len(wanted) == steps and wanted[str(steps)] < wanted["1"] / 2
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-9)
    assert (tmp_path / "run" / "weights.ckpt").is_file()
