"""The manager copies behind the training where its first two saves have shown that nothing changes under a copy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import CheckpointManager
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.engine.staging import Image
from bytecheckpoint.errors import StateChangedError
from bytecheckpoint.manager.run_folder import step_folder

_Between = Callable[[int, "Job"], object]


class Job:
    """A small model and its optimizer; each step is different."""

    def __init__(self) -> None:
        self.model = nn.Linear(40, 30)
        with torch.no_grad():  # ranks that are threads share torch's random numbers
            for parameter in self.model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        self.average = self.model.weight.detach().clone()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 40)).square().sum().backward()
        self.optimizer.step()


def train(root: Path, job: Job, saves: int, between: _Between = lambda *_: None, **options: Any) -> list[str]:
    """Save at every second step; return how each save copied the state."""
    handles = []
    with CheckpointManager(root, job.states(), every=2, **options) as manager:
        for step in range(1, 2 * saves + 1):
            job.step()
            handle = manager.maybe_save(step)
            if handle is not None:
                handles.append(handle)
                between(len(handles), job)
    return [handle.result().staging for handle in handles]


def weights(root: Path, step: int) -> torch.Tensor:
    found = Job()
    bytecheckpoint.load(step_folder(str(root), step), {"model": found.model})
    return found.model.weight.detach()


def expected(steps: int) -> torch.Tensor:
    job = Job()
    for _ in range(steps):
        job.step()
    return job.model.weight.detach()


def test_a_clean_program_is_copied_in_the_background_from_its_third_save(tmp_path: Path) -> None:
    assert train(tmp_path, Job(), 5) == ["blocking"] * 2 + ["background"] * 3
    for step in range(2, 11, 2):
        assert torch.equal(weights(tmp_path, step), expected(step))


def swap(_: int, job: Job) -> None:
    """Evaluate with other weights, as averages are, without a fence."""
    own = job.model.weight.detach().clone()
    job.model.weight.data.copy_(job.average)
    job.average.copy_(own)


def swap_there_and_back(number: int, job: Job) -> None:
    swap(number, job)
    swap(number, job)
    with torch.no_grad():
        job.model.bias.add_(0)


@pytest.mark.parametrize("change", [swap, swap_there_and_back])
def test_a_program_that_changes_its_state_stays_blocking(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: _Between
) -> None:
    with caplog.at_level(logging.INFO, "bytecheckpoint"):
        assert train(tmp_path, Job(), 4, change) == ["blocking"] * 4
    lines = [text for text in caplog.messages if "copy the state in the call" in text]
    assert len(lines) == 1 and "model/" in lines[0] and "changed before the next step of an optimizer" in lines[0]


def test_a_change_later_saves_the_next_step_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every save from the fourth on is followed by a change; it fails once, and no later save does."""
    gate = threading.Event()
    gate.set()
    stage = Image.stage
    monkeypatch.setattr(Image, "stage", lambda self, *arguments: (gate.wait(20), stage(self, *arguments))[1])

    def change(number: int, job: Job) -> None:
        if number >= 4:
            with torch.no_grad():
                job.model.weight.add_(1)
            gate.set()

    job = Job()
    handles = []
    with CheckpointManager(tmp_path, job.states(), every=3) as manager:
        for step in range(1, 17):
            job.step()
            if len(handles) == 3 and step % 3 == 0:
                gate.clear()
            if (handle := manager.maybe_save(step)) is not None:
                handles.append((step, handle))
                change(len(handles), job)
                if len(handles) == 4:
                    assert Future.exception(handle.committed, 30) is not None  # the manager reports it
    steps = [step for step, _ in handles]
    # The clock of rank 0 asks for the repeated save, one or two steps later.
    assert steps[:4] == [3, 6, 9, 12] and 15 in steps[4:] and steps[4] in (13, 14, 15), steps
    done = [handle.result().staging for step, handle in handles if step != 12]
    assert done == ["blocking"] * 2 + ["background"] + ["blocking"] * (len(steps) - 4)
    assert "step 12 is not saved, the next one is: " in caplog.text
    assert not Path(step_folder(str(tmp_path), 12), "metadata.parquet").exists()


def test_a_change_behind_the_last_save_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No later save makes up for it."""
    gate = threading.Event()
    stage = Image.stage
    monkeypatch.setattr(Image, "stage", lambda self, *arguments: (gate.wait(20), stage(self, *arguments))[1])

    class Slow(Job):
        """A job whose fourth save is copied late."""

        steps = 0

        def step(self) -> None:
            super().step()
            self.steps += 1
            if self.steps == 8:
                gate.clear()

    def change(number: int, job: Job) -> None:
        if number == 4:
            with torch.no_grad():
                job.model.weight.add_(1)
            gate.set()

    gate.set()
    with pytest.raises(StateChangedError, match=r"model/.*weight"):
        train(tmp_path, Slow(), 4, change)


def test_a_program_without_optimizer_steps_stays_blocking(tmp_path: Path) -> None:
    class Own(Job):
        def step(self) -> None:
            with torch.no_grad():
                self.model.weight.add_(1)

    assert train(tmp_path, Own(), 4) == ["blocking"] * 4


def test_each_rank_decides_for_itself(tmp_path: Path) -> None:
    def run(collective: Collective) -> list[str]:
        job = Job()

        def between(number: int, job: Job) -> None:
            if collective.rank == 1:
                swap_there_and_back(number, job)
            collective.barrier(f"auto/{number}", timeout=60)

        return train(tmp_path, job, 4, between)

    assert ThreadWorld(2).run(run, timeout=60) == [["blocking"] * 2 + ["background"] * 2, ["blocking"] * 4]
    assert torch.equal(weights(tmp_path, 8), expected(8))


@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_a_given_way_stays(tmp_path: Path, staging: Any) -> None:
    options = bytecheckpoint.SaveOptions(staging=staging)
    assert train(tmp_path, Job(), 3, save_options=options) == [staging] * 3
