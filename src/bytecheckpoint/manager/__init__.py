"""Training runs: when to save, what to keep, where to go on (`CheckpointManager`)."""

from bytecheckpoint.manager.manager import CheckpointManager, Restored
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

__all__ = [
    "AtSteps",
    "Best",
    "CheckpointManager",
    "Every",
    "EverySeconds",
    "EverySteps",
    "KeepRule",
    "Latest",
    "Preemption",
    "Restored",
    "SaveRule",
    "StepInfo",
    "Younger",
]
