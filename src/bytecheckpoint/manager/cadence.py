"""Rules of a run for the times of its saves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager.rules import integer_of, is_real, take_number
from bytecheckpoint.options import takes_one

__all__ = ["AtSteps", "Cadence", "EverySeconds", "EverySteps", "SaveRule", "When"]

_OVERLAPS = ("wait", "skip", "fail")


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
        take_number(self, "steps")

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

    def __post_init__(self) -> None:
        numbers = [integer_of(step) for step in self.steps] if isinstance(self.steps, Collection) else []
        if not numbers or None in numbers:
            raise UsageError(f"AtSteps({self.steps!r}): give a list of step numbers, with one at least")

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
        if not is_real(self.seconds) or not self.seconds > 0:
            raise UsageError(f"EverySeconds({self.seconds!r}): give a number of seconds above 0")

    def due(self, step: int, before: int) -> bool:
        """Return False: the manager asks rank 0's clock, and the ranks agree on a boundary."""
        return False


@dataclass(frozen=True)
class _Predicate:
    """Save where a function of the number of steps returns true."""

    function: Callable[[int], Any]

    def __post_init__(self) -> None:
        if not takes_one(self.function):
            raise UsageError(f"every={self.function!r}: the function must take one argument, the step number")

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
    if (number := integer_of(every)) is not None:
        return [EverySteps(number)]
    if isinstance(every, timedelta):
        return [EverySeconds(every.total_seconds())]
    if isinstance(every, type | str):
        raise UsageError(wrong)
    if callable(getattr(every, "due", None)):
        return [every]
    if callable(every):
        return [_Predicate(every)]
    if isinstance(every, Iterable) and (rules := [rule for one in every for rule in _save_rules(one)]):
        return rules
    raise UsageError(f"{wrong}; without a rule nothing is saved but by `save`, which every=None says")
