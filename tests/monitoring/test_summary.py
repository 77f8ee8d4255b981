"""Summaries of operations: phases, stragglers, the critical path."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from bytecheckpoint.monitoring.analysis.summary import RankFailure, summarize
from bytecheckpoint.monitoring.simulation import Fault, SimulatedRun
from tests.support.metrics_runs import simulated


def test_everybody_waits_for_the_slow_rank() -> None:
    *_, save = simulated(Fault("slow", [5], "write", first=9))
    (slow,) = save.stragglers
    assert (slow.rank, slow.phase, slow.host) == (5, "write", "host-0000")
    assert slow.seconds == pytest.approx(5 * slow.median, rel=0.3)
    assert [(phase, rank) for phase, rank, _, _ in save.critical_path][-3:] == [
        ("write", 5),
        ("finish", 5),
        ("commit", 5),
    ]
    begins_and_ends = [(begin, begin + seconds) for _, _, begin, seconds in save.critical_path]
    assert all(end == pytest.approx(begin, abs=1e-3) for (_, end), (begin, _) in pairwise(begins_and_ends))
    assert begins_and_ends[-1][1] == pytest.approx(save.seconds, rel=1e-3)


@pytest.mark.parametrize("phase", ["destination", "read"])
def test_the_slow_rank_of_a_load(phase: str) -> None:
    run = SimulatedRun({"dp": 8}, loads=1, saves=0)
    (load,) = map(summarize, run.records())
    assert load.kind == "load" and not load.stragglers
    assert [part for part, *_ in load.critical_path] == [
        "catalog",
        "agree",
        "destination",
        "plan",
        "agree",
        "read",
        "apply",
    ]


def test_the_first_plan_is_a_meeting() -> None:
    first = simulated(Fault("slow", [3], "capture", factor=100))[1]
    assert [part[:2] for part in first.critical_path[:2]] == [("capture", 3), ("plan", 3)]
    assert first.stragglers[0].phase == "capture"


def test_sums() -> None:
    load, first, *_ = simulated()
    assert (load.kind, first.kind, first.step, first.world_size, first.hosts) == ("load", "save", 100, 8, 1)
    assert first.nbytes == pytest.approx(8 << 30, rel=0.05) and 1 <= first.balance < 1.1
    assert first.bandwidth == pytest.approx(8 * 250e6, rel=0.3)
    assert [phase.name for phase in first.phases] == ["wait", "capture", "plan", "stage", "write", "finish", "commit"]
    assert first.blocking_seconds == pytest.approx(sum(p.median for p in first.phases[:4]), rel=0.2)
    assert first.totals["write"][0] == 64 and not first.failed and not first.missing


def test_failures_missing_ranks_and_retries() -> None:
    summaries = simulated(
        Fault("fail", [6], "write", first=1, last=1),
        Fault("missing", [2], first=2, last=2),
        Fault("retry", [1], first=3),
    )
    failed, missing, retried = summaries[2:5]
    assert failed.failed and len(failed.failures) == 8 and failed.first_failure.rank == 6
    assert missing.missing == (2,) and not missing.failed
    assert (retried.retries, retried.most_retries) == (5, (1, 2.5))


def test_thousands_of_ranks() -> None:
    run = SimulatedRun(
        {"pp": 8, "dp": 140, "tp": 8}, saves=1, loads=0, faults=[Fault("slow", [77, 78, 8959], "stage", 20)]
    )
    (save,) = map(summarize, run.records())
    assert {slow.rank for slow in save.stragglers} == {77, 78, 8959}


def test_replicas_spare_nothing_in_a_save_that_fails() -> None:
    *_, done = simulated(saves=1)
    assert replace(done, totals={"left to others": (1, 0.0, done.nbytes)}).spared_share == 0.5
    failed = replace(
        done, totals={"left to others": (1, 0.0, 100)}, nbytes=0, failures=(RankFailure(0, "write", "no"),)
    )
    assert failed.spared_share == 0.0
