"""Learning rate schedules: the state of one kind must not pass for that of another.

torch's schedulers take any state: the attributes of the other kind are added, and their own keep their values.
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from bytecheckpoint.frameworks.base import Destination

__all__ = ["check_schedule"]

#: Attributes that depend on the version of torch.
_IGNORED = frozenset({"verbose"})


def check_schedule(state_name: str, live: object, saved: object, own: object, destination: Destination) -> None:
    """Report to `destination` if a scheduler of torch would get the state of another kind of schedule.

    Args:
        state_name: name of the state.
        live: any object; only a scheduler of torch is checked.
        saved: its state in the checkpoint.
        own: its state_dict now.
        destination: gets a mismatch if the saved state has settings that the scheduler lacks, a note if it lacks some.
    """
    if not isinstance(live, LRScheduler) or not isinstance(saved, dict) or not isinstance(own, dict):
        return
    name = type(live).__name__
    if more := _settings(saved) - _settings(own):
        destination.mismatches.append(
            f"{state_name}: the checkpoint has the state of another learning rate schedule than {name}, with "
            f"{_quoted(more)}"
        )
    elif less := _settings(own) - _settings(saved):
        destination.notes.append(f"{state_name}: {name} keeps {_quoted(less)}, which the checkpoint does not have")
    inner: list[Any] = list(getattr(live, "_schedulers", ()))  # of a SequentialLR or ChainedScheduler
    states, now = saved.get("_schedulers", ()), own.get("_schedulers", ())
    if len(inner) == len(now) != len(states):
        destination.mismatches.append(
            f"{state_name}: {name} joins {len(inner)} schedules here, and {len(states)} in the checkpoint"
        )
        return
    for schedule, state, current in zip(inner, states, now, strict=False):
        check_schedule(state_name, schedule, state, current, destination)


def _settings(state: dict[Any, Any]) -> set[str]:
    return {key for key in state if isinstance(key, str) and not key.startswith("_")} - _IGNORED


def _quoted(names: set[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
