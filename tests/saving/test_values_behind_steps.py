"""Plain values, extra tensors and streams of data loaders are copied behind the next step of an optimizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.engine.staging import Image
from tests.dataloader.token_loaders import loader, rows_of
from tests.support.modes import MODES
from tests.support.settings import using


class Streams:
    """Two streams whose tensors are filled late."""

    stream_count = 2

    def __init__(self, ready: threading.Event) -> None:
        self.ready = ready
        self.loaded: Mapping[int, Any] = {}

    def shared_state(self) -> dict[str, int]:
        return {"batches": 3}

    def stream_states(self) -> Mapping[int, Any]:
        raise AssertionError("not where there are snapshots")

    def stream_snapshots(self) -> Mapping[int, tuple[Any, Callable[[], object]]]:
        found = {}
        for number in range(2):
            tensor = torch.zeros(700_000)

            def fill(tensor: torch.Tensor = tensor, number: int = number) -> None:
                assert self.ready.wait(20)
                tensor.fill_(number + 1)

            found[number] = ({"n": number, "tokens": tensor}, fill)
        return found

    def choose_streams(self, shared: Any, saved: Sequence[int]) -> Sequence[int]:
        return saved

    def load_streams(self, shared: Any, states: Mapping[int, Any]) -> None:
        self.loaded = states


def job() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    step(net, optimizer)
    return net, optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Values are copied when the event is set."""
    event, stage = threading.Event(), Image.stage

    def late(self: Image, *arguments: Any) -> None:
        if len(arguments) > 3 and arguments[3].start is not None:
            assert event.wait(20)
        stage(self, *arguments)

    monkeypatch.setattr(Image, "stage", late)
    return event


def test_a_step_does_not_wait_for_snapshots(tmp_path: Path) -> None:
    (net, optimizer), ready = job(), threading.Event()
    streams = Streams(ready)
    states = {"model": net, "optimizer": optimizer, "dataloader": streams}
    wanted = net[0].weight.detach().clone()
    handle = bytecheckpoint.save(tmp_path / "s", states, **MODES["background"])
    step(net, optimizer)  # would wait 20 s
    assert not handle.staged.done()
    ready.set()
    handle.result(60)
    bytecheckpoint.load(tmp_path / "s", states)
    assert torch.equal(net[0].weight, wanted)
    assert {n: (state["n"], state["tokens"].unique().tolist()) for n, state in streams.loaded.items()} == {
        0: (0, [1.0]), 1: (1, [2.0]),
    }  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("staging_bytes", [None, 2 << 20])
def test_snapshots_are_filled_in_each_mode(tmp_path: Path, mode: str, staging_bytes: int | None) -> None:
    ready = threading.Event()
    ready.set()
    streams = Streams(ready)
    with using(chunk_bytes=1 << 20, **({} if staging_bytes is None else {"staging_bytes": staging_bytes})):
        for _ in range(2):
            bytecheckpoint.save(tmp_path / "s", {"dataloader": streams}, **MODES[mode]).result(60)
    bytecheckpoint.load(tmp_path / "s", {"dataloader": streams})
    assert [state["tokens"].unique().tolist() for state in streams.loaded.values()] == [[1.0], [2.0]]


def test_values_that_a_program_changes_behind_a_step(tmp_path: Path, held: threading.Event) -> None:
    net, optimizer = job()
    extra: dict[str, Any] = {
        "ema": nn.Parameter(torch.rand(300, 300)),
        "queue": torch.rand(5, 70),
        "array": np.linspace(0, 1, 16_000).reshape(400, 40),
        "strided": torch.rand(60, 70).t(),
        "leaf": net[0].weight,
    }
    wanted = {name: torch.as_tensor(value).detach().clone() for name, value in extra.items()}
    states = {"model": net, "optimizer": optimizer, "extra_states": extra}
    handle = bytecheckpoint.save(tmp_path / "s", states, **MODES["background"])
    step(net, optimizer)
    for value in extra.values():
        torch.as_tensor(value).data.fill_(7)
    held.set()
    handle.result(60)
    with bytecheckpoint.open(tmp_path / "s") as checkpoint:
        for name, value in wanted.items():
            assert torch.equal(checkpoint[f"extra_states/{name}"][...], value), name


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_takes_batches_meanwhile(tmp_path: Path, held: threading.Event, workers: int) -> None:
    one, other = loader(shuffle_buffer=5, workers=workers), loader(shuffle_buffer=5)
    net, optimizer = job()
    states = {"model": net, "optimizer": optimizer, "dataloader": one}
    for number in range(4):
        held.clear()
        next(one)
        handle = bytecheckpoint.save(tmp_path / "s", states, **MODES["background"])
        wanted = [rows_of(next(one)) for _ in range(3)]
        step(net, optimizer)
        held.set()
        handle.result(60)
        bytecheckpoint.load(tmp_path / "s", {"dataloader": other}, strict=False)
        assert [rows_of(next(other)) for _ in range(3)] == wanted, number
    one.close()
