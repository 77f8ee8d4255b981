"""Save and restore training runs: `CheckpointManager`, its rules and its options.

from bytecheckpoint.manager import Best, CheckpointManager, EverySteps, Latest
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bytecheckpoint.manager.cadence import AtSteps, Cadence, EverySeconds, EverySteps, SaveRule
from bytecheckpoint.manager.interval import Interval, IntervalPlan, plan_interval
from bytecheckpoint.manager.preemption import Preemption
from bytecheckpoint.manager.rules import Best, Every, KeepRule, Latest, Retention, StepInfo, Younger
from bytecheckpoint.options import LoadOptions, SaveOptions

if TYPE_CHECKING:
    from bytecheckpoint.manager.commits import LatestLink, wait_for_new_step
    from bytecheckpoint.manager.manager import CheckpointManager
    from bytecheckpoint.manager.restores import Restored

__all__ = [
    "AtSteps",
    "Best",
    "Cadence",
    "CheckpointManager",
    "Every",
    "EverySeconds",
    "EverySteps",
    "Interval",
    "IntervalPlan",
    "KeepRule",
    "Latest",
    "LatestLink",
    "LoadOptions",
    "Preemption",
    "Restored",
    "Retention",
    "SaveOptions",
    "SaveRule",
    "StepInfo",
    "Younger",
    "plan_interval",
    "wait_for_new_step",
]


if not TYPE_CHECKING:  # the manager needs torch, and the command line does not

    def __getattr__(name: str) -> Any:
        modules = {"CheckpointManager": "manager", "Restored": "restores"}
        modules |= dict.fromkeys(("LatestLink", "wait_for_new_step"), "commits")
        if name not in modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{modules[name]}"), name)
