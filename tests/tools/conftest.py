"""Checkpoints to work on: made once, copied for each test that damages them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from tests.support.layouts import Leaf, coded, grid_boxes
from tests.support.settings import writer_threads

__all__ = ["writer_threads"]

SHAPE = (48, 40)


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(4)).sum().backward()
    optimizer.step()
    return layer, optimizer


def save_layout(path: Path, ranks: int, cuts: list[list[int]], *, epoch: int = 1, salt: int = 0) -> None:
    """Save two tensors in the boxes between `cuts`, dealt out to ranks, an optimizer, a shared and a per-rank value."""
    boxes = grid_boxes(SHAPE, cuts)
    replicas = [_trained() for _ in range(ranks)]  # here, since threads share one random number generator

    def save(collective: Collective) -> None:
        rank = collective.rank
        layer, optimizer = replicas[rank]
        states = {
            "model": {
                "w": Leaf(SHAPE, boxes[rank::ranks]).fill(coded(SHAPE, torch.float32, salt), False),
                "n": Leaf(SHAPE, boxes[rank::ranks]).fill(coded(SHAPE, torch.int64), False),
            },
            "layer": layer,
            "optimizer": optimizer,
            "extra_states": {"epoch": epoch, "rng": torch.tensor([rank]), "rank": rank},
        }
        bytecheckpoint.save(path, states, timeout=30)

    ThreadWorld(ranks).run(save, timeout=60)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three ranks, which no test changes."""
    path = tmp_path_factory.mktemp("saved") / "step_1"
    save_layout(path, 3, [[10, 30], [17]])
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved` for a test to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))
