"""Accelerate under DDP: states of each rank, kills, and resumes at another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError
from tests.integrations.accelerate.jobs import (
    Found,
    Numbers,
    Run,
    Stream,
    by_epoch,
    go_on,
    joined,
    run,
    weighted,
)
from tests.integrations.conformance import after
from tests.support.runs import steps_in
from tests.support.worlds import Worlds, on_ranks

CLOSE = 1e-9  # of losses whose additions were in another order, in float64


def train_of_accelerate(folder: Path, load: bool, **options: Any) -> Found:
    """Train with accelerate itself: to step 8 and save, or on from there."""
    job = Run("", attached=False, **options)
    if load:
        job.accelerator.load_state(folder / "step_8")
        return go_on(job, save=lambda _: False)
    job.train(stop=8, save=lambda _: False)
    job.accelerator.save_state(folder / "step_8")
    return {}


def train_switched(folder: Path, stop: int, **options: Any) -> Found:
    job = Run(folder, **options)
    number = job.accelerator.load_state()
    found = (go_on if number == 8 else Run.train)(job, stop=stop, save=lambda step: step == 10)
    job.end()
    return found


@pytest.mark.parametrize("options", [{}, {"fsdp": True}, {"stateful": True}])
def test_a_job_that_runs_is_switched(worlds: Worlds, tmp_path: Path, options: dict[str, Any]) -> None:
    worlds.run(2, train_of_accelerate, tmp_path, False, **options)
    wanted = worlds.run(2, train_of_accelerate, tmp_path, True, **options)
    got = worlds.run(2, train_switched, tmp_path, 10, **options)
    rest = worlds.run(2, train_switched, tmp_path, 0, **options)
    assert [{**first, **second} for first, second in zip(got, rest, strict=True)] == wanted


OTHER: dict[str, dict[str, Any]] = {
    "seedable": {"schedule": False},
    "random": {"schedule": False, "seedable": False},
    "accumulated": {"schedule": False, "batch": 4},
    "dispatched": {"schedule": False, "dispatch": True, "seedable": False},
    "weighted": {"schedule": False, "loader": weighted},
    "by epoch": {"schedule": False, "loader": by_epoch},
    "stream": {"schedule": False, "data": Stream, "dispatch": False},
}


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
@pytest.mark.parametrize("state", OTHER)
def test_another_number_of_ranks(worlds: Worlds, tmp_path: Path, state: str, sizes: tuple[int, int]) -> None:
    """In the middle of the second epoch, with the samples of a step kept."""
    before, now = sizes
    options = {**OTHER[state], "dropout": 0.0, "every": 8}

    def of(ranks: int) -> dict[str, Any]:
        return {**options, "accumulation": 2} if state == "accumulated" and ranks == 1 else options

    wanted = joined(worlds.run(before, run, tmp_path / "whole", **of(before)))
    worlds.run(before, run, tmp_path / "run", stop=8, **of(before))
    got = joined(worlds.run(now, run, tmp_path / "run", **of(now)))
    assert {step: ids for step, (_, ids) in got.items()} == {step: wanted[step][1] for step in (9, 10, 11, 12)}
    if state != "accumulated":  # where the loss is that of the last batches
        assert {step: loss for step, (loss, _) in got.items()} == pytest.approx(
            {step: wanted[step][0] for step in (9, 10, 11, 12)}, rel=CLOSE
        )


def rows(parts: list[int]) -> Any:
    for part in parts:
        yield from ({"x": [float(part * 12 + i), 1.0, i % 3, i % 7]} for i in range(12))


class Parts(Run):
    """A data set of Hugging Face in four parts, of which each rank reads two."""

    def __init__(self, folder: Path, shuffled: bool) -> None:
        from datasets import IterableDataset

        data = IterableDataset.from_generator(rows, gen_kwargs={"parts": [0, 1, 2, 3]}).with_format("torch")
        data = data.shuffle(seed=1, buffer_size=10) if shuffled else data
        super().__init__(folder, stateful=True, dispatch=False, data=data, schedule=False)

    def epochs(self, number: int, stop: int = 0) -> Found:
        self.accelerator.load_state()
        found: Found = {}
        for _ in range(self.loader.iteration, number):
            for batch in self.loader:
                rows = torch.stack(batch["x"], 1).double()
                loss = self.model(rows / 10).pow(2).mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.counter.step += 1
                found[self.counter.step] = loss.item(), rows[:, 0].int().tolist()
                if self.counter.step == stop:
                    self.accelerator.save_state(step=stop)
                    self.end()
                    return found
        return found


@pytest.mark.parametrize("shuffled", [False, True])
@on_ranks(2)
def test_each_rank_keeps_its_own_state(tmp_path: Path, shuffled: bool) -> None:
    """Accelerate itself lets all ranks write one dl_state_dict.bin: the last one wins."""
    wanted = Parts(tmp_path / "whole", shuffled).epochs(2)
    first = Parts(tmp_path / "run", shuffled).epochs(2, stop=8)
    assert {**first, **Parts(tmp_path / "run", shuffled).epochs(2)} == wanted
    own = {number // 24 for _, ids in wanted.values() for number in ids}
    others: list[Any] = [None, None]
    dist.all_gather_object(others, own)
    assert others[0] != others[1] or shuffled


@on_ranks(2)
def test_a_state_of_the_ranks(tmp_path: Path) -> None:
    """Registered objects and random numbers differ between ranks, and each gets its own."""
    job = Run(tmp_path)
    job.counter.step = 10 + dist.get_rank()
    torch.manual_seed(dist.get_rank())
    job.accelerator.save_state(step=1)
    wanted = torch.rand(3)
    job.end()
    again = Run(tmp_path)
    assert again.accelerator.load_state() == 1
    assert again.counter.step == 10 + dist.get_rank()
    assert torch.equal(torch.rand(3), wanted)
    again.end()


def fails(folder: Path, error: str, **options: Any) -> None:
    with pytest.raises(IncompatibleCheckpointError, match=error):
        run(folder, **options)


def test_a_schedule_that_counts_ranks(worlds: Worlds, tmp_path: Path) -> None:
    """Accelerate steps a schedule once for each rank: at another number of them the learning rate would be wrong."""
    worlds.run(2, run, tmp_path, stop=8)
    worlds.run(1, fails, tmp_path, "a schedule advanced by 2 in an optimizer step, and would by 1")
    worlds.run(2, run, tmp_path)
    assert steps_in(tmp_path) == [4, 8, 12]


def test_a_position_between_batches(worlds: Worlds, tmp_path: Path) -> None:
    options = {"schedule": False, "every": 3}
    worlds.run(2, run, tmp_path, stop=3, **options)
    worlds.run(1, fails, tmp_path, "behind 3 batches of 8 samples of an epoch, which is no place", batch=16, **options)


@on_ranks(2)
def test_one_checkpoint_of_all(tmp_path: Path) -> None:
    """Every state is in it, and no file of accelerate's beside it."""
    job = Run(tmp_path)
    job.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    job.train(1, stop=4)
    job.end()
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not any(name.endswith((".bin", ".pkl")) for name in names)
    with bytecheckpoint.open(tmp_path / "step_00000004") as checkpoint:
        states = {key.partition("/")[0] for key in checkpoint}
    assert states >= {"model", "optimizer", "rng", "accelerator"}
    again = Run(tmp_path)
    again.accelerator.scaler = torch.amp.GradScaler("cpu")
    assert again.accelerator.load_state() == 4
    assert again.accelerator.scaler.get_scale() == 8.0
    assert again.schedule.state_dict() == job.schedule.state_dict()
    assert again.accelerator.step == job.accelerator.step
    again.end()


def uneven(folder: Path, stop: int = 0) -> Found:
    return run(folder, data=Numbers(45), stop=stop, every=8, dispatch=True, seedable=False)


def test_a_last_batch_that_is_filled_up(worlds: Worlds, tmp_path: Path) -> None:
    wanted = worlds.run(2, uneven, tmp_path / "whole")
    worlds.run(2, uneven, tmp_path / "run", 8)
    assert worlds.run(2, uneven, tmp_path / "run") == [after(8, found) for found in wanted]


@on_ranks(2)
def test_a_gradient_scaler_with_fsdp(tmp_path: Path) -> None:
    """Accelerate itself has to load it before the optimizer of FSDP2."""
    job = Run(tmp_path, fsdp=True)
    job.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    job.train(1, stop=4)
    job.end()
    again = Run(tmp_path, fsdp=True)
    again.accelerator.scaler = torch.amp.GradScaler("cpu")
    again.accelerator.load_state()
    again.end()
    assert again.accelerator.scaler.get_scale() == 8.0
