"""Calls on several ranks, which are threads, and checks of each rank's result or error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.handles import SaveReport
from bytecheckpoint.storage import Storage
from tests.support.coded import ROWS, load_step, states, step_of
from tests.support.faulty_storage import Faults
from tests.support.modes import MODES

__all__ = ["attempt", "check_recovery", "load_all", "outcomes", "save_all", "saved", "succeeded"]


def attempt(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what `function` returns, or the exception that it raises."""
    try:
        return function(*args, **options)
    except Exception as error:  # noqa: BLE001  handed to the test
        return error


def outcomes(world: ThreadWorld, function: Callable[[Collective], Any], timeout: float = 60.0) -> list[Any]:
    """Return for each rank what `function(collective)` returned or raised."""
    return world.run(lambda collective: attempt(function, collective), timeout=timeout)


def save_all(
    world: ThreadWorld, path: str | Path, step: int, *, rows: int = ROWS, faults: Faults | None = None, **options: Any
) -> list[Any]:
    """Let every rank save `step` and wait, with faults of the storage or none; return each rank's report or exception."""

    def one(collective: Collective) -> Any:
        place = faults.at(path) if faults else path
        handle = bytecheckpoint.save(place, states(collective.rank, world.size, step, rows), **options)
        try:
            return handle.result(120)
        finally:
            assert handle.staged.done() and handle.committed.done(), "both futures are set, whatever happened"

    return outcomes(world, one, timeout=200)


def load_all(
    world: ThreadWorld,
    path: str | Path | Storage,
    *,
    rows: int = ROWS,
    faults: Faults | None = None,
    **options: Any,
) -> list[Any]:
    """Let every rank load its part of the checkpoint, with faults or none; return each rank's step or exception."""

    def one(collective: Collective) -> int:
        loaded = states(collective.rank, world.size, rows=rows)
        bytecheckpoint.load(faults.at(path) if faults else path, loaded, **options)
        return step_of(loaded)

    return outcomes(world, one, timeout=200)


def saved(path: Path, ranks: int = 2, **options: Any) -> ThreadWorld:
    """Save step 1 from a new world of ranks; return the world."""
    world = ThreadWorld(ranks)
    succeeded(save_all(world, path, 1, **options))
    return world


def succeeded(got: list[Any]) -> None:
    """Fail unless every rank got a report."""
    assert all(isinstance(report, SaveReport) for report in got), got


def check_recovery(world: ThreadWorld, path: Path, mode: str) -> None:
    """Fail unless the save after a failed save of `mode`, whose error every rank has got, simply works."""
    succeeded(save_all(world, path, 4, **MODES[mode]))
    assert load_step(path) == 4
