"""The interval that loses least."""

from __future__ import annotations

import json
import math
import random
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from bytecheckpoint import CheckpointManager
from bytecheckpoint.cli.main import run
from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager import Interval, plan_interval


def simulated(interval: float, stall: float, write: float, mtbf: float, restart: float) -> float:
    """Train through random failures, saving at an interval; return the share of the time that counts."""
    chance = random.Random(7)
    now = done = 0.0  # time, and training that is committed
    failures = 3000
    for _ in range(failures):
        until = chance.expovariate(1 / mtbf)
        # A save begins every `interval` seconds, and its training counts if the save is committed before the failure.
        saves = max(math.floor((until - write) / interval), 0)
        done += saves * (interval - stall)
        now += until + restart
    return done / now


@pytest.mark.parametrize(
    ("stall", "write", "mtbf", "restart"),
    [(0.5, 4, 7200, 60), (5, 10, 86400, 300), (30, 30, 3600, 0), (60, 60, 900, 30)],
)
def test_no_other_interval_loses_less(stall: float, write: float, mtbf: float, restart: float) -> None:
    plan = plan_interval(stall, write, mtbf, restart=restart)
    best = simulated(plan.seconds, stall, write, mtbf, restart)
    others = [simulated(plan.seconds * factor, stall, write, mtbf, restart) for factor in (0.25, 0.5, 2, 4)]
    assert best > max(others) - 2e-3
    assert plan.why == "failures"
    if stall < mtbf / 100:
        assert abs(best - plan.effective) < 0.02


def test_what_bounds_the_interval() -> None:
    assert plan_interval(0, 40, 3600).seconds == 40
    assert plan_interval(0.01, 400, 3600).why == "write time"
    bounded = plan_interval(1.0, 1.0, 600, most_stall=0.01)
    assert bounded.why == "bound on stalls" and bounded.seconds == 100 and bounded.stall_share == pytest.approx(0.01)
    assert plan_interval(100, 100, 60).effective == 0


def test_bad_numbers() -> None:
    for arguments in ((-1, 0, 1), (0, math.nan, 1), (0, 0, 0), (0, 0, math.inf)):
        with pytest.raises(UsageError):
            plan_interval(*arguments)
    for share in (0, 1, 3):
        with pytest.raises(UsageError, match="share of the time"):
            plan_interval(1, 1, 1, most_stall=share)
    with pytest.raises(UsageError, match="mtbf"):
        Interval(timedelta(0))
    with pytest.raises(UsageError, match="first"):
        Interval(timedelta(1), first=timedelta(0))


def test_a_run_finds_its_interval(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    every = Interval(timedelta(seconds=60), first=timedelta(seconds=0.05))
    with CheckpointManager(tmp_path, {"model": {"w": torch.zeros(10)}}, every=every) as manager:
        for step in range(1, 400):
            if manager.maybe_save(step) is not None:
                manager.wait()
                break
            time.sleep(0.005)
    assert manager.latest() is not None
    assert every.seconds != 0.05 and "saving every" in caplog.text and "decided by" in caplog.text


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "plan-interval",
        "--stall",
        "0.5s",
        "--write",
        "40",
        "--mtbf",
        "4000h",
        "--machines",
        "1000",
        "--step-time",
        "2s",
    ]
    assert run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 60 and found["why"] == "failures" and found["seconds_between_failures"] == 14400
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert "save every 119.7 s, which is every 60 steps (decided by: failures)" in out
    assert "training that counts: 98.89%" in out
    assert run(["plan-interval", "--stall", "x", "--write", "1", "--mtbf", "1h"]) == 2
