"""Say since when a problem of a run lasts, whether it is over, and what it has cost the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.analysis.words import seconds_text

__all__ = ["RECENT", "Episode", "episodes", "waited_for"]

#: Number of operations at the end of a run that decide whether a problem lasts. As many without it end an episode.
RECENT = 10
#: Fewest seconds to speak of.
_LEAST = 0.01
#: Phases of a save for which the training waits, unless the copy is made in the background.
_BLOCKING = ("wait", "capture", "plan", "stage")


@dataclass(frozen=True, slots=True)
class Episode:
    """The time in which a problem of a run lasted.

    Attributes:
        began: beginning of the first operation with the problem, in seconds since 1970.
        step: training step of that operation; None if unknown.
        ended: beginning of the first operation after the last one with the problem; None while it lasts.
        operations: number of operations with the problem.
        lost: seconds by which it made operations longer.
        cost: part of `lost` for which the training waited.
    """

    began: float
    step: int | None
    ended: float | None
    operations: int
    lost: float
    cost: float

    @property
    def words(self) -> str:
        """Beginning and cost as a sentence."""
        began = "" if self.step is None else f" step {self.step}"
        waited = f"waited {seconds_text(self.cost)}" if self.cost >= _LEAST else "did not wait"
        if self.ended is not None:
            return f"It is over{began and ', began at' + began}, and the training {waited} for it."
        if self.cost >= _LEAST:
            return f"Since{began or ' then'}, the training has {waited} for it."
        return f"It has lasted{began and ' since' + began}; the training did not wait for it."


def waited_for(operation: OperationSummary, phase: str) -> bool:
    """Return whether the training waited for a phase of an operation."""
    return operation.kind == "load" or phase in _BLOCKING or operation.blocking_seconds > 0.9 * operation.seconds


def episodes(
    operations: Sequence[OperationSummary], affected: Mapping[int, tuple[float, float]]
) -> Iterator[tuple[Episode, list[int]]]:
    """Join the operations with a problem to episodes, the oldest first.

    A problem lasts if the last operation has it, or two of the last ten.

    Args:
        operations: all operations of one kind, in order of time.
        affected: (lost, cost) in seconds by index of the operations that have the problem.

    Returns:
        pairs of an episode and the indices of its operations.
    """
    groups: list[list[int]] = []
    for place in sorted(affected):
        if groups and place - groups[-1][-1] <= RECENT:
            groups[-1].append(place)
        else:
            groups.append([place])
    for group in groups:
        last = len(operations) - 1
        lasts = group[-1] == last or sum(place > last - RECENT for place in group) > 1
        first = operations[group[0]]
        yield (
            Episode(
                began=first.began,
                step=first.step,
                ended=None if lasts else operations[group[-1] + 1].began,
                operations=len(group),
                lost=sum(affected[place][0] for place in group),
                cost=sum(affected[place][1] for place in group),
            ),
            group,
        )
