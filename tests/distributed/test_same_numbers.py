# ruff: noqa: NPY002  the old functions draw from the generator of the process
"""A program draws the same random numbers with checkpoints, without them, and after a resume in the middle of an epoch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import bytecheckpoint
from bytecheckpoint.dataloader import ResumableLoader, ResumableSampler
from bytecheckpoint.manager import CheckpointManager
from tests.support.variants import quick
from tests.support.worlds import Worlds

STEPS, PER_EPOCH = 14, 5


def train(root: Path | None, last: int = STEPS) -> list[tuple[float, ...]]:
    """Train to a step; return what each step has drawn."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7 + rank)
    net = nn.Sequential(nn.Linear(4, 64), nn.Dropout(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    data = torch.arange(PER_EPOCH * 2 * ranks * 4.0).reshape(-1, 4)
    sampler = ResumableSampler(data, 2 * ranks, rank=rank, ranks=ranks)
    loader = ResumableLoader(DataLoader(data, batch_sampler=sampler))  # type: ignore[arg-type]
    step: dict[str, Any] = {"n": 0}
    states: dict[str, Any] = {"loader": loader, "rng": bytecheckpoint.rng_state(), "extra_states": step}
    states |= {f"model{rank}": net, f"optimizer{rank}": optimizer}
    manager, found = None, []
    if root is not None:
        manager = CheckpointManager(root, states, every=1, keep=2)
        manager.restore_latest()
    while step["n"] < last:
        for rows in loader:
            optimizer.zero_grad()
            (loss := net(rows).square().mean()).backward()
            optimizer.step()
            step["n"] += 1
            found.append(
                (step["n"], rows.sum().item(), loss.item(), random.random(), np.random.rand(), torch.rand(()).item())
            )
            if manager is not None:
                manager.maybe_save(step["n"])
            if step["n"] == last:
                break
    if manager is not None:
        manager.close()
    return found


@pytest.mark.parametrize("at", quick([1, 3, 5, 8], every=2))
def test_a_resume_draws_what_the_job_would_have_drawn(tmp_path: Path, at: int) -> None:
    expected = train(None)
    assert train(tmp_path, at) == expected[:at]
    assert train(tmp_path, STEPS) == expected[at:]


def test_checkpoints_change_no_number(worlds: Worlds, tmp_path: Path) -> None:
    """In new processes, whose first connections are made by a save."""
    world = worlds.fresh(2)
    assert world.run(train, tmp_path) == worlds.get(2).run(train, None)
