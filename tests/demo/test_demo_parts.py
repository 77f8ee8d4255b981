"""The demo's model and data by themselves; the whole of it is `make demo`, and `demo/run.py --short` in CI."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

DEMO = Path(__file__).resolve().parents[2] / "demo"


def demo_module(name: str) -> ModuleType:
    # The demo's files are scripts that import each other from their own folder.
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMO / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


data = demo_module("data")
model = demo_module("model")


def text(count: int = 1000) -> torch.Tensor:
    return (torch.arange(count) % 251).to(torch.uint8)


def test_standard_library_text_is_the_same_on_every_call_and_large() -> None:
    first, second = data.standard_library_text(), data.standard_library_text()
    assert first.dtype == torch.uint8
    assert len(first) > 1_000_000
    assert torch.equal(first, second)


def test_targets_are_the_inputs_moved_by_one() -> None:
    inputs, targets = next(data.Batches(text(), length=16, batch=4))
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_one_global_batch(ranks: int) -> None:
    whole = data.Batches(text(), length=16, batch=8)
    parts = [data.Batches(text(), length=16, batch=8, rank=r, ranks=ranks) for r in range(ranks)]
    for _ in range(20):  # over the end of an epoch
        inputs, _ = next(whole)
        assert torch.equal(inputs, torch.cat([next(p)[0] for p in parts]))


@pytest.mark.parametrize("steps", [0, 1, 7, 8, 25])
def test_batches_resume_where_they_were_on_any_number_of_ranks(steps: int) -> None:
    whole = data.Batches(text(), length=16, batch=8, seed=3)
    for _ in range(steps):
        next(whole)
    state = whole.state_dict()
    parts = [data.Batches(text(), length=16, batch=8, rank=r, ranks=2) for r in range(2)]
    for part in parts:
        part.load_state_dict(state)
        assert part.state_dict() == state
    for _ in range(10):
        assert torch.equal(next(whole)[0], torch.cat([next(p)[0] for p in parts]))


def test_an_epoch_visits_every_sample_once() -> None:
    batches = data.Batches(text(16 * 40 + 1), length=16, batch=8)
    seen: Any = torch.cat([next(batches)[0] for _ in range(5)])
    assert len(torch.unique(seen, dim=0)) == 40
    assert batches.state_dict()["epoch"] == 0
    next(batches)
    assert batches.state_dict()["epoch"] == 1


def test_the_demos_model_has_about_ten_million_parameters() -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in model.GPT(model.SIZES["10M"]).parameters())
    assert 9_000_000 < count < 12_000_000


def test_the_model_sees_only_the_past() -> None:
    torch.manual_seed(0)
    gpt = model.GPT(model.SIZES["1M"])
    x = torch.randn(1, 12, model.SIZES["1M"].width)
    changed = x.clone()
    changed[:, 8:] += 1.0
    before, after = gpt.blocks[0](x), gpt.blocks[0](changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    torch.manual_seed(0)
    q, k = (model.rotate(torch.randn(8).expand(1, 1, 10, 8)) for _ in range(2))
    torch.testing.assert_close(q.norm(dim=-1), q.norm(dim=-1)[..., :1].expand(1, 1, 10))
    products = (q @ k.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(products[3, 1], products[9, 7])


def test_the_model_learns_a_sequence() -> None:
    torch.manual_seed(0)
    gpt = model.GPT(model.Size(layers=1, width=32, heads=2, context=16))
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.5)
    batches = data.Batches(text(), length=16, batch=16)
    losses = []
    for _ in range(30):
        loss = gpt(*next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
