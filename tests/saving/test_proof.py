"""A copy in the background holds the state of the call, or the save fails and names what changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import CheckpointError, StateChangedError
from bytecheckpoint.collectives import Collective, ThreadWorld, current
from bytecheckpoint.engine.pieces import PIECE_BYTES, SharedCopy
from bytecheckpoint.engine.staging import Image
from bytecheckpoint.saving.background import StateProof
from bytecheckpoint.world import world_of
from tests.support.ranks import outcomes
from tests.support.settings import using

BACKGROUND: dict[str, Any] = {"async_checkpoint": True, "staging": "background"}


class Net(nn.Module):
    """A parameter of three pieces, a transposed one, one element, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.arange(5.5e6))
        self.turned = nn.Parameter(torch.arange(600.0).reshape(20, 30).t())
        self.one = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(64), requires_grad=False)


class Gate:
    """Stops the copy in front of one piece of `large`, or before it begins (-1), until the test opens the gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, number: int) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        copy, stage = SharedCopy._copy, Image.stage

        def stop() -> None:
            self.reached.set()
            assert self.open.wait(30)

        def copying(this: SharedCopy, piece: int) -> bool:
            if piece == number and threading.current_thread().name.startswith("bytecheckpoint-save"):
                stop()
            return copy(this, piece)

        def staging(this: Image, *arguments: Any) -> None:
            if number < 0:
                stop()
            stage(this, *arguments)

        monkeypatch.setattr(SharedCopy, "_copy", copying)
        monkeypatch.setattr(Image, "stage", staging)


def no_grad(change: Callable[[Net], object]) -> Callable[[Net], None]:
    def run(net: Net) -> None:
        with torch.no_grad():
            change(net)

    return run


#: Changes of a single element, or of all; those of torch's operations are named whatever they change.
VERSIONED = {
    "in place": no_grad(lambda net: net.large.add_(1)),
    "one element": no_grad(lambda net: net.large.__setitem__(12345, 7.0)),
    "foreach": no_grad(lambda net: torch._foreach_add_([net.turned, net.large], 1.0)),
    "load_state_dict": lambda net: net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}),
}
RAW = {
    "data": lambda net: net.large.data.mul_(3),
    "numpy": lambda net: net.large.detach().numpy().fill(7),
    "storage": lambda net: net.large.untyped_storage().fill_(3),
    "end of a piece": lambda net: net.large.data[PIECE_BYTES // 4 : 2 * PIECE_BYTES // 4][-2:].fill_(7),
    "half": lambda net: net.large.data[:3_000_000].fill_(7),
}
#: Small tensors are copied before the pieces of large ones.
RAW_SMALL = {
    "turned": lambda net: net.turned.data.mul_(3).add_(1),
    "one element of one": lambda net: net.one.data.fill_(7),
    "frozen": lambda net: net.frozen.data.fill_(7),
}
EXCHANGES = {
    "data =": lambda net: setattr(net.large, "data", torch.zeros(3)),
    "swap": lambda net: torch.utils.swap_tensors(net.large, nn.Parameter(torch.zeros(5))),
}


def save_and_change(path: Path, net: Net, change: Callable[[Net], object], gate: Gate) -> Any:
    handle = bytecheckpoint.save(path, {"model": net}, **BACKGROUND)
    assert gate.reached.wait(30)
    change(net)
    gate.open.set()
    return handle.result(60)


@pytest.mark.parametrize(("kind", "piece"), [*product([*VERSIONED, *RAW], [-1, 0, 1]), *product(RAW_SMALL, [-1])])
def test_a_change_during_the_copy_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, piece: int
) -> None:
    net = Net()
    with pytest.raises(
        StateChangedError, match=r"model/(large|turned|one|frozen).* changed while .*fence\(\)"
    ) as caught:
        save_and_change(tmp_path / "s", net, (VERSIONED | RAW | RAW_SMALL)[kind], Gate(monkeypatch, number=piece))
    assert caught.value.tensors and caught.value.tensors[0].startswith("model/")
    assert not (tmp_path / "s").exists()
    assert world_of(current()).resources.pools.private == [], "the memory of a failed copy"
    monkeypatch.undo()
    bytecheckpoint.save(tmp_path / "s", {"model": net}, **BACKGROUND).result(60)


@pytest.mark.parametrize("kind", EXCHANGES)
def test_an_exchange_of_memory_leaves_the_copy_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    save_and_change(tmp_path / "s", Net(), EXCHANGES[kind], Gate(monkeypatch, number=1))
    found = Net()
    with torch.no_grad():
        found.large.zero_()
    bytecheckpoint.load(tmp_path / "s", {"model": found})
    assert torch.equal(found.large, Net().large)


def test_the_fence_names_a_change_that_came_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the copying thread would not: the state is as it was again when the copy is compared."""
    net, gate = Net(), Gate(monkeypatch, number=0)
    monkeypatch.setattr(StateProof, "check", lambda *_: None)
    handle = bytecheckpoint.save(tmp_path / "s", {"model": net}, **BACKGROUND)
    assert gate.reached.wait(30)
    with torch.no_grad():
        net.one.add_(1)
    bytecheckpoint.fence()
    gate.open.set()
    with pytest.raises(StateChangedError, match="model/one"):
        handle.result(60)


def test_an_operation_that_is_at_work_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote first is copied already. Its counter rises at its end, and the copy may hold what it wrote last."""
    with pytest.raises(StateChangedError, match="model/large"):
        save_and_change(tmp_path / "s", Net(), lambda net: net.large.data[:1000].fill_(7), Gate(monkeypatch, number=1))


def test_a_pool_smaller_than_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes pass through the pool, so the state itself is sampled again."""
    net = Net()
    states = {"model": net}
    bytecheckpoint.save(tmp_path / "0", states, **BACKGROUND).result(60)
    read = StateProof.check

    def late(self: StateProof, *arguments: Any) -> None:
        net.large.data.fill_(7)
        read(self, *arguments)

    with using(staging_bytes=4 << 20, chunk_bytes=1 << 20):
        bytecheckpoint.release_memory()
        bytecheckpoint.save(tmp_path / "1", states, **BACKGROUND).result(60)
        monkeypatch.setattr(StateProof, "check", late)
        with pytest.raises(StateChangedError, match="model/large"):
            bytecheckpoint.save(tmp_path / "2", states, **BACKGROUND).result(60)
    found = Net()
    bytecheckpoint.load(tmp_path / "1", {"model": found})
    assert torch.equal(found.large, Net().large)


def test_a_change_on_one_rank_fails_the_save_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = threading.Event()
    check = StateProof.check
    monkeypatch.setattr(StateProof, "check", lambda *a: (changed.wait(30), check(*a))[1])

    def one(collective: Collective) -> str:
        net = Net()
        handle = bytecheckpoint.save(tmp_path / "s", {"model": net}, check_replicas="off", **BACKGROUND)
        if collective.rank == 1:
            with torch.no_grad():
                net.one.add_(1)
            changed.set()
        with pytest.raises(StateChangedError) as caught:
            handle.result(60)
        assert caught.value.tensors == ("model/one",)
        monkeypatch.undo()
        bytecheckpoint.save(tmp_path / "s", {"model": Net()}, **BACKGROUND).result(60)
        return str(caught.value)

    with using(writer="thread"):
        texts = outcomes(ThreadWorld(2), one)
    assert [text[:20] for text in texts] == ["rank 1, stage: model"] * 2, texts


def test_a_step_takes_part_in_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copying thread stops at the first piece; the step copies the others, from the end."""
    net, gate = Net(), Gate(monkeypatch, number=0)
    copies = []
    init = SharedCopy.__init__
    monkeypatch.setattr(SharedCopy, "__init__", lambda self: (copies.append(self), init(self))[1])
    handle = bytecheckpoint.save(tmp_path / "s", {"model": net}, **BACKGROUND)
    assert gate.reached.wait(30)
    step = threading.Thread(target=bytecheckpoint.fence)
    step.start()
    while copies[0].helped < net.large.nbytes - PIECE_BYTES:
        assert step.is_alive()
    gate.open.set()
    step.join()
    report = handle.result(60)
    assert 0 < report.fence_seconds <= report.blocking_seconds
    found = Net()
    with torch.no_grad():
        found.large.zero_()
    bytecheckpoint.load(tmp_path / "s", {"model": found})
    assert torch.equal(found.large, net.large)


def test_a_second_save_waits_for_the_first_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of a fence begins when the earlier save has ended, which has limits of its own."""
    net, gate = Net(), Gate(monkeypatch, number=0)
    first = bytecheckpoint.save(tmp_path / "1", {"model": net}, **BACKGROUND)
    assert gate.reached.wait(30)
    second = bytecheckpoint.save(tmp_path / "2", {"model": net}, timeout=3.0, **BACKGROUND)
    threading.Timer(4.0, gate.open.set).start()
    bytecheckpoint.fence()
    first.result(60), second.result(60)


def closures() -> list[tuple[type[torch.optim.Optimizer], dict[str, Any], bool]]:
    class Own(torch.optim.SGD):
        """Changes the weights before it calls the closure, as SAM does."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(1)
            return super().step(closure)

    known: list[type[torch.optim.Optimizer]] = [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS]
    return [*((make, {"lr": 0.1}, True) for make in known), (Own, {"lr": 0.1}, False)]


@pytest.mark.parametrize(("make", "options", "late"), closures())
@pytest.mark.parametrize("keyword", [True, False])
def test_a_closure_runs_before_the_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, options: dict[str, Any], late: bool, keyword: bool
) -> None:
    net, gate = Net(), Gate(monkeypatch, number=0)
    optimizer = make([net.large, net.one], **options)
    seen: list[bool] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net.large[:5].sum() + net.one.sum()
        loss.backward()
        seen.append(gate.open.is_set())  # else the fence has not waited
        gate.open.set()
        return loss

    handle = bytecheckpoint.save(tmp_path / "s", {"model": net}, **BACKGROUND)
    assert gate.reached.wait(30)
    if not late:
        threading.Timer(0.2, gate.open.set).start()
    optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    assert seen[0] is not late
    handle.result(60)
    found = Net()
    bytecheckpoint.load(tmp_path / "s", {"model": found})
    assert torch.equal(found.large, Net().large) and torch.equal(found.one, Net().one)


def test_a_closure_that_raises_leaves_the_save_whole(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = bytecheckpoint.save(tmp_path / "s", {"model": net}, **BACKGROUND)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    bytecheckpoint.fence()
    handle.result(60)


def test_a_fence_never_raises_into_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, gate = Net(), Gate(monkeypatch, number=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = bytecheckpoint.save(tmp_path / "s", {"model": net}, **BACKGROUND)

    def broken(_: SharedCopy) -> None:
        raise RuntimeError("a broken fence")

    monkeypatch.setattr(SharedCopy, "take_part", broken)
    optimizer.step()
    gate.open.set()
    with pytest.raises(CheckpointError, match="a broken fence"):
        handle.result(60)
