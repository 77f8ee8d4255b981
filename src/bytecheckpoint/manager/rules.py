"""Steps of a run, and rules for those to keep."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

from bytecheckpoint.errors import UsageError

__all__ = [
    "Best",
    "Every",
    "Keep",
    "KeepRule",
    "Latest",
    "Retention",
    "StepInfo",
    "Younger",
    "finite_metrics",
    "integer_of",
    "is_real",
    "take_number",
]

_log = logging.getLogger("bytecheckpoint")


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
        metadata: facts that the program passed to the save, and those of its save options.
    """

    step: int
    path: str
    created: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    superseded: bool = False
    committed: float = 0.0
    since_full: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)


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
        take_number(self, "count")

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
        take_number(self, "count")
        if not isinstance(self.metric, str):
            raise UsageError(f"Best({self.metric!r}): give the name of a metric")
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
        take_number(self, "steps")

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

    def __post_init__(self) -> None:
        if not isinstance(self.age, timedelta):
            raise UsageError(f"Younger({self.age!r}): give a timedelta")

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
        most_retired: most steps between the two phases; the files of older ones go at once.

    Attributes:
        rules: rules of which one suffices to keep a step; None to keep all.
        grace: seconds between the two phases of a deletion.
        most_retired: most steps between the two phases.

    Raises:
        UsageError: an argument is out of its range, or would delete everything.

    Examples:
        >>> Retention([3, Every(1000)], grace=0).rules
        (Latest(count=3), Every(steps=1000))
    """

    rules: tuple[KeepRule, ...] | None
    grace: float
    most_retired: int

    def __init__(self, keep: Keep = None, *, grace: float = 600.0, most_retired: int = 2) -> None:
        if not is_real(grace) or not grace >= 0:
            raise UsageError(f"grace={grace!r}: give a number of seconds, at least 0")
        if (most := integer_of(most_retired)) is None or most < 0:
            raise UsageError(f"most_retired={most_retired!r}: give a number of steps, at least 0")
        object.__setattr__(self, "rules", _keep_rules(keep))
        object.__setattr__(self, "grace", grace)
        object.__setattr__(self, "most_retired", most)

    @property
    def metrics(self) -> frozenset[str]:
        """Names of the metrics by which rules choose."""
        return frozenset(rule.metric for rule in self.rules or () if isinstance(rule, Best))


def _keep_rules(keep: Any) -> tuple[KeepRule, ...] | None:
    if keep is None:
        return None
    several = isinstance(keep, Iterable) and not isinstance(keep, KeepRule | str)
    rules = [_keep_rule(one) for one in (keep if several else [keep])]
    found = tuple(rule for rule in rules if rule is not None)
    if not found or len(found) < len(rules):
        raise UsageError(
            f"keep={keep!r}: give a number of steps, at least 1, or rules, such as [Latest(3), Best('loss')]; an empty "
            "list would delete everything, and None keeps everything"
        )
    return found


def _keep_rule(one: Any) -> KeepRule | None:
    if (number := integer_of(one)) is not None:
        return Latest(number) if number > 0 else None
    return one if isinstance(one, KeepRule) and not isinstance(one, type) else None


def integer_of(value: object) -> int | None:
    """Return an integer of Python, numpy or torch; None for anything else, True and 2.0 among it."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def is_real(value: object) -> bool:
    """Return whether a value is a number, of Python or numpy."""
    return isinstance(value, Real)


def take_number(rule: object, name: str) -> None:
    """Check a number of steps of a rule, and keep it as an integer of Python."""
    given = getattr(rule, name)
    number = integer_of(given)
    if number is None or number < 1:
        raise UsageError(f"{type(rule).__name__}: {given!r} is no number of steps: give an integer of at least 1")
    object.__setattr__(rule, name, number)


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
