"""What the checkpoints of a whole run cost, and how an operation compares with those before it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bytecheckpoint.monitoring.analysis.summary import OperationSummary

__all__ = ["COMPARED", "RunSummary", "Shares", "summarize_run", "time_shares", "usual"]

#: Earlier operations that a new one is compared with.
COMPARED = 20
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the time of a run, between 0 and 1.

    Attributes:
        stalled: in which saves stop the training.
        lost: whose work failures undo, restarts included.
        effective: which is training that counts: the effective training time ratio (ETTR).
    """

    stalled: float
    lost: float
    effective: float


def time_shares(interval: float, stall: float, write: float, mtbf: float, restart: float = 0.0) -> Shares:
    """Return what saves and failures leave of a run's time.

    A failure undoes half an interval on average, what was done while the last save was being written, and the restart.

    Args:
        interval: seconds between the beginnings of two saves.
        stall: seconds for which a save stops the training.
        write: seconds from the beginning of a save to its commit.
        mtbf: mean seconds between two failures of the job.
        restart: seconds from a failure until the training goes on.
    """
    stalled = min(stall / interval, 1.0)
    lost = min((interval / 2 + write + restart) / mtbf, 1.0)
    return Shares(stalled, lost, max(1 - stalled - lost, 0.0))


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The saves and loads of a run. Times are in seconds.

    Attributes:
        saves: that were committed.
        loads: that succeeded.
        failed: saves and loads that failed.
        jobs: processes that took part one after the other: 1 and the restarts.
        seconds: from the beginning of the first operation to the end of the last one.
        interval: median time between the beginnings of two saves; 0.0 with fewer than two.
        stall: median time for which a save stops the training.
        write: median time from the beginning of a save to its commit.
        restart: median time of a load.
        stalled_seconds: in which saves and loads kept the training waiting, in all.
        undone_seconds: between the last save of a job and the first load of the next one, in all: at most so much work
            was lost, as the metrics do not tell when a job ended.
        effective: share of `seconds` that is neither stalled nor undone, at least: the measured ETTR.
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
    effective: float

    def at(self, mtbf: float) -> Shares | None:
        """Return what is to be expected with a failure every `mtbf` seconds; None if there were too few saves to know."""
        return time_shares(self.interval, self.stall, self.write, mtbf, self.restart) if self.interval else None


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def summarize_run(summaries: Sequence[OperationSummary]) -> RunSummary:
    """Sum up a run.

    Args:
        summaries: of its operations, in order of time.
    """
    done = [summary for summary in summaries if not summary.failed]
    saves = [summary for summary in done if summary.kind == "save"]
    loads = [summary for summary in done if summary.kind == "load"]
    # Steps of two jobs, or of two failures, do not tell how often a job saves.
    gaps = [b.began - a.began for a, b in pairwise(saves) if _job(a) == _job(b)]
    seconds = max((s.began + s.seconds for s in summaries), default=0.0) - min(
        (s.began for s in summaries), default=0.0
    )
    stalled = sum(summary.blocking_seconds for summary in summaries)
    undone = 0.0
    for earlier, later in pairwise(summaries):
        if _job(earlier) != _job(later) and later.kind == "load":
            before = [save.began for save in saves if save.began < later.began]
            undone += later.began - before[-1] if before else 0.0
    effective = max(1 - (stalled + undone) / seconds, 0.0) if seconds > 0 else 1.0
    return RunSummary(
        saves=len(saves),
        loads=len(loads),
        failed=len(summaries) - len(done),
        jobs=len({_job(summary) for summary in summaries}),
        seconds=seconds,
        interval=_median(gaps),
        stall=_median([save.blocking_seconds for save in saves]),
        write=_median([save.seconds for save in saves]),
        restart=_median([load.seconds for load in loads]),
        stalled_seconds=stalled,
        undone_seconds=undone,
        effective=effective,
    )


def _job(summary: OperationSummary) -> str:
    return summary.id.rsplit("-", 2)[0]


def usual(summaries: Sequence[OperationSummary], place: int) -> dict[str, float]:
    """Return the rolling medians before an operation: "seconds", "bandwidth", and its phases by name (longest rank).

    Args:
        summaries: of a run, in order of time.
        place: of the operation in them.

    Returns:
        {} if fewer than three operations of this kind and world size came before.
    """
    now = summaries[place]
    before = [
        summary
        for summary in summaries[:place]
        if (summary.kind, summary.world_size) == (now.kind, now.world_size) and not summary.failed
    ][-COMPARED:]
    if len(before) < _FEWEST:
        return {}
    found = {name: statistics.median(getattr(b, name) for b in before) for name in ("seconds", "bandwidth")}
    for phase in now.phases:
        lengths = [part.longest for summary in before for part in summary.phases if part.name == phase.name]
        if lengths:
            found[phase.name] = statistics.median(lengths)
    return found
