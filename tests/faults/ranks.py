"""Run a function on several ranks, as threads, and collect what each returned or raised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.handles import SaveReport
from tests.faults.coded import states

__all__ = ["attempt", "outcomes", "save_all", "succeeded"]


def attempt(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what `function` returns, or the exception that it raises."""
    try:
        return function(*args, **options)
    except Exception as error:  # noqa: BLE001  handed to the test
        return error


def outcomes(world: ThreadWorld, function: Callable[[Collective], Any], timeout: float = 60.0) -> list[Any]:
    """Return for each rank what `function(collective)` returned or raised."""
    return world.run(lambda collective: attempt(function, collective), timeout=timeout)


def save_all(world: ThreadWorld, path: Path, step: int, **options: Any) -> list[Any]:
    """Let every rank save `step` and wait; return each rank's report or exception."""

    def one(collective: Collective) -> Any:
        handle = bytecheckpoint.save(path, states(collective.rank, world.size, step), **options)
        try:
            return handle.result(30)
        finally:
            assert handle.staged.done() and handle.committed.done(), "both futures are set, whatever happened"

    return outcomes(world, one)


def succeeded(got: list[Any]) -> None:
    """Assert that every rank got a report."""
    assert all(isinstance(report, SaveReport) for report in got), got
