"""Sum up the cost of checkpoints in a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bytecheckpoint.monitoring.analysis.summary import OperationSummary

__all__ = ["COMPARED", "FEWEST", "RunSummary", "Shares", "summarize_run", "time_shares"]

#: Most and fewest earlier operations that a new one is compared with.
COMPARED, FEWEST = 20, 3


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of the time of a run, between 0 and 1.

    Attributes:
        stalled: share in which saves stop the training.
        lost: share whose work failures undo, with restarts.
        effective: share of training that counts: the effective training time ratio (ETTR).
    """

    stalled: float
    lost: float
    effective: float


def time_shares(interval: float, stall: float, write: float, mtbf: float, restart: float = 0.0) -> Shares:
    """Return the shares of a run's time under a rate of failures.

    A failure costs half an interval on average, the time of the last write, and the restart.

    Args:
        interval: seconds between the beginnings of two saves.
        stall: seconds for which a save stops the training.
        write: seconds from the beginning of a save to its commit.
        mtbf: mean seconds between two failures of the job.
        restart: seconds from a failure until the training continues.
    """
    stalled = min(stall / interval, 1.0)
    lost = min((interval / 2 + write + restart) / mtbf, 1.0)
    return Shares(stalled, lost, max(1 - stalled - lost, 0.0))


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The saves and loads of a run. Times are in seconds.

    Attributes:
        saves: number of committed saves.
        loads: number of loads that succeeded.
        failed: number of saves and loads that failed.
        jobs: number of jobs, one after the other: 1 and the restarts.
        seconds: time from the beginning of the first operation to the end of the last one.
        interval: median time between the beginnings of two saves; 0.0 with fewer than two.
        stall: median time for which a save stops the training.
        write: median time from the beginning of a save to its commit.
        restart: median time of a load.
        stalled_seconds: total time for which the training waited for saves and loads.
        undone_seconds: total work that restarts undid, an upper bound, as metrics do not show the end of a job: the time
            from a job's last save to the first load of the next, or the usual time to the commit of one more save.
        between_seconds: total of the rest of that time, in which no job trained for certain: a lower bound.
        effective: share of `seconds` that is in none of these three, a lower bound: the measured ETTR.
    """

    saves: int
    loads: int
    failed: int
    jobs: int
    seconds: float
    interval: float
    stall: float
    write: float
    restart: float
    stalled_seconds: float
    undone_seconds: float
    between_seconds: float
    effective: float

    def at(self, mtbf: float) -> Shares | None:
        """Return the expected shares with a failure every `mtbf` seconds; None after too few saves."""
        return time_shares(self.interval, self.stall, self.write, mtbf, self.restart) if self.interval else None


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def summarize_run(summaries: Sequence[OperationSummary]) -> RunSummary:
    """Sum up a run.

    Args:
        summaries: operations of the run, in order of time.
    """
    done = [summary for summary in summaries if not summary.failed]
    saves = [summary for summary in done if summary.kind == "save"]
    loads = [summary for summary in done if summary.kind == "load"]
    # The gap between two jobs does not show how often a job saves.
    gaps = [b.began - a.began for a, b in pairwise(saves) if _job(a) == _job(b)]
    seconds = max((s.began + s.seconds for s in summaries), default=0.0) - min(
        (s.began for s in summaries), default=0.0
    )
    stalled = sum(summary.blocking_seconds for summary in summaries)
    write = _median([save.seconds for save in saves])
    most = _median(gaps) + write if gaps else math.inf
    undone = between = 0.0
    for earlier, later in pairwise(summaries):
        if _job(earlier) != _job(later) and later.kind == "load":
            before = [save.began for save in saves if save.began < later.began]
            gap = later.began - before[-1] if before else 0.0
            undone += min(gap, most)
            between += max(gap - most, 0.0)
    effective = max(1 - (stalled + undone + between) / seconds, 0.0) if seconds > 0 else 1.0
    return RunSummary(
        saves=len(saves),
        loads=len(loads),
        failed=len(summaries) - len(done),
        jobs=len({_job(summary) for summary in summaries}),
        seconds=seconds,
        interval=_median(gaps),
        stall=_median([save.blocking_seconds for save in saves]),
        write=write,
        restart=_median([load.seconds for load in loads]),
        stalled_seconds=stalled,
        undone_seconds=undone,
        between_seconds=between,
        effective=effective,
    )


def _job(summary: OperationSummary) -> str:
    return summary.id.rsplit("-", 2)[0]
