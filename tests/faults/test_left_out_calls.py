"""Ranks that leave a call out, make one too many or another one: an error names rank and call, and later calls work."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.tuning import tuned
from tests.support.coded import load_step, states
from tests.support.modes import MODES
from tests.support.ranks import attempt, outcomes, saved
from tests.support.variants import crossed

pytestmark = pytest.mark.timeout(100)

_Calls = Callable[[Collective, int], Any]


def in_turn(world: ThreadWorld, one: _Calls, steps: range, *, together: bool) -> list[list[Any]]:
    """Let every rank make its calls of several steps; return the results by rank, then step.

    Args:
        world: the ranks.
        one: function that makes the calls of a step.
        steps: the steps.
        together: True if ranks begin each step together, as a training with collectives does; else they begin only
            the first of the good steps together, because a busy machine can hold a rank back for longer than a limit.
    """
    barrier = threading.Barrier(world.size)

    def every(collective: Collective) -> list[Any]:
        found = []
        for step in steps:
            if together or step == GOOD_STEPS[0]:
                barrier.wait(60)
            found.append(attempt(one, collective, step))
        return found

    with tuned(call_check=0.5):
        return outcomes(world, every, timeout=90)


#: The last steps, which must work. Their time limit is long: nothing in them waits for a call that never comes.
GOOD_STEPS = range(4, 6)


def limit(step: int) -> float:
    return 60.0 if step in GOOD_STEPS else 2.0


def save(path: Path, mode: str, step: int, collective: Collective) -> str:
    own = states(collective.rank, collective.world_size, step)
    bytecheckpoint.save(path, own, timeout=limit(step), **MODES[mode]).result(60)
    return "done"


def check_recovery(got: list[list[Any]]) -> None:
    """Fail unless some call failed with an error that names rank and call, and the last calls worked everywhere."""
    errors = [str(result) for found in got for result in found if isinstance(result, Exception)]
    assert any(re.search(r"rank.*(save|load|prepare) ", error) for error in errors), errors
    check_good(got)


def check_good(got: list[list[Any]]) -> None:
    assert [found[-len(GOOD_STEPS) :] for found in got] == [["done"] * len(GOOD_STEPS)] * len(got), got


CASES = {
    "in step": (True, False),
    "in step, one path": (True, True),
    "on their own": (False, False),
    "on their own, one path": (False, True),
}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["planned", "cached"])
@pytest.mark.parametrize(("mode", "odd", "case"), crossed(list(MODES), [1, 0], list(CASES)))
def test_a_rank_leaves_a_save_out(tmp_path: Path, mode: str, odd: int, cached: bool, case: str, ranks: int) -> None:
    together, same_path = CASES[case]
    world = saved(tmp_path / "first", ranks, **MODES[mode]) if cached else ThreadWorld(ranks)

    def one(collective: Collective, step: int) -> str:
        if step == 2 and collective.rank == odd:
            return "left out"
        return save(tmp_path / ("s" if same_path else f"s{step}"), mode, step, collective)

    check_recovery(in_turn(world, one, range(2, 6), together=together))
    assert load_step(tmp_path / ("s" if same_path else "s5")) == 5


@pytest.mark.parametrize(("mode", "odd", "ranks"), crossed(list(MODES), [1, 0], [3, 2]))
def test_a_rank_makes_a_save_too_many(tmp_path: Path, mode: str, odd: int, ranks: int) -> None:
    def one(collective: Collective, step: int) -> str:
        if step == 2 and collective.rank == odd:
            attempt(save, tmp_path / "more", mode, step, collective)
        return save(tmp_path / f"s{step}", mode, step, collective)

    got = in_turn(ThreadWorld(ranks), one, range(1, 6), together=True)
    check_good(got)


def other(path: Path, kind: str, step: int, collective: Collective) -> str:
    """Load or prepare."""
    own = states(collective.rank, collective.world_size, step)
    if kind == "load":
        bytecheckpoint.load(path, own, timeout=limit(step))
    else:
        bytecheckpoint.prepare(own, timeout=limit(step)).result(30)
    return "done"


@pytest.mark.parametrize("kind", ["load", "prepare"])
@pytest.mark.parametrize(("mode", "odd", "ranks"), crossed(list(MODES), [1, 0], [2, 3]))
def test_a_rank_makes_another_call_in_place_of_a_save(
    tmp_path: Path, mode: str, odd: int, kind: str, ranks: int
) -> None:
    world = saved(tmp_path / "s", ranks)

    def one(collective: Collective, step: int) -> str:
        if step == 2 and collective.rank == odd:
            return other(tmp_path / "s", kind, step, collective)
        return save(tmp_path / "s", mode, step, collective)

    check_recovery(in_turn(world, one, range(1, 6), together=True))
    assert load_step(tmp_path / "s") == 5


@pytest.mark.parametrize("kind", ["load", "prepare"])
@pytest.mark.parametrize(("odd", "ranks"), crossed([0, 1], [2, 3]))
def test_a_rank_leaves_a_load_or_a_preparation_out(tmp_path: Path, kind: str, odd: int, ranks: int) -> None:
    world = saved(tmp_path / "s", ranks)

    def one(collective: Collective, step: int) -> str:
        if step == 2 and collective.rank == odd:
            return "left out"
        return other(tmp_path / "s", kind, step, collective)

    check_recovery(in_turn(world, one, range(1, 6), together=True))
