"""Training runs: when to save, what to keep, where to go on (`CheckpointManager`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bytecheckpoint.manager.interval import Interval, IntervalPlan, plan_interval
from bytecheckpoint.manager.preemption import Preemption
from bytecheckpoint.manager.rules import (
    AtSteps,
    Best,
    Every,
    EverySeconds,
    EverySteps,
    KeepRule,
    Latest,
    SaveRule,
    StepInfo,
    Younger,
)

if TYPE_CHECKING:
    from bytecheckpoint.manager.manager import CheckpointManager
    from bytecheckpoint.manager.restored import Restored

__all__ = [
    "AtSteps",
    "Best",
    "CheckpointManager",
    "Every",
    "EverySeconds",
    "EverySteps",
    "Interval",
    "IntervalPlan",
    "KeepRule",
    "Latest",
    "Preemption",
    "Restored",
    "SaveRule",
    "StepInfo",
    "Younger",
    "plan_interval",
]


if not TYPE_CHECKING:  # the manager needs torch, and the command line none

    def __getattr__(name: str) -> Any:
        if name == "CheckpointManager":
            from bytecheckpoint.manager.manager import CheckpointManager as found
        elif name == "Restored":
            from bytecheckpoint.manager.restored import Restored as found
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return found
