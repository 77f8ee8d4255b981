"""Turn the arguments of a trainer into rules for the steps to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.manager import Best, StepInfo

__all__ = ["best_rule", "keep_rule"]


@dataclass(frozen=True)
class _TotalLimit:
    """Keep the newest step, the best one, and others up to `save_total_limit`."""

    limit: int
    best: Best | None

    def keep(self, steps: Sequence[StepInfo]) -> set[int]:
        """See `KeepRule`."""
        kept = {info.step for info in steps[-1:]} | set(self.best.keep(steps) if self.best else ())
        for info in reversed(steps):
            if len(kept) >= self.limit:
                break
            kept.add(info.step)
        return kept


def keep_rule(args: Any) -> _TotalLimit | None:
    """Return the rule of `save_total_limit`, or None to keep everything."""
    limit = args.save_total_limit
    return _TotalLimit(limit, best_rule(args)) if limit is not None and limit > 0 else None


def best_rule(args: Any) -> Best | None:
    """Return the rule of `metric_for_best_model`, or None."""
    metric = args.metric_for_best_model
    if metric is None:
        return None
    return Best(f"eval_{metric.removeprefix('eval_')}", mode="max" if args.greater_is_better else "min")
