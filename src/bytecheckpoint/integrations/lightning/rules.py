"""What the arguments of a ModelCheckpoint say about which steps to keep, as rules of `CheckpointManager`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from bytecheckpoint.manager import Best, KeepRule, Latest, StepInfo

__all__ = ["TopK", "keep_rule", "rankable"]


class TopK(Best):
    """As `Best`, but as Lightning ranks: of equal values the older, and of the branch that the run is on."""

    def ranked(self, steps: Sequence[StepInfo]) -> list[StepInfo]:
        """Return the candidates, the best first."""
        sign = 1 if self.mode == "min" else -1
        found = super().ranked([info for info in steps if not info.superseded])
        return sorted(found, key=lambda info: (sign * info.metrics[self.metric], info.step))


def keep_rule(monitor: str | None, save_top_k: int, mode: str) -> KeepRule | None:
    """Return the rule of `save_top_k`, None to keep everything. The newest step always stays, as `save_last` wants it."""
    if save_top_k == -1:
        return None
    return Latest(1) if monitor is None or save_top_k == 0 else TopK(monitor, save_top_k, mode)


def rankable(value: float, mode: str) -> float:
    """Return the value of a monitored metric as a finite number. Lightning ranks NaN last, and infinities as they are."""
    if math.isnan(value):
        value = math.inf if mode == "min" else -math.inf
    return max(-sys.float_info.max, min(value, sys.float_info.max))
