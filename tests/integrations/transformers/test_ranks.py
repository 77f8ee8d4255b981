"""Trainer with `attach` under DDP: agreement of the ranks, kills, and resumes at another number of ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bytecheckpoint.integrations.transformers import attach
from bytecheckpoint.manager import Preemption
from tests.integrations.transformers.jobs import die_at_commit, make, run
from tests.support.runs import steps_in
from tests.support.worlds import Worlds, on_ranks

CLOSE = 1e-5  # of losses whose additions were in another order


def after(step: int, losses: dict[int, float]) -> dict[int, float]:
    return {number: loss for number, loss in losses.items() if number > step}


def test_a_killed_rank(worlds: Worlds, tmp_path: Path) -> None:
    """Rank 0 dies in the middle of a commit. Dropout draws other numbers on each rank, and these go on too."""
    wanted = worlds.run(2, run, tmp_path / "whole", attached=False, dropout=0.2)
    folder = tmp_path / "run"
    worlds.fresh(2).start(die_at_commit, folder, 2, dropout=0.2).outcomes(grace=1)
    assert steps_in(folder) == [4]
    got = worlds.run(2, run, folder, "auto", dropout=0.2)
    assert got == [after(4, losses) for losses in wanted]


@pytest.mark.parametrize("how", ["batch", "accumulation"])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_another_number_of_ranks(worlds: Worlds, tmp_path: Path, sizes: tuple[int, int], how: str) -> None:
    """With the samples of a step kept, by the batch of a rank or by accumulated gradients."""
    before, now = sizes
    per_rank: dict[int, dict[str, Any]] = {2: {"per_device_train_batch_size": 4}, 1: {"per_device_train_batch_size": 8}}
    if how == "accumulation":
        per_rank[1] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    whole = {"max_steps": 12, "lr_scheduler_type": "cosine"}
    wanted = worlds.run(before, run, tmp_path / "whole", attached=False, **whole, **per_rank[before])[0]
    worlds.run(before, train_until, tmp_path / "run", 8, **whole, **per_rank[before])
    got = worlds.run(now, run, tmp_path / "run", "auto", **whole, **per_rank[now])[0]
    assert got == pytest.approx(after(8, wanted), rel=CLOSE)
    assert steps_in(tmp_path / "run") == [4, 8, 12]


def train_until(folder: Path, step: int, **options: Any) -> None:
    trainer, _ = make(folder, {step: lambda: setattr(trainer.control, "should_training_stop", True)}, **options)
    attach(trainer)
    trainer.train("auto")


@on_ranks(2)
def test_one_rank_gets_the_signal(tmp_path: Path) -> None:
    """All ranks save at one step, and leave together."""

    def stop() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)

    wanted = run(tmp_path / "whole", attached=False, num_train_epochs=20)
    trainer, _ = make(tmp_path / "run", {7: stop}, num_train_epochs=20, save_steps=1000)
    checkpoints = attach(trainer, preemption=Preemption())
    trainer.train()
    assert checkpoints.preempted
    (step,) = steps_in(tmp_path / "run")
    found: list[Any] = [None, None]
    dist.all_gather_object(found, trainer.state.global_step)
    assert found == [step, step] and step < 100
    assert run(tmp_path / "run", "auto", num_train_epochs=20, save_steps=1000) == after(step, wanted)


@on_ranks(2)
def test_the_best_step_on_all_ranks(tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }  # fmt: skip
    trainer, _ = make(tmp_path, **options)
    attach(trainer)
    trainer.train()
    dist.barrier()
    assert steps_in(tmp_path) == sorted({trainer.state.best_global_step, 12})
    weights = [p.sum().item() for p in trainer.model.parameters()]
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (weights, trainer.state.best_model_checkpoint))
    assert found[0] == found[1] and found[0][1].endswith(f"step_{trainer.state.best_global_step:08d}")
