"""Playing several ranks on threads, and collecting what each of them met."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.threads import ThreadWorld
from tests.faults.coded import states

__all__ = ["attempt", "outcomes", "save_all"]

Outcome = Any


def attempt(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What `function` returns, or the exception that it raises."""
    try:
        return function(*args, **options)
    except Exception as error:  # noqa: BLE001  handed to the test
        return error


def outcomes(world: ThreadWorld, function: Callable[[Collective], Any], timeout: float = 60.0) -> list[Any]:
    """Per rank, what `function(collective)` returned or raised."""
    return world.run(lambda collective: attempt(function, collective), timeout=timeout)


def save_all(world: ThreadWorld, path: Path, step: int, **options: Any) -> list[Any]:
    """Every rank saves `step` and waits; per rank the report or the exception."""

    def one(collective: Collective) -> Any:
        handle = bytecheckpoint.save(path, states(collective.rank, world.size, step), **options)
        try:
            return handle.result(30)
        finally:
            assert handle.staged.done() and handle.committed.done(), "both futures are set, whatever happened"

    return outcomes(world, one)
