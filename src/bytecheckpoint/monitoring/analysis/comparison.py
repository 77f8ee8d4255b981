"""Compare the saves and loads of two runs, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bytecheckpoint.monitoring.analysis.summary import PHASES, OperationSummary

__all__ = ["RunComparison", "compare_runs"]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """One number of two runs.

    Attributes:
        kind: "save" or "load".
        name: "operations", "failed" or "retries" (sums); "seconds", "blocking_seconds", "nbytes", "bandwidth"
            or "phase.<phase>", the time of the slowest rank (medians over operations that succeeded).
        first: number of the first run; None if it has no such operations.
        second: number of the second run; None if it has no such operations.
    """

    kind: str
    name: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """Number of the second run over that of the first; None if one is missing or 0."""
        return self.second / self.first if self.first and self.second else None


def compare_runs(first: Sequence[OperationSummary], second: Sequence[OperationSummary]) -> Iterator[RunComparison]:
    """Yield the numbers of two runs, saves first.

    Args:
        first: operations of a run.
        second: operations of another one.
    """
    for kind in ("save", "load"):
        both = [_numbers([one for one in run if one.kind == kind]) for run in (first, second)]
        for name in dict.fromkeys([*both[0], *both[1]]):
            yield RunComparison(kind, name, both[0].get(name), both[1].get(name))


def _numbers(operations: Sequence[OperationSummary]) -> dict[str, float]:
    if not operations:
        return {}
    done = [one for one in operations if not one.failed]
    numbers: dict[str, float] = {
        "operations": len(operations),
        "failed": len(operations) - len(done),
        "retries": sum(one.retries for one in operations),
    }
    for name in ("seconds", "blocking_seconds", "nbytes", "bandwidth"):
        if done:
            numbers[name] = statistics.median(getattr(one, name) for one in done)
    for phase in PHASES[operations[0].kind]:
        if found := [part.longest for one in done for part in one.phases if part.name == phase]:
            numbers[f"phase.{phase}"] = statistics.median(found)
    return numbers
