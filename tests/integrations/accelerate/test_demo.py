"""demo/accelerator.py under torchrun: killed whole, started again with another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integrations.transformers.jobs import prepare_rank
from tests.support.runs import kill_demo, steps_in
from tests.support.worlds import Worlds

STEPS = 400


def demo(folder: Path) -> None:
    """Run the demo in a world of one rank."""
    from demo.accelerator import main

    prepare_rank()
    main(str(folder), STEPS)


def losses(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "losses.json").read_text())
    return found


@pytest.mark.timeout(600)
def test_killed_under_torchrun(worlds: Worlds, tmp_path: Path) -> None:
    """Losses are those of a run that nothing has stopped, within other orders of additions."""
    kill_demo("accelerator.py", tmp_path / "run", STEPS)
    worlds.fresh(1).run(demo, tmp_path / "whole", timeout=200)
    worlds.fresh(1).run(demo, tmp_path / "run", timeout=200)
    wanted = losses(tmp_path / "whole")
    assert len(wanted) == STEPS and wanted[-1] < wanted[0] / 2
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-3)
    assert len(steps_in(tmp_path / "run")) == 2
