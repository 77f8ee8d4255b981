"""Trainer with `attach`, in one process: what is saved, what is kept, and equal losses after kills."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.transformers.jobs import die_at_commit, run, steps_in
from tests.support.worlds import Worlds, on_ranks


def test_a_killed_save_is_not_resumed_from(worlds: Worlds, tmp_path: Path) -> None:
    wanted = worlds.run(1, run, tmp_path / "whole", attached=False, dropout=0.2)[0]
    assert len(set(wanted.values())) == len(wanted) == 12
    folder = tmp_path / "run"
    ((_, log),) = worlds.fresh(1).start(die_at_commit, folder, 2, dropout=0.2).outcomes()
    assert "exit code -9" in log
    assert steps_in(folder) == [4] and list((folder / "step_00000008").rglob("*.safetensors"))
    got = worlds.run(1, run, folder, "auto", dropout=0.2)[0]
    assert got == {step: loss for step, loss in wanted.items() if step > 4}
    assert steps_in(folder) == [4, 8, 12]


@on_ranks(1)
def test_auto_begins_a_run(tmp_path: Path) -> None:
    assert len(run(tmp_path, "auto")) == 12
    assert steps_in(tmp_path) == [4, 8, 12]
    assert not list(tmp_path.glob("checkpoint-*"))
