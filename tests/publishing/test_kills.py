"""A publisher and a follower that are killed again and again, over thirty versions."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bytecheckpoint import CheckpointNotFoundError
from bytecheckpoint.cli.main import run
from bytecheckpoint.manager.run_folder import RunFolder
from bytecheckpoint.publishing import Follower, Publisher

STEPS = 30


def weights_at(step: int) -> torch.Tensor:
    """Return weights after some steps, each of which changes one element of fifty."""
    seed = torch.Generator().manual_seed(0)
    weights = torch.randn(300, 1000, generator=seed).to(torch.bfloat16)
    for _ in range(step):
        changed = torch.randint(0, weights.numel(), (weights.numel() // 50,), generator=seed)
        weights.view(-1)[changed] += 0.25
    return weights


def publish_to_the_end(root: str) -> None:
    """Publish the steps behind the newest one there."""
    newest = RunFolder(root).newest()
    with Publisher(root, full_every=7) as publisher:
        for step in range(1 if newest is None else newest.step + 1, STEPS + 1):
            publisher.publish({"model": {"w": weights_at(step)}}, step)
            time.sleep(0.1)  # so that it lives through several kills


def follow_to_the_end(root: str, seen: str) -> None:
    """Follow, and note each version whose weights are right."""
    follower, states = Follower(root), {"model": {"w": torch.zeros(300, 1000, dtype=torch.bfloat16)}}
    while follower.version is None or follower.version.step < STEPS:
        with contextlib.suppress(CheckpointNotFoundError):
            if (report := follower.update(states)) is not None:
                assert torch.equal(states["model"]["w"], weights_at(report.step)), report
                with open(seen, "a") as file:
                    file.write(f"{report.step} {report.versions}\n")
        time.sleep(0.05)


@pytest.mark.timeout(240)
def test_thirty_versions_with_kills_of_publisher_and_follower(tmp_path: Path) -> None:
    root, seen, pace = str(tmp_path / "versions"), tmp_path / "seen", random.Random(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "bytecheckpoint", "tests.support.versions"])
    targets = {"publisher": (publish_to_the_end, (root,)), "follower": (follow_to_the_end, (root, str(seen)))}
    alive: dict[str, Any] = {}
    kills = 0
    while not alive or any(process.is_alive() for process in alive.values()) or kills < 6:
        for name, (target, arguments) in targets.items():
            if name not in alive or (alive[name].exitcode or 0) < 0:
                alive[name] = context.Process(target=target, args=arguments)
                alive[name].start()
        if kills < 6:
            time.sleep(pace.uniform(0.2, 1.5))
            name = ("publisher", "follower")[kills % 2]
            if alive[name].is_alive():
                os.kill(alive[name].pid, signal.SIGKILL)
            alive[name].join()
            kills += 1
        else:
            time.sleep(0.05)
    assert [process.exitcode for process in alive.values()] == [0, 0]
    found = [tuple(map(int, line.split())) for line in seen.read_text().splitlines()]
    assert found[-1][0] == STEPS and any(versions for _, versions in found)
    assert run(["verify", f"{root}/step_{STEPS:08d}"]) == 0
