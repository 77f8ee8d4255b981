"""Saves that copy behind forward and backward on a device, with the step of the optimizer right behind the call."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import StateChangedError
from tests.faults import test_random_changes as changes
from tests.support.modes import MODES
from tests.support.random_changes import FEW, NAMED

pytestmark = pytest.mark.gpu


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


class Job:
    """A network that a device trains for some milliseconds a step."""

    def __init__(self, **options: Any) -> None:
        self.net = nn.Sequential(nn.Linear(1024, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 1024)).to(device())
        self.optimizer = torch.optim.AdamW(self.net.parameters(), **options)
        self.rows = torch.rand(4096, 1024, device=device())
        self.step_alone: Callable[[], object] = self.optimizer.step
        self.step()

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.net(self.rows).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step(self) -> None:
        self.backward()
        self.step_alone()

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer}

    def content(self) -> dict[str, torch.Tensor]:
        """Return copies of all tensors, made on the caller's stream."""
        found = {name: value.clone() for name, value in self.net.state_dict().items()}
        for number, slots in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{slot}": value.clone() for slot, value in slots.items()}
        return found


def assert_stored(path: Path, wanted: dict[str, torch.Tensor], **options: Any) -> None:
    other = Job(**(options or {"fused": True}))
    bytecheckpoint.load(path, other.states)
    found = other.content()
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_a_step_right_behind_the_call_does_not_reach_the_checkpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    job = Job(**options)
    for number in range(12):
        wanted = job.content()
        handle = bytecheckpoint.save(tmp_path / "s", job.states, **MODES["background"])
        if number % 3:
            job.step()
        else:
            job.optimizer.step()
        report = handle.result(60)
        assert report.staging == "background"
        assert_stored(tmp_path / "s", wanted, **options)


def test_a_scaled_step_and_a_compiled_one(tmp_path: Path) -> None:
    job = Job(fused=True)
    scaler = torch.amp.GradScaler(device().type, init_scale=4.0)

    def scaled() -> None:
        scaler.step(job.optimizer)
        scaler.update()

    def backward() -> None:
        job.optimizer.zero_grad()
        scaler.scale(job.net(job.rows).square().mean()).backward()

    for _ in range(4):
        backward()
        wanted = job.content()
        handle = bytecheckpoint.save(tmp_path / "s", job.states, **MODES["background"])
        scaled()
        handle.result(60)
        assert_stored(tmp_path / "s", wanted)
    compiled = torch.compile(job.optimizer.step)
    for _ in range(4):
        job.backward()
        wanted = job.content()
        handle = bytecheckpoint.save(tmp_path / "s", job.states, **MODES["background"])
        compiled()
        handle.result(60)
        assert_stored(tmp_path / "s", wanted)


def test_a_model_that_the_caller_drops(tmp_path: Path) -> None:
    job = Job(fused=True)
    wanted = job.content()
    handle = bytecheckpoint.save(tmp_path / "s", job.states, **MODES["background"])
    del job
    torch.rand(64 << 20, device=device())  # takes the memory if it is free
    handle.result(60)
    assert_stored(tmp_path / "s", wanted)


@pytest.mark.parametrize("change", ["add", "data", "part of data"])
def test_a_change_without_a_step_is_named(tmp_path: Path, change: str) -> None:
    job, named = Job(fused=True), 0
    weight: torch.Tensor = job.net[2].weight
    for _ in range(10):
        wanted = job.content()
        handle = bytecheckpoint.save(tmp_path / "s", job.states, **MODES["background"])
        with torch.no_grad():
            if change == "add":
                weight.add_(1)
            elif change == "data":
                weight.data.fill_(random.random())
            else:
                weight.data[:600].fill_(random.random())
        try:
            handle.result(60)
        except StateChangedError as error:
            named += 1
            assert error.tensors == ("model/2.weight",)  # noqa: PT017  a change behind the copy is none
        else:
            assert_stored(tmp_path / "s", wanted)
    print(change, "named", named, "of 10")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED HERE: needs CUDA or ROCm")
def test_a_captured_step_is_not_copied_behind(tmp_path: Path) -> None:
    """Replays call no hook: such a state is saved in the call."""
    job = Job(fused=True, capturable=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            job.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.optimizer.step()
    for _ in range(5):
        job.backward()
        wanted = job.content()
        handle = bytecheckpoint.save(tmp_path / "s", job.states, **MODES["background"])
        graph.replay()
        report = handle.result(60)
        assert report.staging.startswith("blocking"), report.staging
        assert_stored(tmp_path / "s", wanted, fused=True, capturable=True)


def test_a_training_that_reads_its_loss_waits_for_little(tmp_path: Path) -> None:
    """A device copies in the order of queueing: the loss would wait for the rest of the state."""
    model = torch.nn.Linear(8192, 3 * 8192, device=device())
    model.requires_grad_()
    loss = torch.rand(1, device=device())
    for _ in range(3):
        torch.accelerator.synchronize()
        handle = bytecheckpoint.save(tmp_path / "s", {"model": model}, **MODES["background"])
        longest = 0.0
        while not handle.staged.done():
            begin = time.perf_counter()
            loss.item()
            longest = max(longest, time.perf_counter() - begin)
        handle.result(60)
    print(f"a loss was read in {longest * 1e3:.2f} ms at most")
    assert longest < 0.01, "3/4 GiB take 15 ms"


def test_random_changes(tmp_path: Path) -> None:
    """The changes of tests/faults on a device, as far as devices have them."""
    kinds = [kind for kind in NAMED | FEW if "numpy" in kind or "storage" in kind]
    with torch.device(device()):
        changes.check(tmp_path, 20, 5, seed=7, without=kinds)
