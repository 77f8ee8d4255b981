"""A save that copies in the background holds the state of its call, whatever the program does next."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import CheckpointError, CheckpointTimeoutError, UsageError, step_fence
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.engine.staging import Image
from bytecheckpoint.frameworks import registry
from bytecheckpoint.frameworks.native import NativeFramework
from tests.support.ranks import outcomes
from tests.support.settings import using
from tests.support.variants import quick

BACKGROUND: dict[str, Any] = {"async_checkpoint": True, "staging": "background"}


class Net(nn.Module):
    """Parameters, running statistics, a frozen weight and a buffer of random features."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size), nn.Linear(size, size))
        self.frozen = nn.Parameter(torch.randn(size, size), requires_grad=False)
        self.register_buffer("features", torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x) @ self.frozen * self.features
        return result


def trained(make: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    """A network with an optimizer that has stepped, and gradients for the next step."""
    torch.manual_seed(1)
    net = Net()
    optimizer = make([p for p in net.parameters() if p.requires_grad], **options)
    for _ in range(2):
        net(torch.randn(8, 64)).square().mean().backward()
        optimizer.step(lambda: 0.0) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    return net, optimizer


def flat(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Copies of all tensors."""
    found = {name: value.detach().clone() for name, value in net.state_dict().items()}
    for number, state in enumerate((optimizer.state_dict()["state"] if optimizer else {}).values()):
        found |= {f"{number}.{k}": v.detach().clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
    return found


def loaded(
    path: Path, make: Callable[..., torch.optim.Optimizer] | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    net = Net()
    optimizer = make([p for p in net.parameters() if p.requires_grad], **options) if make else None
    bytecheckpoint.load(path, {"model": net} | ({"optimizer": optimizer} if optimizer else {}))
    return flat(net, optimizer)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@pytest.fixture(autouse=True)
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Staging begins when the event is set, or after 0.3 s."""
    begin = threading.Event()
    stage = Image.stage

    def late(self: Image, *arguments: Any) -> None:
        begin.wait(0.3)
        stage(self, *arguments)

    monkeypatch.setattr(Image, "stage", late)
    return begin


OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"foreach": False}), (torch.optim.AdamW, {"foreach": True}), (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (torch.optim.Adagrad, {}), (torch.optim.RMSprop, {}), (torch.optim.Adafactor, {}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options"), quick(OPTIMIZERS, every=2))
def test_a_step_right_after_the_call(tmp_path: Path, make: Any, options: dict[str, Any]) -> None:
    net, optimizer = trained(make, **options)
    for number in range(3):
        expected = flat(net, optimizer)
        net(torch.randn(8, 64)).square().mean().backward()  # also changes running statistics
        before = flat(net, optimizer)
        handle = bytecheckpoint.save(tmp_path / str(number), {"model": net, "optimizer": optimizer}, **BACKGROUND)
        optimizer.step()
        handle.result(60)
        assert_equal(loaded(tmp_path / str(number), make, **options), before)
        assert any(not torch.equal(a, b) for a, b in zip(expected.values(), before.values(), strict=True))


def changes_in_forward(net: Net) -> None:
    net(torch.randn(8, 64))
    net.features.mul_(2)


def exchanged(net: Net) -> None:
    for parameter in net.parameters():
        parameter.data = torch.zeros_like(parameter)
    net.features.data = torch.zeros(64)


def swapped(net: Net) -> None:
    bytecheckpoint.fence()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("change", [changes_in_forward, exchanged, swapped])
def test_changes_without_a_step(tmp_path: Path, change: Callable[[Net], None], captured: bool) -> None:
    net, _ = trained(torch.optim.SGD, lr=0.1)
    if captured:  # the same objects are not captured anew
        bytecheckpoint.save(tmp_path / "step", {"model": net}, **BACKGROUND).result(60)
    before = flat(net)
    handle = bytecheckpoint.save(tmp_path / "step", {"model": net}, **BACKGROUND)
    change(net)
    handle.result(60)
    assert_equal(loaded(tmp_path / "step"), before)


def test_extra_states_are_those_of_the_call(tmp_path: Path) -> None:
    net, _ = trained(torch.optim.SGD, lr=0.1)
    queue, counter = torch.arange(100.0), {"seen": 1}
    states = {"model": net, "extra_states": {"queue": queue, "c": counter}}
    handle = bytecheckpoint.save(tmp_path / "step", states, **BACKGROUND)
    queue.zero_()
    counter["seen"] = 2
    handle.result(60)
    found: dict[str, Any] = {"model": net, "extra_states": {}}
    bytecheckpoint.load(tmp_path / "step", found)
    assert torch.equal(found["extra_states"]["queue"], torch.arange(100.0)) and found["extra_states"]["c"] == {
        "seen": 1
    }


def test_a_load_right_after_the_call(tmp_path: Path) -> None:
    net, _ = trained(torch.optim.SGD, lr=0.1)
    bytecheckpoint.save(tmp_path / "old", {"model": net})
    with torch.no_grad():
        net.frozen.add_(1)
    before = flat(net)
    handle = bytecheckpoint.save(tmp_path / "new", {"model": net}, **BACKGROUND)
    bytecheckpoint.load(tmp_path / "old", {"model": net})
    handle.result(60)
    assert_equal(loaded(tmp_path / "new"), before)


def test_a_step_in_another_thread(tmp_path: Path) -> None:
    net, optimizer = trained(torch.optim.AdamW)
    net(torch.randn(8, 64)).square().mean().backward()
    before = flat(net, optimizer)
    handle = bytecheckpoint.save(tmp_path / "step", {"model": net, "optimizer": optimizer}, **BACKGROUND)
    threads = [threading.Thread(target=optimizer.step) for _ in range(2)]
    for thread in threads:
        thread.start()
    handle.result(60)
    for thread in threads:
        thread.join()
    assert_equal(loaded(tmp_path / "step", torch.optim.AdamW), before)


def test_a_compiled_step_is_compiled_once_more_at_most(tmp_path: Path) -> None:
    counters = pytest.importorskip("torch._dynamo.utils").counters
    net, optimizer = trained(torch.optim.SGD, lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    step()
    first = counters["stats"]["unique_graphs"]
    for number in range(4):
        before = flat(net)
        handle = bytecheckpoint.save(tmp_path / str(number), {"model": net}, **BACKGROUND)
        step()
        handle.result(60)
        assert_equal(loaded(tmp_path / str(number)), before)
    assert counters["stats"]["unique_graphs"] <= first + 2


def test_a_copy_that_hangs_fails_the_save_and_not_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_copy: threading.Event
) -> None:
    net, optimizer = trained(torch.optim.SGD, lr=0.1)
    states = {"model": net, "optimizer": optimizer}
    handle = bytecheckpoint.save(tmp_path / "step", states, timeout=0.1, **BACKGROUND)
    optimizer.step()
    with pytest.raises(
        CheckpointTimeoutError, match=r"its copy in the background took more than 0\.1 s, and SGD\.step ran"
    ):
        handle.result(60)
    assert not (tmp_path / "step" / "metadata.parquet").exists()
    bytecheckpoint.save(tmp_path / "step", states, **BACKGROUND).result(60)
    assert_equal(loaded(tmp_path / "step"), flat(net))


def test_a_failed_save_does_not_stop_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = trained(torch.optim.SGD, lr=0.1)

    def broken(self: Image, *arguments: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(Image, "stage", broken)
    handle = bytecheckpoint.save(tmp_path / "step", {"model": net}, **BACKGROUND)
    optimizer.step()
    with pytest.raises(CheckpointError, match="no memory"):
        handle.result(60)


def test_a_forked_child_waits_for_nothing(tmp_path: Path, slow_copy: threading.Event) -> None:
    net, optimizer = trained(torch.optim.SGD, lr=0.1)
    before = flat(net)
    handle = bytecheckpoint.save(tmp_path / "step", {"model": net}, **BACKGROUND)
    child = os.fork()
    if not child:
        optimizer.step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    slow_copy.set()
    handle.result(60)
    assert_equal(loaded(tmp_path / "step"), before)


def test_a_step_inside_of_a_done_callback(tmp_path: Path) -> None:
    """The thread that would copy for the second save is the one that steps: that save fails by name."""
    net, optimizer = trained(torch.optim.SGD, lr=0.1)
    first = bytecheckpoint.save(tmp_path / "1", {"model": net}, **BACKGROUND)
    stepped = threading.Event()
    second: list[Any] = []

    def step(_: object) -> None:
        while not second:
            pass
        optimizer.step()
        stepped.set()

    first.committed.add_done_callback(step)
    second.append(bytecheckpoint.save(tmp_path / "2", {"model": net}, **BACKGROUND))
    assert stepped.wait(30)
    with pytest.raises(UsageError, match=r"SGD\.step ran inside of a done-callback"):
        second[0].result(60)
    first.result(60)


def test_ranks_that_are_threads_wait_for_their_own_saves(tmp_path: Path) -> None:
    """One rank steps, behind which the others still make the call: its copy needs their plan."""

    def train(collective: Collective) -> None:
        net, optimizer = trained(torch.optim.SGD, lr=0.1)
        for number in range(3):
            if collective.rank:
                optimizer.step()
            with torch.no_grad():  # replicas
                for value in net.state_dict().values():
                    value.fill_(number)
            handle = bytecheckpoint.save(tmp_path / str(number), {"model": net}, **BACKGROUND)
            optimizer.step()
            handle.result(60)

    with using(writer="thread"):
        assert outcomes(ThreadWorld(3), train) == [None] * 3
    assert all((value == 2).all() for value in loaded(tmp_path / "2").values())


class Unseen(torch.optim.SGD):
    """An optimizer whose steps hooks do not see."""

    def __init__(self, parameters: Any) -> None:
        self.defaults = {"lr": 0.1}
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]
        self.state: Any = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(1)


def test_a_state_that_cannot_wait_is_copied_in_the_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    optimizer = Unseen(net.layers.parameters())
    before = flat(net)
    handle = bytecheckpoint.save(tmp_path / "step", {"model": net, "optimizer": optimizer}, **BACKGROUND)
    optimizer.step()
    handle.result(60)
    assert_equal(loaded(tmp_path / "step"), before)
    assert "copies in the call, not in the background: hooks do not see the steps of Unseen" in caplog.text


def test_a_wrapped_step(tmp_path: Path) -> None:
    """A schedule of torch wraps the step, and the hooks see it. They do not see a step that a program puts in its place."""
    net = Net()
    optimizer = torch.optim.SGD(net.layers.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    states = {"model": net, "optimizer": optimizer, "lr_scheduler": schedule}
    assert bytecheckpoint.save(tmp_path / "step", states, **BACKGROUND).result(60).staging == "background"
    optimizer.step = lambda: None
    assert bytecheckpoint.save(tmp_path / "step", states, **BACKGROUND).result(60).staging.startswith("blocking: ")


class Heir(NativeFramework):
    """An adapter of someone else's framework, which says nothing about the steps of its optimizers."""

    name = "heir"


def test_an_adapter_that_promises_nothing_is_copied_in_the_call(tmp_path: Path) -> None:
    net, _ = trained(torch.optim.SGD, lr=0.1)
    registry.register("heir", Heir)
    try:
        handle = bytecheckpoint.save(tmp_path / "step", {"model": net}, framework="heir", **BACKGROUND)
    finally:
        registry.unregister("heir")
    assert handle.result(60).staging == "blocking: heir may change parameters outside of optimizer steps"


def test_without_a_save_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = trained(torch.optim.SGD, lr=0.1)
    bytecheckpoint.save(tmp_path / "step", {"model": net}, **BACKGROUND).result(60)
    monkeypatch.setattr(step_fence, "wait_for_any", None)
    bytecheckpoint.fence()
    optimizer.step()
