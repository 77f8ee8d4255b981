"""kill -9 of a job that copies each step behind the next one: it goes on with equal losses, however often."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.manager import CheckpointManager, SaveOptions
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import verify
from tests.support.processes import wait_until
from tests.support.worlds import Worlds


class Adapted(nn.Module):
    """A frozen weight, whose file the steps share, a trained one of two pieces, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.rand(64, 8192), requires_grad=False)
        self.norm = nn.BatchNorm1d(64)
        self.large = nn.Parameter(torch.rand(64, 40_000))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.norm(rows)
        return (rows @ self.base).square().mean() + (rows @ self.large).square().mean()


def train(folder: Path, steps: int, *, writer: str) -> None:
    """Train to a step, from the newest checkpoint, with a save behind each step. Without a writer: without saves."""
    torch.manual_seed(3)
    net = Adapted()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-4)
    states = {"model": net, "optimizer": optimizer, "extra_states": (extra := {"step": 0})}
    manager = None
    if writer:
        bytecheckpoint.configure(writer=writer)
        options = SaveOptions(staging="background", incremental=True)
        manager = CheckpointManager(folder / "run", states, every=1, keep=2, save_options=options)
        manager.restore_latest()
    with (folder / f"losses-{bool(writer)}").open("a") as file:
        while extra["step"] < steps:
            extra["step"] += 1
            optimizer.zero_grad()
            rows = torch.rand(16, 64, generator=torch.Generator().manual_seed(extra["step"]))
            (loss := net(rows)).backward()
            optimizer.step()
            file.write(f"{extra['step']} {loss.item().hex()}\n")
            file.flush()
            if manager is not None:
                manager.maybe_save(extra["step"])
    if manager is not None:
        manager.close()


def losses(folder: Path, *, saves: bool) -> list[tuple[int, str]]:
    path = folder / f"losses-{saves}"
    # A killed job may leave a part of a line.
    lines = (
        [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if path.exists()
        else []
    )
    return [(int(step), loss) for step, loss in lines]


def kill_jobs(worlds: Worlds, folder: Path, kills: int, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(kills):
        enough = len(losses(folder, saves=True)) + dice.randrange(0, 5)
        job = worlds.fresh(1).start(train, folder, 1_000_000, writer=dice.choice(["process", "thread", "thread"]))
        assert wait_until(lambda enough=enough: len(losses(folder, saves=True)) >= enough, 60)
        time.sleep(dice.uniform(0, 0.15))
        job.kill()
    last = max(step for step, _ in losses(folder, saves=True)) + 3
    for writer in ("thread", ""):
        worlds.fresh(1).run(train, folder, last, writer=writer)


def check(worlds: Worlds, folder: Path, kills: int, seed: int) -> None:
    kill_jobs(worlds, folder, kills, seed)
    found, expected = losses(folder, saves=True), dict(losses(folder, saves=False))
    assert [step for step, loss in found if loss != expected[step]] == []
    # At most the two saves that were in flight are lost in each kill.
    assert all(later - step in (1, 0, -1) for (step, _), (later, _) in pairwise(found)), found
    last = found[-1][0]
    steps = {
        path.parent.name: path.parent for path in (folder / "run").glob("*/metadata.parquet")
    }  # others lie in grace
    assert f"step_{last:08}" in steps
    assert [name for name, path in steps.items() if not verify(resolve(path)).ok] == []
    print(f"\n{kills} kills, {last} steps, {len(found)} with repeats")


@pytest.mark.timeout(200)
def test_killed_in_the_background(worlds: Worlds, tmp_path: Path) -> None:
    check(worlds, tmp_path, 5, seed=20240720)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_two_hundred_times(worlds: Worlds, tmp_path: Path) -> None:
    check(worlds, tmp_path, 200, seed=time.time_ns() % 1000)
