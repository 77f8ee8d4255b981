"""demo/trainer.py under torchrun: killed whole, started again with another number of ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.runs import kill_demo
from tests.support.worlds import Worlds

STEPS = 150


def demo(folder: Path) -> None:
    """Run the demo in a world of one rank."""
    from demo.trainer import main

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    main(str(folder), STEPS)


def losses(folder: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / "losses.json").read_text())
    return found


@pytest.mark.timeout(600)
def test_killed_under_torchrun(worlds: Worlds, tmp_path: Path) -> None:
    """Losses are those of a run that nothing has stopped, within other orders of additions."""
    kill_demo("trainer.py", tmp_path / "run", STEPS)
    worlds.fresh(1).run(demo, tmp_path / "whole", timeout=200)
    worlds.fresh(1).run(demo, tmp_path / "run", timeout=200)
    wanted = losses(tmp_path / "whole")
    assert len(wanted) == STEPS and wanted[str(STEPS)] < wanted["1"] / 2
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-5)  # Trainer adds losses in single precision
    assert (tmp_path / "run" / "model.safetensors").is_file()
