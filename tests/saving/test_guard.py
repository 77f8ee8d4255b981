"""With staging_guard, accesses to the memory of a tensor that is being copied wait; with staging_check="full" all shows."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import StateChangedError
from bytecheckpoint.engine.staging import Image
from tests.saving.test_fence import BACKGROUND, Net, assert_equal, flat, loaded
from tests.support.settings import using


@pytest.fixture
def guarded() -> Iterator[None]:
    """The guard, which stays in this process, but waits for saves of this test only."""
    with using(staging_guard=True):
        yield


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.2) -> threading.Event:
    """Let the copy begin after some seconds, or when the event is set."""
    begin = threading.Event()
    stage = Image.stage

    def late(self: Image, *arguments: object) -> None:
        begin.wait(seconds)
        stage(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Image, "stage", late)
    return begin


FEW: dict[str, Callable[[Net], object]] = {
    "data": lambda net: net.layers[0].weight.data[3].fill_(7),
    "numpy": lambda net: net.layers[0].weight.detach().numpy().__setitem__((3, 3), 7),
    "storage": lambda net: net.layers[0].weight.untyped_storage().__setitem__(100, 77),
    "dlpack": lambda net: torch.from_dlpack(net.layers[0].weight.detach())[3].fill_(7),
}


@pytest.mark.parametrize("kind", FEW)
def test_a_write_of_a_few_elements_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: None, kind: str
) -> None:
    slow(monkeypatch)
    net = Net()
    before = flat(net)
    handle = bytecheckpoint.save(tmp_path / "s", {"model": net}, **BACKGROUND)
    FEW[kind](net)
    assert handle.staged.done()
    handle.result(60)
    assert_equal(loaded(tmp_path / "s"), before)
    assert any(not torch.equal(value, before[name]) for name, value in flat(net).items())


@pytest.mark.parametrize("kind", FEW)
def test_the_full_check_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    begin = slow(monkeypatch, 60)
    begin.set()
    net = Net()
    with using(staging_check="full"):
        bytecheckpoint.save(tmp_path / "s", {"model": net}, **BACKGROUND).result(60)
        begin.clear()
        handle = bytecheckpoint.save(tmp_path / "s", {"model": net}, **BACKGROUND)
        FEW[kind](net)
        begin.set()
        with pytest.raises(StateChangedError, match=r"model/layers\.0\.weight changed"):
            handle.result(60)


def test_other_tensors_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: None) -> None:
    begin = slow(monkeypatch, 60)
    net, other = Net(), nn.Linear(4, 4)
    handle = bytecheckpoint.save(tmp_path / "s", {"model": net}, **BACKGROUND)
    other.weight.data.add_(1)
    other.weight.detach().numpy()
    net(torch.randn(8, 64)).sum().backward()
    assert not handle.staged.done()
    begin.set()
    handle.result(60)


def test_torch_works_beside_the_guard(tmp_path: Path, guarded: None) -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    compiled(torch.randn(8, 64))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    bytecheckpoint.save(tmp_path / "s", {"model": net}, **BACKGROUND).result(60)
    for _ in range(3):
        handle = bytecheckpoint.save(tmp_path / "s", {"model": net}, **BACKGROUND)
        compiled(torch.randn(8, 64)).sum().backward()
        handle.result(60)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    buffer = io.BytesIO()
    torch.save(copy.deepcopy(net).state_dict(), buffer)
    buffer.seek(0)
    assert_equal(flat(net), torch.load(buffer))
    net.to(torch.bfloat16).to(torch.float32)
