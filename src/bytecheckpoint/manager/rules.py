"""When to save, and which steps to keep."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from bytecheckpoint.errors import UsageError

__all__ = [
    "AtSteps",
    "Best",
    "Every",
    "EverySeconds",
    "EverySteps",
    "KeepRule",
    "Latest",
    "SaveRule",
    "StepInfo",
    "Younger",
    "finite_metrics",
    "keep_rules",
    "save_rules",
]

_log = logging.getLogger("bytecheckpoint")


@dataclass(frozen=True)
class StepInfo:
    """One committed step.

    Attributes:
        step: its number.
        path: of its checkpoint.
        created: when it was saved, seconds since 1970, by the clock of rank 0's machine.
        metrics: what was passed to the save, without values that are not finite.
        pinned: it is never deleted.
        superseded: the run went back to an older step and went on from there, so this one counts as older than all that
            were saved since.
        committed: when it was committed, seconds since 1970, by the clock of the storage; 0.0: it is not there yet.
    """

    step: int
    path: str
    created: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    superseded: bool = False
    committed: float = 0.0


# --- when to save -----------------------------------------------------------------------------------------------------


class SaveRule(Protocol):
    """Decides at a step boundary, on every rank alike, whether a save is due."""

    def due(self, step: int, before: int) -> bool:
        """Return whether to save now.

        Args:
            step: number of steps that are done.
            before: the same at the boundary before.
        """


@dataclass(frozen=True)
class EverySteps:
    """Save when the number of steps passes a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _check_steps(self)

    def due(self, step: int, before: int) -> bool:
        """See `SaveRule`."""
        return step // self.steps > before // self.steps


@dataclass(frozen=True)
class AtSteps:
    """Save at these steps, or at the first boundary after one."""

    steps: Collection[int]

    def due(self, step: int, before: int) -> bool:
        """See `SaveRule`."""
        return any(before < wanted <= step for wanted in self.steps)


@dataclass(frozen=True)
class EverySeconds:
    """Save when so many seconds have passed since the last save, by the clock of rank 0."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"EverySeconds({self.seconds!r}): give a number of seconds above 0")

    def due(self, step: int, before: int) -> bool:
        """Return False: the manager asks rank 0's clock, and the ranks agree on a boundary."""
        return False


@dataclass(frozen=True)
class _Asked:
    """Save where a function of the number of steps says so. It must answer alike on all ranks."""

    function: Callable[[int], Any]

    def due(self, step: int, before: int) -> bool:
        return bool(self.function(step))


def save_rules(every: Any) -> list[SaveRule]:
    """Return the rules that the argument `every` of a manager stands for.

    Raises:
        UsageError: it stands for none.
    """
    if every is None:
        return []
    if isinstance(every, bool | type):
        raise UsageError(
            f"every={every!r}: give a number of steps, a timedelta, a rule, a function, or a list of these"
        )
    if isinstance(every, int):
        return [EverySteps(every)]
    if isinstance(every, timedelta):
        return [EverySeconds(every.total_seconds())]
    if callable(getattr(every, "due", None)):
        return [every]
    if callable(every):
        return [_Asked(every)]
    if isinstance(every, Iterable) and not isinstance(every, str):
        return [rule for one in every for rule in save_rules(one)]
    raise UsageError(f"every={every!r}: give a number of steps, a timedelta, a rule, a function, or a list of these")


# --- what to keep -----------------------------------------------------------------------------------------------------


@runtime_checkable
class KeepRule(Protocol):
    """Chooses steps to keep. A step stays if one rule wants it."""

    def keep(self, steps: Sequence[StepInfo]) -> Collection[int]:
        """Return the numbers of the steps to keep, of `steps`: the superseded ones first, then by number."""


@dataclass(frozen=True)
class Latest:
    """Keep the newest steps."""

    count: int = 1

    def __post_init__(self) -> None:
        _check_count(self)

    def keep(self, steps: Sequence[StepInfo]) -> Collection[int]:
        """See `KeepRule`."""
        return {info.step for info in steps[-self.count :]}


@dataclass(frozen=True)
class Best:
    """Keep the steps with the best values of a metric; of equal ones the newer.

    Args:
        metric: its name. A step whose value is missing or not finite is no candidate.
        count: how many.
        mode: "min": the lowest values are the best; "max": the highest.
    """

    metric: str
    count: int = 1
    mode: str = "min"

    def __post_init__(self) -> None:
        _check_count(self)
        if self.mode not in ("min", "max"):
            raise UsageError(f"Best({self.metric!r}, mode={self.mode!r}): use 'min' or 'max'")

    def ranked(self, steps: Sequence[StepInfo]) -> list[StepInfo]:
        """Return the candidates, the best first."""
        sign = 1 if self.mode == "min" else -1
        found = [info for info in steps if math.isfinite(info.metrics.get(self.metric, math.nan))]
        return sorted(found, key=lambda info: (sign * info.metrics[self.metric], -info.step))

    def keep(self, steps: Sequence[StepInfo]) -> Collection[int]:
        """See `KeepRule`."""
        return {info.step for info in self.ranked(steps)[: self.count]}


@dataclass(frozen=True)
class Every:
    """Keep the steps that are multiples of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _check_steps(self)

    def keep(self, steps: Sequence[StepInfo]) -> Collection[int]:
        """See `KeepRule`."""
        return {info.step for info in steps if info.step % self.steps == 0}


@dataclass(frozen=True)
class Younger:
    """Keep the steps that were committed at most so long before the newest one.

    The storage's clock counts: those of machines may be hours ahead or behind.
    """

    age: timedelta

    def keep(self, steps: Sequence[StepInfo]) -> Collection[int]:
        """See `KeepRule`."""
        newest = next((info.committed for info in reversed(steps) if info.committed), 0.0)
        since = newest - self.age.total_seconds()
        return {info.step for info in steps if not info.committed or info.committed >= since}


def keep_rules(keep: Any) -> list[KeepRule] | None:
    """Return the rules that the argument `keep` of a manager stands for, or None to keep everything.

    Raises:
        UsageError: it stands for no rule, so that nothing would be kept.
    """
    if keep is None:
        return None
    given = [keep] if isinstance(keep, int | KeepRule) else [*keep]
    rules: list[Any] = [Latest(rule) if isinstance(rule, int) and rule is not True else rule for rule in given]
    if not rules or not all(isinstance(rule, KeepRule) and not isinstance(rule, type) for rule in rules):
        raise UsageError(
            f"keep={keep!r}: give a number of steps or rules, such as [Latest(3), Best('loss')]; an empty list would "
            "delete everything, and None keeps everything"
        )
    return rules


def _check_steps(rule: EverySteps | Every) -> None:
    if type(rule.steps) is not int or rule.steps < 1:
        raise UsageError(f"{type(rule).__name__}({rule.steps!r}): give a number of steps, at least 1")


def _check_count(rule: Latest | Best) -> None:
    if type(rule.count) is not int or rule.count < 1:
        raise UsageError(
            f"{type(rule).__name__}: keep at least 1 step, not {rule.count!r}; that would delete everything"
        )


def finite_metrics(metrics: Mapping[str, Any], step: int) -> dict[str, float]:
    """Return metrics as numbers that JSON can hold, without those that are none."""
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
