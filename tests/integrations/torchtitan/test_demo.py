"""demo/torchtitan_llama.py under torchtitan's own program, with a tiny model: killed, and started again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.torchtitan.jobs import after, prepare_rank, steps_in
from tests.integrations.torchtitan.shims import load_training
from tests.support.runs import die_in_commit
from tests.support.worlds import Worlds, on_ranks


def tiny() -> Any:
    """Return the configuration of the demo, for the CPU. torchtitan's program finds it by its name."""
    from demo.torchtitan_llama import with_checkpoints

    options = {"steps": 12, "batch": 4, "parallelism": {}, "streams": False, "workers": 0, "own_container": False}
    config = load_training().make_config(Path("out"), checkpoint=None, **options)
    return with_checkpoints(config)


def train(folder: Path, *options: str) -> dict[int, float]:
    """Run torchtitan's program; return the losses."""
    from torchtitan.train import main

    prepare_rank()
    losses: dict[int, float] = {}
    command = ["train", "--module", __name__, "--config", "tiny", "--dump_folder", str(folder), *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*command, "--checkpoint.interval", "4"])
        patch.setattr(load_training().Losses, "log", lambda _, step, loss, *__, **___: losses.update({step: loss}))
        main()
    return losses


def die_at_commit(folder: Path) -> None:
    die_in_commit(2, lambda: train(folder))


def test_killed_and_started_again(worlds: Worlds, tmp_path: Path) -> None:
    wanted = worlds.run(1, train, tmp_path / "whole", "--checkpoint.no-enable")[0]
    assert len(wanted) == 12 and wanted[12] < wanted[1]
    ((_, log),) = worlds.fresh(1).start(die_at_commit, tmp_path / "run").outcomes()
    assert "exit code -9" in log and steps_in(tmp_path / "run") == [4]
    assert worlds.run(1, train, tmp_path / "run")[0] == after(4, wanted)
    assert steps_in(tmp_path / "run") == [4, 8, 12]


@on_ranks(1)
def test_the_configuration_of_the_demo() -> None:
    """Parse the configuration of the real model, which the CPU does not train."""
    from torchtitan.config import ConfigManager

    options = ["--module", "demo.torchtitan_llama", "--config", "llama3_debugmodel", "--checkpoint.interval", "7"]
    config = ConfigManager().parse_args(options)
    assert isinstance(config.checkpoint, load_training().CheckpointManager.Config)
    assert (config.checkpoint.interval, config.checkpoint.preemption_grace) == (7, 60.0)
