"""Checkpoints that share files of frozen parameters: flushed, replicated and moved, each is complete alone."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from bytecheckpoint.collectives import current
from bytecheckpoint.engine.earlier_files import EarlierFiles
from bytecheckpoint.tiers.cooldown import cool, plan_cooldown
from bytecheckpoint.world import world_of
from tests.support.frozen import Training, check_alone, frozen_file, save_steps
from tests.support.memory import durable_folder, hot_folder
from tests.support.system_calls import failing
from tests.tiers import machines as jobs
from tests.tiers.test_machines import Cluster, cluster

__all__ = ["cluster"]


def save_here(run: str, *steps: int) -> list[int]:
    """Save steps of a training from this process, each until it is flushed; return the adopted bytes."""
    world_of(current()).resources.earlier = EarlierFiles()
    training = Training()
    adopted = []
    for step in steps:
        adopted.append(training.save(f"{run}/{step}").bytes_adopted)
        world_of(current()).flusher.drain()
    return adopted


def files(folder: Path) -> set[int]:
    """Return the inodes of the frozen files of all steps in a folder."""
    return {file.stat().st_ino for file in folder.glob("*/model/*-p001*")}


@pytest.mark.parametrize("links", [True, False])
def test_a_flush_shares_files_with_the_step_before(links: bool, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    durable = durable_folder(run)
    if not links:
        failing(monkeypatch, "link", errno.EPERM, lambda _, new: new.startswith(str(durable)) and "-p001" in new)
    first, *others = save_here(run, 1, 2, 3)
    assert first == 0 and min(others) > 10**6
    assert len(files(durable)) == (1 if links else 3)
    shutil.rmtree(durable / "1")
    shutil.rmtree(hot_folder(f"{run}/3").parent)
    check_alone(durable / "3", 3)
    shutil.rmtree(durable / "3")
    check_alone(durable / "2", 2)


def test_a_damaged_durable_file_is_not_shared(run: str) -> None:
    save_here(run, 1)
    file = frozen_file(durable_folder(run) / "1")
    file.write_bytes(file.read_bytes()[:900] + b"?" + file.read_bytes()[901:])
    world = world_of(current()).resources.earlier
    training = Training()
    training.step()
    world_of(current()).resources.earlier = world
    assert training.save(f"{run}/2").bytes_adopted > 10**6
    world_of(current()).flusher.drain()
    check_alone(durable_folder(run) / "2", 2)


def test_a_path_behind_a_tier_is_saved_again(run: str) -> None:
    assert save_here(run, 1, 1, 1)[2] > 10**6
    check_alone(durable_folder(run) / "1", 3)
    shutil.rmtree(durable_folder(run) / "1")
    check_alone(hot_folder(f"{run}/1"), 3)


@pytest.mark.parametrize("links", [True, False])
def test_cooled_steps_share_files(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path / "run", 1, 2, 3, 4)
    if not links:
        failing(monkeypatch, "link", errno.EPERM, lambda _, new: "-p001" in new)
    plan = plan_cooldown(str(tmp_path / "run"), str(tmp_path / "cold"), older_than=0, now=time.time() + 10)
    assert [cool(step).error for step in plan] == [""] * 4
    assert len(files(tmp_path / "cold")) == (1 if links else 3)
    assert os.stat(frozen_file(tmp_path / "run/step_4")).st_nlink == 1
    for step in (1, 3):
        shutil.rmtree(tmp_path / f"cold/step_{step}")
    check_alone(tmp_path / "cold/step_2", 2)
    check_alone(tmp_path / "run/step_2", 2)
    check_alone(tmp_path / "run/step_4", 4)


@pytest.mark.timeout(240)
def test_partners_keep_the_files_that_they_have(cluster: Cluster, run: str) -> None:
    job = cluster.start(0, 1)
    for first, *others in job.run(jobs.save_frozen, run, [1, 2, 2]):
        for later in others:
            kept = first.keys() & later.keys()
            assert len(kept) == 2 and all(first[name] == later[name] for name in kept)  # of this rank, and of the other
    job.kill()
    # Each machine has everything, also if the other one and the durable storage are lost.
    shutil.rmtree(durable_folder(run))
    cluster.lose(1)
    check_alone(cluster.step_in(0, f"{run}/2"), 3)
