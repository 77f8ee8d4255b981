"""When to save and what to keep."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager import (
    AtSteps,
    Best,
    Cadence,
    Every,
    EverySeconds,
    EverySteps,
    Interval,
    Latest,
    Preemption,
    Retention,
    StepInfo,
    Younger,
)


def due(every: Any, boundaries: range) -> list[int]:
    cadence = Cadence(every)
    return [step for before, step in pairwise(boundaries) if cadence.due(step, before)]


def test_when_to_save() -> None:
    assert due(5, range(17)) == [5, 10, 15]
    assert due(5, range(0, 30, 3)) == [6, 12, 15, 21, 27]  # the first boundary at or after each multiple
    assert due([10, AtSteps([3, 12])], range(21)) == [3, 10, 12, 20]
    assert due(lambda step: step in (2, 4), range(9)) == [2, 4]
    assert due(None, range(9)) == []
    assert Cadence([EverySteps(2), timedelta(minutes=1)]).rules == (EverySteps(2), EverySeconds(60.0))
    assert Cadence(np.int64(5)).rules == (EverySteps(5),) and type(EverySteps(np.int32(5)).steps) is int  # type: ignore[arg-type]


def info(step: int, age: float = 0.0, **metrics: float) -> StepInfo:
    return StepInfo(step, f"/run/step_{step:08d}", 0.0, metrics, committed=1e9 - age)


def test_what_to_keep() -> None:
    steps = [info(10 * n, 100 - n, loss=abs(n - 4), **({"score": n} if n % 2 else {})) for n in range(1, 11)]
    assert Latest(3).keep(steps) == {80, 90, 100}
    assert Best("loss", 3).keep(steps) == {40, 50, 30}
    assert Best("loss", 2).keep(steps) == {40, 50}  # of 30 and 50, which are equal, the newer
    assert Best("score", 2, "max").keep(steps) == {90, 70}
    assert Best("nothing").keep(steps) == set()
    assert Every(30).keep(steps) == {30, 60, 90}
    assert Younger(timedelta(seconds=2.5)).keep(steps) == {80, 90, 100}
    unflushed = StepInfo(110, "/run/step_00000110", 0.0)
    assert Younger(timedelta(seconds=2.5)).keep([*steps, unflushed]) == {80, 90, 100, 110}
    assert Retention().rules is None
    assert Retention(2).rules == (Latest(2),) and Retention([3, Every(5)]).rules == (Latest(3), Every(5))
    assert Retention(np.int64(2)).rules == (Latest(2),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "keep", [[], 0, -1, True, "all", [Latest], [None], (), 2.0, [2, 0], lambda steps: steps, object()]
)
def test_rules_that_would_delete_everything(keep: Any) -> None:
    with pytest.raises(UsageError, match=r"keep=.*give a number of steps, at least 1, or rules"):
        Retention(keep)


@pytest.mark.parametrize("every", [True, 2.5, "10", [None, "x"], object(), [], [None], EverySteps])
def test_rules_that_are_none(every: Any) -> None:
    with pytest.raises(UsageError, match=r"every=.*give a number of steps, a timedelta, a rule"):
        Cadence(every)


def test_bad_rules() -> None:
    with pytest.raises(UsageError, match="'min' or 'max'"):
        Best("loss", mode="lowest")
    wrong: dict[str, Any] = {
        r"Best\(5\): give the name": lambda: Best(5),  # type: ignore[arg-type]
        r"AtSteps\(\[\]\): give a list of step numbers": lambda: AtSteps([]),
        r"AtSteps\(5\): give a list": lambda: AtSteps(5),  # type: ignore[arg-type]
        r"EverySeconds\('5'\): give a number": lambda: EverySeconds("5"),  # type: ignore[arg-type]
        r"EverySeconds\(0.0\): give a number": lambda: Cadence(timedelta(0)),
        r"EverySteps: -3 is no number of steps": lambda: Cadence(-3),
        r"Younger\(5\): give a timedelta": lambda: Younger(5),  # type: ignore[arg-type]
        r"Interval\(5\): give a timedelta": lambda: Interval(5),  # type: ignore[arg-type]
        "the function must take one argument": lambda: Cadence(lambda: True),  # type: ignore[arg-type]
        "grace='5': give a number of seconds": lambda: Retention(grace="5"),  # type: ignore[arg-type]
        "most_retired=-1: give a number of steps": lambda: Retention(most_retired=-1),
        r"Preemption\(15\): give a list of signals": lambda: Preemption(15),  # type: ignore[arg-type]
        r"Preemption\(check=True\): give a function": lambda: Preemption(check=True),  # type: ignore[arg-type]
        r"Preemption\(grace='5'\)": lambda: Preemption(grace="5"),  # type: ignore[arg-type]
    }
    for says, make in wrong.items():
        with pytest.raises(UsageError, match=says):
            make()
    for make in (lambda: Best("loss", 0), lambda: Every(0), lambda: Latest(0)):
        with pytest.raises(UsageError, match="at least 1"):
            make()
