"""Rules of a run: when to save, and which steps to keep."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, runtime_checkable

from bytecheckpoint.errors import UsageError

__all__ = [
    "AtSteps",
    "Best",
    "Cadence",
    "Every",
    "EverySeconds",
    "EverySteps",
    "Keep",
    "KeepRule",
    "Latest",
    "Retention",
    "SaveRule",
    "StepInfo",
    "When",
    "Younger",
    "finite_metrics",
]

_log = logging.getLogger("bytecheckpoint")
_OVERLAPS = ("wait", "skip", "fail")


@dataclass(frozen=True)
class StepInfo:
    """A committed step.

    Attributes:
        step: step number.
        path: address of its checkpoint.
        created: time of the save, in seconds since 1970, by the clock of rank 0's machine.
        metrics: finite metrics that were passed to the save.
        pinned: True if no rule may delete the step.
        superseded: True if the run went back to an older step and continued from there. A superseded step counts as older
            than all steps that were saved since.
        committed: time of the commit, in seconds since 1970, by the clock of the durable storage; 0.0 until it is there.
        since_full: number of incremental saves since the last one that shares no file with earlier steps.
    """

    step: int
    path: str
    created: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    superseded: bool = False
    committed: float = 0.0
    since_full: int = 0


# --- when to save -----------------------------------------------------------------------------------------------------


class SaveRule(Protocol):
    """Rule that decides at a step boundary, on every rank alike, whether a save is due."""

    def due(self, step: int, before: int) -> bool:
        """Return whether to save now.

        Args:
            step: number of steps that are done.
            before: number of steps that were done at the boundary before.
        """


@dataclass(frozen=True)
class EverySteps:
    """Save when the number of steps passes a multiple of `steps`.

    Attributes:
        steps: number of steps between two saves.
    """

    steps: int

    def __post_init__(self) -> None:
        _check_number(self, self.steps)

    def due(self, step: int, before: int) -> bool:
        """See `SaveRule`."""
        return step // self.steps > before // self.steps


@dataclass(frozen=True)
class AtSteps:
    """Save at given steps, or at the first boundary after one.

    Attributes:
        steps: step numbers.
    """

    steps: Collection[int]

    def due(self, step: int, before: int) -> bool:
        """See `SaveRule`."""
        return any(before < wanted <= step for wanted in self.steps)


@dataclass(frozen=True)
class EverySeconds:
    """Save when some seconds have passed since the last save, by the clock of rank 0.

    Attributes:
        seconds: time between the beginnings of two saves.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"EverySeconds({self.seconds!r}): give a number of seconds above 0")

    def due(self, step: int, before: int) -> bool:
        """Return False: the manager asks rank 0's clock, and the ranks agree on a boundary."""
        return False


@dataclass(frozen=True)
class _Predicate:
    """Save where a function of the number of steps returns true."""

    function: Callable[[int], Any]

    def due(self, step: int, before: int) -> bool:
        return bool(self.function(step))


#: Rules, and short forms of them, for `every=`.
When: TypeAlias = SaveRule | int | timedelta | Callable[[int], Any] | Iterable[Any] | None


@dataclass(frozen=True, init=False)
class Cadence:
    """Rules for the times of saves.

    Args:
        every: a number of steps, a `timedelta`, a rule (`EverySteps`, `EverySeconds`, `AtSteps`, or `Interval`, which finds
            the interval itself), a function of the number of steps that returns the same on all ranks, or a list of
            these. None: only when `save` is called.
        at_end: True to save the last step at the end of the `with` block, unless an exception ends it.
        overlap: reaction to a save that is due during the save before: "wait" for that one, "skip" the new one, or "fail".

    Attributes:
        rules: rules of which one suffices for a save.
        at_end: True to save the last step.
        overlap: reaction to a save that is due during the save before.

    Raises:
        UsageError: an argument is out of its range.

    Examples:
        >>> Cadence(10, at_end=True).rules
        (EverySteps(steps=10),)
    """

    rules: tuple[SaveRule, ...]
    at_end: bool
    overlap: str

    def __init__(self, every: When = None, *, at_end: bool = False, overlap: str = "wait") -> None:
        if overlap not in _OVERLAPS:
            raise UsageError(f"overlap={overlap!r}: use one of {', '.join(_OVERLAPS)}")
        object.__setattr__(self, "rules", tuple(_save_rules(every)))
        object.__setattr__(self, "at_end", at_end)
        object.__setattr__(self, "overlap", overlap)

    def due(self, step: int, before: int) -> bool:
        """Return whether a rule wants a save; see `SaveRule`."""
        return any(rule.due(step, before) for rule in self.rules)


def _save_rules(every: Any) -> list[SaveRule]:
    wrong = f"every={every!r}: give a number of steps, a timedelta, a rule, a function, or a list of these"
    if every is None:
        return []
    if isinstance(every, bool | type):
        raise UsageError(wrong)
    if isinstance(every, int):
        return [EverySteps(every)]
    if isinstance(every, timedelta):
        return [EverySeconds(every.total_seconds())]
    if callable(getattr(every, "due", None)):
        return [every]
    if callable(every):
        return [_Predicate(every)]
    if isinstance(every, Iterable) and not isinstance(every, str):
        return [rule for one in every for rule in _save_rules(one)]
    raise UsageError(wrong)


# --- what to keep -----------------------------------------------------------------------------------------------------


@runtime_checkable
class KeepRule(Protocol):
    """Rule that chooses steps to keep. A step stays if one rule wants it."""

    def keep(self, steps: Sequence[StepInfo]) -> Collection[int]:
        """Return the numbers of the steps to keep.

        Args:
            steps: all steps, the superseded ones first, then by number.
        """


@dataclass(frozen=True)
class Latest:
    """Keep the newest steps.

    Attributes:
        count: number of steps.
    """

    count: int = 1

    def __post_init__(self) -> None:
        _check_number(self, self.count)

    def keep(self, steps: Sequence[StepInfo]) -> Collection[int]:
        """See `KeepRule`."""
        return {info.step for info in steps[-self.count :]}


@dataclass(frozen=True)
class Best:
    """Keep the steps with the best values of a metric. Of equal values the newer step is better.

    Attributes:
        metric: name of the metric. A step whose value is missing or not finite is no candidate.
        count: number of steps.
        mode: "min" if the lowest values are the best, "max" if the highest are.
    """

    metric: str
    count: int = 1
    mode: str = "min"

    def __post_init__(self) -> None:
        _check_number(self, self.count)
        if self.mode not in ("min", "max"):
            raise UsageError(f"Best({self.metric!r}, mode={self.mode!r}): use 'min' or 'max'")

    def ranked(self, steps: Sequence[StepInfo]) -> list[StepInfo]:
        """Return the candidates, the best one first."""
        sign = 1 if self.mode == "min" else -1
        found = [info for info in steps if math.isfinite(info.metrics.get(self.metric, math.nan))]
        return sorted(found, key=lambda info: (sign * info.metrics[self.metric], -info.step))

    def keep(self, steps: Sequence[StepInfo]) -> Collection[int]:
        """See `KeepRule`."""
        return {info.step for info in self.ranked(steps)[: self.count]}


@dataclass(frozen=True)
class Every:
    """Keep the steps that are multiples of `steps`.

    Attributes:
        steps: divisor of the steps to keep.
    """

    steps: int

    def __post_init__(self) -> None:
        _check_number(self, self.steps)

    def keep(self, steps: Sequence[StepInfo]) -> Collection[int]:
        """See `KeepRule`."""
        return {info.step for info in steps if info.step % self.steps == 0}


@dataclass(frozen=True)
class Younger:
    """Keep the steps that were committed at most `age` before the newest one.

    The clock of the storage counts, because clocks of machines may be hours ahead or behind.

    Attributes:
        age: time between the commit of the oldest step to keep and that of the newest.
    """

    age: timedelta

    def keep(self, steps: Sequence[StepInfo]) -> Collection[int]:
        """See `KeepRule`."""
        newest = next((info.committed for info in reversed(steps) if info.committed), 0.0)
        since = newest - self.age.total_seconds()
        return {info.step for info in steps if not info.committed or info.committed >= since}


#: Rules, and short forms of them, for `keep=`.
Keep: TypeAlias = KeepRule | int | Iterable[KeepRule | int] | None


@dataclass(frozen=True, init=False)
class Retention:
    """Rules for the steps to keep.

    The newest committed step and pinned steps always stay.

    Args:
        keep: a number of the newest steps, or rules (`Latest`, `Best`, `Every`, `Younger`). None: all steps.
        grace: seconds between the two phases of a deletion, for jobs that are reading.

    Attributes:
        rules: rules of which one suffices to keep a step; None to keep all.
        grace: seconds between the two phases of a deletion.

    Raises:
        UsageError: an argument is out of its range, or would delete everything.

    Examples:
        >>> Retention([3, Every(1000)], grace=0).rules
        (Latest(count=3), Every(steps=1000))
    """

    rules: tuple[KeepRule, ...] | None
    grace: float

    def __init__(self, keep: Keep = None, *, grace: float = 600.0) -> None:
        if not grace >= 0:
            raise UsageError(f"grace={grace!r}: give a number of seconds, at least 0")
        object.__setattr__(self, "rules", _keep_rules(keep))
        object.__setattr__(self, "grace", grace)


def _keep_rules(keep: Any) -> tuple[KeepRule, ...] | None:
    if keep is None:
        return None
    given = [keep] if isinstance(keep, int | KeepRule) else [*keep]
    rules: tuple[Any, ...] = tuple(Latest(r) if isinstance(r, int) and r is not True else r for r in given)
    if not rules or not all(isinstance(rule, KeepRule) and not isinstance(rule, type) for rule in rules):
        raise UsageError(
            f"keep={keep!r}: give a number of steps or rules, such as [Latest(3), Best('loss')]; an empty list would "
            "delete everything, and None keeps everything"
        )
    return rules


def _check_number(rule: object, number: object) -> None:
    """Check a number of steps of a rule."""
    if type(number) is not int or number < 1:
        raise UsageError(f"{type(rule).__name__}: {number!r} is no number of steps: give an integer of at least 1")


def finite_metrics(metrics: Mapping[str, Any], step: int) -> dict[str, float]:
    """Return the finite metrics as numbers, and log the others."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value.detach() if hasattr(value, "detach") else value)  # a tensor
        except Exception:  # noqa: BLE001  a metric must not keep one rank from a save that others have begun
            number = math.nan
        if math.isfinite(number):
            found[str(name)] = number
        else:
            _log.warning("the metric %s is %r at step %d: the step is no candidate for the best", name, value, step)
    return found
