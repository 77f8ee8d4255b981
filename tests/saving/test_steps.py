"""Ranks of different steps never share a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CheckpointNotFoundError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.saving.steps import check_step, steps_of_objects
from tests.support.coded import load_step, states
from tests.support.modes import MODES
from tests.support.ranks import outcomes, succeeded
from tests.support.seeds import seeded
from tests.support.settings import writer_threads  # noqa: F401  for all tests here
from tests.support.variants import crossed


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    with seeded(0):
        model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for _ in range(steps):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def shown(by: str, step: int) -> dict[str, Any]:
    """States of one rank that show a step in one way only."""
    model, optimizer, scheduler = trained(step)
    if by == "optimizer":
        return {"model": model, "optimizer": optimizer}
    if by == "scheduler":
        return {"model": model, "scheduler": scheduler}
    if by == "scheduler's state":
        return {"model": model, "extra_states": {"scheduler": scheduler.state_dict()}}
    return {"model": model, "extra_states": {by: step}}


@pytest.mark.parametrize(
    ("by", "mode"), crossed(["optimizer", "scheduler", "scheduler's state", "step", "iteration", "step="], list(MODES))
)
def test_ranks_that_slip_by_one_save_commit_nothing(tmp_path: Path, by: str, mode: str) -> None:
    world = ThreadWorld(3)

    def save(collective: Collective, path: Path, steps: tuple[int, int, int]) -> Any:
        step = steps[collective.rank]
        own = {"model": trained(0)[0]} if by == "step=" else shown(by, step)
        options = {"step": step} if by == "step=" else {}
        return bytecheckpoint.save(path, own, timeout=20, **options, **MODES[mode]).result(30)

    for path, first, good in ((tmp_path / "a", (3, 4, 3), 5), (tmp_path / "b", (7, 6, 6), 8)):
        for raised in outcomes(world, lambda c, path=path, first=first: save(c, path, first)):
            assert isinstance(raised, IncompatibleCheckpointError), raised
            assert "ranks save different steps" in str(raised) and f"{min(first)} on ranks" in str(raised)
            assert f"{max(first)} on rank {first.index(max(first))}" in str(raised)
        with pytest.raises(CheckpointNotFoundError):
            bytecheckpoint.open(path)
        assert [file for file in path.rglob("*") if file.is_file()] == [], "nothing is left"
        succeeded(outcomes(world, lambda c, path=path, good=good: save(c, path, (good, good, good))))
        assert bytecheckpoint.open(path)


def test_a_given_step_counts_alone(tmp_path: Path) -> None:
    """A program whose counters differ between ranks on purpose."""

    def save(collective: Collective) -> Any:
        own = states(collective.rank, 2, 7)
        own["own"] = {"step": collective.rank}
        return bytecheckpoint.save(tmp_path / "s", own, step=7, timeout=20)

    ThreadWorld(2).run(save, timeout=60)
    assert load_step(tmp_path / "s") == 7


def test_parameters_that_lag_behind_are_no_other_step(tmp_path: Path) -> None:
    """An expert that got no tokens; a rank without an optimizer; stages of a pipeline that were unfrozen one by one."""

    def save(collective: Collective) -> Any:
        model, optimizer, _ = trained(3)
        optimizer.state[model.bias]["step"] -= 1
        stage, of_stage, _ = trained(collective.rank)
        own = {"model": model} if collective.rank == 2 else {"model": model, "optimizer": optimizer}
        stages = torch.nn.ModuleDict({f"stage{collective.rank}": stage})
        own |= {"stages": stages, "of_stages": of_stage}
        names = {parameter: f"stages.{name}" for name, parameter in stages.named_parameters()}
        return bytecheckpoint.save(tmp_path / "s", own, names=names, timeout=20)

    ThreadWorld(3).run(save, timeout=60)


def test_counters_of_a_rank_are_no_steps_where_the_optimizers_agree(tmp_path: Path) -> None:
    """Environments of reinforcement learning; stages of a pipeline, connected by the ranks that hold two of them."""

    def save(collective: Collective, slip: int = 0) -> Any:
        rank = collective.rank
        model, optimizer, _ = trained(3)
        other, of_other, _ = trained(1 + slip * (rank == 2))
        own: dict[str, Any] = {"env": {"step": rank}, "scheduler": {"last_epoch": rank}}
        own |= {"model": model, "optimizer": optimizer} if rank < 2 else {}
        own |= {"other": other, "of_other": of_other} if rank > 0 else {}
        names = {parameter: f"other.{name}" for name, parameter in other.named_parameters()}
        return bytecheckpoint.save(tmp_path / "s", own, names=names if rank else None, timeout=20)

    succeeded(outcomes(ThreadWorld(3), lambda collective: save(collective).result()))
    for raised in outcomes(ThreadWorld(3), lambda collective: save(collective, slip=1)):
        assert "other/state/other." in str(raised) and "step is 1 on rank 1 and 2 on rank 2" in str(raised)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 2**60, True, 2 + 0j])
def test_steps_of_any_kind_are_saved(tmp_path: Path, odd: complex) -> None:
    """A value that is no step fails a save only if ranks differ in it."""

    def save(collective: Collective, odd: complex) -> Any:
        model, optimizer, _ = trained(2)
        for state in optimizer.state.values():
            state["step"] = torch.tensor(odd)
        states = {"model": model, "optimizer": optimizer, "extra_states": {"step": 2**70}, "o": WithProperty()}
        return bytecheckpoint.save(tmp_path / "s", states, timeout=20).result()

    succeeded(outcomes(ThreadWorld(2), lambda collective: save(collective, odd)))
    for raised in outcomes(ThreadWorld(2), lambda collective: save(collective, odd if collective.rank else 1)):
        differs = odd not in (True, float("nan")) and odd == odd  # noqa: PLR0124  nan is unknown
        assert isinstance(raised, IncompatibleCheckpointError) or not differs


class WithProperty:
    @property
    def last_epoch(self) -> int:
        raise RuntimeError("not yet")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_steps_of_objects() -> None:
    _, _, scheduler = trained(2)
    found = steps_of_objects(
        {
            "scheduler": scheduler,
            "extra_states": {"step": 3, "global_step": True, "iteration": 2.5, 5: {"step": 6}, 7: 8},
            "mixed": {"s": scheduler, "state": scheduler.state_dict(), "env": {"step": 4}, "step": np.int32(5)},
            "tensors": {"step": torch.tensor(6), "iteration": torch.tensor(1.5), "global_step": torch.ones(2)},
            "data": [1, {"step": 9}],
            "dataloader": {"step": 10},
            "odd": WithProperty(),
            "huge": {"step": 2**63},
        }
    )
    assert found == {
        "scheduler/last_epoch": 2,
        "extra_states/step": 3,
        "mixed/s/last_epoch": 2,
        "mixed/state/last_epoch": 2,
        "mixed/step": 5,
        "tensors/step": 6,
    }


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", np.float32(1), [1], 2**63])
def test_wrong_steps_are_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match="give an integer that is at least 0"):
        bytecheckpoint.save(tmp_path / "s", states(step=1), step=step)


def test_integers_of_any_kind_are_steps() -> None:
    assert [check_step(step) for step in (0, 5, np.int64(7), torch.tensor(8))] == [0, 5, 7, 8]
