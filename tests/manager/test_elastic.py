"""Ranks and machines that are lost under torchrun: the others go on, at their number, with equal losses.

`make test-elastic` runs this: most of its time torch is imported, or torchrun's agents wait for each other.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from demo.elastic import train
from tests.manager.agents import ElasticJob, kill
from tests.support.namespaces import cut_cable, inside, two_machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def check(job: ElasticJob, steps: int, ranks: list[int]) -> None:
    """Fail unless each step was done once, on numbers of ranks that follow each other so, with the losses of one rank."""
    train(str(job.folder / "alone"), steps, job.folder / "alone.jsonl")
    alone = ElasticJob(job.folder, 0, 0)
    alone.record = job.folder / "alone.jsonl"
    wanted = {facts["step"]: facts["loss"] for facts in alone.losses()}
    found = job.losses()
    assert [facts["step"] for facts in found] == [*range(1, steps + 1)], job.log
    assert {facts["step"]: facts["loss"] for facts in found} == pytest.approx(wanted, rel=1e-9)
    numbers = [facts["ranks"] for facts in found]
    assert [number for number, before in zip(numbers, [0, *numbers], strict=False) if number != before] == ranks


def saved_just_in_time(job: ElasticJob) -> int:
    """Return the step that was saved just in time; later saves may have retired it."""
    (step,) = {int(found) for found in re.findall(r"saved step (\d+) in [\d.]+ s, just in time", job.log)}
    return step


def test_one_machine_loses_a_rank(tmp_path: Path) -> None:
    """torchrun ends the other ranks by SIGTERM; they save before they go. No step is done twice."""
    with ElasticJob(tmp_path, 40, 0.1) as job:
        agent = job.start("1", 3)
        job.wait_for(23)
        kill([process for process in job.tree(agent) if process.environ().get("RANK") == "1"][:1])
        job.wait([agent])
        assert saved_just_in_time(job) >= 23
        check(job, 40, [3])


def test_a_machine_is_lost(tmp_path: Path) -> None:
    """Three agents on this machine, of which one ends with its rank: two ranks go on at once."""
    with ElasticJob(tmp_path, 60, 0.1) as job:
        agents = [job.start("2:3", 1) for _ in range(3)]
        job.wait_for(23)
        lost = next(agent for agent in agents[1:] if job.tree(agent))
        kill(job.tree(lost))
        job.wait([agent for agent in agents if agent != lost])
        assert saved_just_in_time(job) >= 23
        check(job, 60, [3, 2])


def test_a_machine_falls_silent(tmp_path: Path) -> None:
    """Its cable is cut, so nothing tells the other one, which has two ranks: they save after peer_timeout."""
    given = {"GLOO_SOCKET_IFNAME": "eth0", "BYTECHECKPOINT_PEER_TIMEOUT": "40"}  # gloo waits 60 s
    with two_machines() as machines, ElasticJob(tmp_path, 60, 0.1, "10.99.9.1") as job:
        first, second = [
            job.start("1:2", 2, within=inside(name), address=f"10.99.9.{number}", **given)
            for number, name in enumerate(machines, 1)
        ]
        job.wait_for(23)
        cut_cable(machines[1])
        kill(job.tree(second))
        job.wait([first])
        assert saved_just_in_time(job) >= 23
        check(job, 60, [4, 2])
