"""Find the interval between saves that loses least time to saves and failures together.

A save stalls the training for `stall` seconds and is committed `write` seconds after it began. A failure loses the work
since the last committed save began: on average half an interval, and `write`. With failures every `mtbf` seconds,
saves every T seconds cost stall / T + (T / 2 + write + restart) / mtbf of the time, least at T = sqrt(2 stall mtbf)
(Young 1974). Daly (2006, equation 37) corrects that where a stall is not short against the time between failures. One
save is in flight at a time, so T is at least `write`. CheckFreq (FAST 2021) bounds the stalls' share instead, which bounds
T from below too.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

from bytecheckpoint.errors import UsageError
from bytecheckpoint.monitoring.analysis.run import time_shares

__all__ = ["Interval", "IntervalPlan", "plan_interval"]

_log = logging.getLogger("bytecheckpoint")
#: Saves of which the median counts.
_MEASURED = 5
#: A change of the interval by less is not logged.
_NOTABLE = 0.2


@dataclass(frozen=True)
class IntervalPlan:
    """An interval between saves, and its costs. All times are in seconds, all shares between 0 and 1.

    Attributes:
        seconds: time between the beginnings of two saves.
        why: reason for the length: "failures", "write time" or "bound on stalls".
        stall_share: share of the time in which saves stall the training.
        lost_share: share of the time whose work failures undo, restarts included.
        effective: effective training time ratio (ETTR), the share of the time whose work stays.
    """

    seconds: float
    why: str
    stall_share: float
    lost_share: float
    effective: float


def plan_interval(
    stall: float, write: float, mtbf: float, *, restart: float = 0.0, most_stall: float | None = None
) -> IntervalPlan:
    """Return the interval that loses least.

    Args:
        stall: seconds for which a save stops the training.
        write: seconds from the beginning of a save to its commit.
        mtbf: mean seconds between two failures of the job. N machines fail N times as often as one.
        restart: seconds from a failure until the training runs again.
        most_stall: bound on the share of the time in stalls, 0.03 say; None: no bound.

    Raises:
        UsageError: an argument is out of its range.

    Examples:
        >>> plan = plan_interval(stall=0.5, write=40, mtbf=4 * 3600)
        >>> round(plan.seconds), plan.why, round(plan.effective, 3)
        (120, 'failures', 0.989)
    """
    for name, value in {"stall": stall, "write": write, "restart": restart}.items():
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{name}={value!r}: give a number of seconds, at least 0")
    if not (math.isfinite(mtbf) and mtbf > 0):
        raise UsageError(f"mtbf={mtbf!r}: give a number of seconds above 0")
    if most_stall is not None and not 0 < most_stall < 1:
        raise UsageError(f"most_stall={most_stall!r}: give a share of the time, between 0 and 1")
    ratio = stall / (2 * mtbf)
    best = mtbf if ratio >= 1 else math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall
    bounds = {"failures": best, "write time": write, "bound on stalls": stall / most_stall if most_stall else 0.0}
    why = max(bounds, key=lambda name: bounds[name])
    seconds = max(bounds[why], 1e-3)
    shares = time_shares(seconds, stall, write, mtbf, restart)
    return IntervalPlan(seconds, why, shares.stalled, shares.lost, shares.effective)


class Interval:
    """Save at the interval that loses least time, measured by the stalls and write times of this run's saves.

    Args:
        mtbf: mean time between two failures of the job: from experience, or that of one machine divided by the number of
            machines.
        restart: time from a failure until the training runs again.
        most_stall: bound on the share of the time in stalls; None: no bound.
        first: interval until a save is measured.

    Raises:
        UsageError: an argument is out of its range.
    """

    def __init__(
        self,
        mtbf: timedelta,
        *,
        restart: timedelta = timedelta(0),
        most_stall: float | None = None,
        first: timedelta = timedelta(minutes=10),
    ) -> None:
        for given in (mtbf, restart, first):
            if not isinstance(given, timedelta):
                raise UsageError(f"Interval({given!r}): give a timedelta")
        self._mtbf, self._restart, self._most_stall = mtbf.total_seconds(), restart.total_seconds(), most_stall
        self.seconds = first.total_seconds()
        plan_interval(0.0, 0.0, self._mtbf, restart=self._restart, most_stall=most_stall)  # refuses bad arguments
        if not self.seconds > 0:
            raise UsageError(f"Interval(first={first!r}): give a time above 0")
        self._stalls: deque[float] = deque(maxlen=_MEASURED)
        self._writes: deque[float] = deque(maxlen=_MEASURED)
        self._said = 0.0

    def due(self, step: int, before: int) -> bool:
        """Return False: the manager asks rank 0's clock, as for `EverySeconds`."""
        return False

    def learn(self, stall: float, write: float) -> None:
        """Choose the interval anew after a save.

        Args:
            stall: seconds for which the save stalled the training.
            write: seconds until its commit.
        """
        self._stalls.append(stall)
        self._writes.append(write)
        stall, write = statistics.median(self._stalls), statistics.median(self._writes)
        plan = plan_interval(stall, write, self._mtbf, restart=self._restart, most_stall=self._most_stall)
        self.seconds = plan.seconds
        if abs(self.seconds - self._said) > _NOTABLE * self._said:
            self._said = self.seconds
            _log.info(
                "saving every %.1f s (decided by: %s): saves stall for %.3f s and are written in %.1f s; of the time "
                "%.2f%% goes into stalls and %.2f%% is lost by failures every %.0f s",
                plan.seconds, plan.why, stall, write, 100 * plan.stall_share, 100 * plan.lost_share, self._mtbf,
            )  # fmt: skip
