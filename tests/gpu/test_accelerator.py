"""Pinned staging, copies on streams, loads onto the device. Runs wherever torch has an accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bytecheckpoint
from tests.support.layouts import coded

pytestmark = pytest.mark.gpu


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


@pytest.mark.parametrize("mode", ["sync", "blocking", "background"])
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_device_tensors_round_trip(tmp_path: Path, mode: str, writer: str) -> None:
    bytecheckpoint.configure(writer=writer)
    full = {
        "large": coded((3000, 1111), torch.float32),
        "half": coded((700, 999), torch.bfloat16),
        "scalar": coded((), torch.int64),
    }
    state = {name: tensor.to(device()) for name, tensor in full.items()}
    state["strided"] = state["large"].t()[::2]
    for _ in range(3):
        asynchronous = {"async_checkpoint": True, "staging": mode} if mode != "sync" else {}
        handle = bytecheckpoint.save(tmp_path / "s", {"model": state}, **asynchronous)
        handle.staged.result(60)
        handle.result(60)
    destination = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    bytecheckpoint.load(tmp_path / "s", {"model": destination})
    for name, tensor in state.items():
        assert torch.equal(destination[name], tensor), name
        assert destination[name].device == tensor.device


@pytest.mark.parametrize("state", ["model", "extra_states"])
def test_changes_after_staging_do_not_reach_the_checkpoint(tmp_path: Path, state: str) -> None:
    tensor = coded((4 << 20,), torch.float32).to(device())
    expected = tensor.cpu()
    handle = bytecheckpoint.save(tmp_path / "s", {state: {"w": tensor}}, async_checkpoint=True)
    tensor.zero_()
    handle.result(60)
    assert torch.equal(bytecheckpoint.open(tmp_path / "s")[f"{state}/w"][...], expected)


def test_training_resumes_exactly_on_the_device(tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = model(torch.ones(8, 64, device=device())).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = build()
    steps(model, optimizer, 3)
    bytecheckpoint.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    expected = steps(model, optimizer, 5)
    other, fresh = build()
    bytecheckpoint.load(tmp_path / "s", {"model": other, "optimizer": fresh})
    assert steps(other, fresh, 5) == expected


def test_random_numbers_go_on_and_are_new_at_another_layout(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return torch.rand(3, device=device()).tolist()

    states = {"rng": bytecheckpoint.rng_state()}
    bytecheckpoint.save(tmp_path / "s", states)
    wanted = draw()
    assert not bytecheckpoint.load(tmp_path / "s", states).notes
    assert draw() == wanted
    found = []
    for rank in (0, 1, 0):
        states = {"rng": bytecheckpoint.rng_state(rank=rank, ranks=2)}
        assert "are seeded anew" in bytecheckpoint.load(tmp_path / "s", states).notes[0]
        found.append(draw())
    assert found[0] == found[2] != found[1] != wanted != found[0]
