"""Sum up one save or load: phases, slow ranks, and the ranks that the others waited for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from bytecheckpoint import errors
from bytecheckpoint.monitoring.table import MetricRows, OperationFacts, OperationRecord

__all__ = ["PHASES", "SHARED_PHASES", "OperationSummary", "PhaseSummary", "RankFailure", "Straggler", "summarize"]

#: The phases of a kind of operation, in their order.
PHASES = {
    "save": ("wait", "capture", "plan", "stage", "write", "finish", "commit", "replicate", "flush"),
    "load": ("catalog", "destination", "plan", "agree", "read", "apply"),
}
#: Phases in which a rank waits for other ranks or for an earlier operation: their length does not describe the rank.
SHARED_PHASES = {"save": ("wait", "plan", "commit", "replicate", "flush"), "load": ("agree",)}
#: Phases that end when the last rank arrives. The critical path may change ranks there.
_MEETINGS = {"save": ("plan", "commit"), "load": ("agree",)}
#: Phases that move bytes between ranks and storage.
_MOVING = {"save": ("write", "finish"), "load": ("read",)}
#: Limits of a straggler, over the median: a number of median deviations of the logarithms (scaled to the standard deviation
#: of a normal distribution), a share of the median, and seconds. It exceeds all three.
_DEVIATIONS, _SHARE, _LEAST_SECONDS = 6.0, 0.5, 0.25
#: Median of a normal distribution's absolute deviations, in standard deviations.
_NORMAL_MAD = 0.6745
#: Seconds by which clocks may differ in a critical path.
_SAME_TIME = 1e-3
#: Class, rank and stage of a failure where it began, and its message; see `failures.Failure.as_error`.
_ORIGIN = re.compile(r"(\w+): (?:an earlier asynchronous save failed: )?rank (\d+)(?:, ([^:]+))?: (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """One phase of all ranks, in seconds.

    Attributes:
        name: name of the phase.
        median: median over the ranks that went through it.
        longest: longest time of a rank.
        slowest_rank: rank that took longest.
    """

    name: str
    median: float
    longest: float
    slowest_rank: int


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that took much longer for a phase than the others.

    Attributes:
        rank: number of the rank.
        host: name of the rank's machine.
        phase: phase in which it was slow.
        seconds: time that the rank took.
        median: median time of all ranks.
        load: bytes of the rank over the mean of all ranks. A rank with three times the bytes may take three times as long.
    """

    rank: int
    host: str
    phase: str
    seconds: float
    median: float
    load: float = 1.0


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure of one rank.

    Attributes:
        rank: number of the rank.
        stage: phase that failed.
        error: message of the error.
    """

    rank: int
    stage: str
    error: str

    @property
    def origin(self) -> RankFailure | None:
        """The failure where it began, which ranks pass on to all others; None if the message does not say where."""
        found = _ORIGIN.fullmatch(self.error)
        # The text of an error of the program may begin in this way, too.
        if found is None or not hasattr(errors, found[1]):
            return None
        name, rank, stage, message = found.groups()
        return RankFailure(int(rank), stage or "", f"{name}: {message}")


@dataclass(frozen=True, slots=True)
class OperationSummary(OperationFacts):
    """A summary of one save or load over all ranks. Times are in seconds.

    Files of a run hold summaries of its old operations, so a further field needs a default.

    Attributes:
        seconds: time from the call to the end, of the slowest rank.
        blocking_seconds: time for which the caller waited, of the slowest rank.
        nbytes: number of bytes that all ranks wrote or read.
        bandwidth: bytes per second of all ranks together, while any of them moved bytes; 0.0 if none did.
        phases: phases in their order.
        stragglers: slow ranks; the one that lost most time first.
        critical_path: (phase, rank, begin, seconds) of the parts that all ranks waited for, in order of time.
        balance: largest share of bytes over the mean share; 1.0 is even.
        retries: number of repeated requests.
        retry_seconds: time waited before repeated requests, summed over threads and ranks.
        totals: (count, seconds, bytes) of spans and counters by name, summed over ranks.
        failures: failed ranks.
        hosts: number of machines.
        most_retries: rank that waited longest before repeated requests, and its seconds.
    """

    seconds: float
    blocking_seconds: float
    nbytes: int
    bandwidth: float
    phases: tuple[PhaseSummary, ...]
    stragglers: tuple[Straggler, ...]
    critical_path: tuple[tuple[str, int, float, float], ...]
    balance: float
    retries: int
    retry_seconds: float
    totals: dict[str, tuple[int, float, int]] = field(hash=False)
    failures: tuple[RankFailure, ...]
    hosts: int
    most_retries: tuple[int, float] = (0, 0.0)

    @property
    def first_failure(self) -> RankFailure:
        """Failure with which the others began, on the rank where it happened. The operation must have failed."""
        found = [(origin, f.rank) for f in self.failures if (origin := f.origin) is not None]
        if not found:
            return self.failures[0]
        first = next((origin for origin, rank in found if origin.rank == rank), found[0][0])
        stages = {f.rank: f.stage for f in self.failures}
        return first if first.stage else replace(first, stage=stages.get(first.rank, ""))

    @property
    def cut_off(self) -> bool:
        """True if the job ended in the operation: no rank has reported anything."""
        return len(self.missing) == self.world_size

    @property
    def failed(self) -> bool:
        """True if a rank failed, or the job ended in the operation."""
        return bool(self.failures) or self.cut_off

    @property
    def state(self) -> str:
        """Outcome in words."""
        if self.cut_off:
            return "cut off"
        if self.failed:
            return "failed"
        return f"{len(self.missing):,} missing" if self.missing else "done"

    @property
    def spared_share(self) -> float:
        """Share of the ranks' bytes that a replica's holder wrote for others."""
        spared = 0 if self.failed else self.total("left to others")[2]
        return spared / (spared + self.nbytes) if spared else 0.0

    def total(self, name: str) -> tuple[int, float, int]:
        """Return (count, seconds, bytes) of all spans or counts of one name."""
        return self.totals.get(name, (0, 0.0, 0))


@dataclass(frozen=True, slots=True)
class _Phases:
    """The phases of an operation as matrices with a column per rank; nan means that the rank lacks the phase.

    Attributes:
        names: names of the rows of `seconds`.
        seconds: times by phase, summed over its parts.
        parts: names of the rows of `begins` and `ends`; a phase may have several parts.
        begins: beginnings by part.
        ends: ends by part.
    """

    names: list[str]
    seconds: NDArray[np.float64]
    parts: list[str]
    begins: NDArray[np.float64]
    ends: NDArray[np.float64]


def summarize(record: OperationRecord) -> OperationSummary:
    """Sum up one operation over all ranks."""
    rows = MetricRows(record.table)
    is_rank, is_total = rows.where("level", "rank"), rows.where("level", "total")
    rank, seconds, nbytes = rows.numbers("rank"), rows.numbers("seconds"), rows.numbers("nbytes")
    count = rows.numbers("count")
    width = max(record.world_size, int(rank.max(initial=0)) + 1)
    here = is_rank & ~rows.where("name", "missing")
    of_rank = np.bincount(rank[here], nbytes[here], width)
    phases = _phases(record.kind, rows, rank, width)
    names, strings = rows.texts("name")
    totals: dict[str, tuple[int, float, int]] = {}
    sums = [np.bincount(names[is_total], of[is_total], len(strings)) for of in (count, seconds, nbytes)]
    for code in np.unique(names[is_total]):
        totals[strings[code]] = int(sums[0][code]), float(sums[1][code]), int(sums[2][code])
    blocking = is_total & rows.where("name", "blocking")
    hosts, host_names = rows.texts("host")
    host_of = dict(zip(rank[here].tolist(), hosts[here].tolist(), strict=True))
    total = int(of_rank.sum())
    mean = total / max(int(here.sum()), 1)
    retries = totals.get("retry", (0, 0.0, 0))
    return OperationSummary(
        **{field.name: getattr(record, field.name) for field in fields(OperationFacts)},
        seconds=float(seconds[here].max(initial=0.0)),
        blocking_seconds=float(seconds[blocking].max(initial=0.0)),
        nbytes=total,
        bandwidth=_bandwidth(record.kind, phases, total),
        phases=_phase_summaries(phases),
        stragglers=tuple(
            Straggler(slow, host_names[host_of[slow]] if slow in host_of else "", phase, took, median,
                      float(of_rank[slow] / mean) if mean else 1.0)
            for slow, phase, took, median in _stragglers(record.kind, phases, _own_reading(rows, width))
        ),
        critical_path=_critical_path(record.kind, phases),
        balance=float(of_rank.max(initial=0.0) / mean) if mean else 1.0,
        retries=retries[0],
        retry_seconds=retries[1],
        totals=totals,
        failures=_failures(rows, rank),
        hosts=len(np.unique(hosts[here])),
        most_retries=_most_retries(rows, rank, width),
    )  # fmt: skip


def _phases(kind: str, rows: MetricRows, rank: NDArray[np.int32], width: int) -> _Phases:
    at = np.flatnonzero(rows.where("level", "phase"))
    codes, strings = rows.texts("name")
    codes, rank = codes[at], rank[at]
    begin, seconds = rows.numbers("begin")[at].astype(np.float64), rows.numbers("seconds")[at].astype(np.float64)
    order = {name: place for place, name in enumerate(PHASES.get(kind, ()))}
    names = sorted({strings[code] for code in np.unique(codes)}, key=lambda name: (order.get(name, len(order)), name))
    row_of = np.zeros(len(strings), np.int64)
    for row, name in enumerate(names):
        row_of[strings.index(name)] = row
    cell = row_of[codes] * width + rank
    # The parts of one phase on one rank, counted from 0 in order of time.
    by_cell = np.lexsort((begin, cell))
    starts = np.flatnonzero(np.diff(cell[by_cell], prepend=-1))
    part = np.empty(len(at), np.int64)
    part[by_cell] = np.arange(len(at)) - np.repeat(starts, np.diff(starts, append=len(at)))
    keys, row_of_part = np.unique(part * len(names) + row_of[codes], return_inverse=True)
    parts = [names[key % len(names)] for key in keys.tolist()]
    begins, ends = np.full((2, len(parts), width), np.nan)
    begins[row_of_part, rank] = begin
    ends[row_of_part, rank] = begin + seconds
    sums = np.bincount(cell, seconds, len(names) * width).astype(np.float64)  # of no phases, numpy counts in integers
    sums[np.bincount(cell, minlength=len(sums)) == 0] = np.nan
    return _Phases(names, sums.reshape(len(names), width), parts, begins, ends)


def _phase_summaries(phases: _Phases) -> tuple[PhaseSummary, ...]:
    # For all phases at once, and not by nanmedian, which takes ten times as long for the rows of a few ranks.
    unknown = np.isnan(phases.seconds)
    ordered = np.sort(phases.seconds, axis=1)  # nan comes last
    known, slowest = (~unknown).sum(axis=1), np.where(unknown, -1.0, phases.seconds).argmax(axis=1)
    found = []
    for name, seconds, count, rank in zip(phases.names, ordered, known.tolist(), slowest.tolist(), strict=True):
        median = (seconds[(count - 1) // 2] + seconds[count // 2]) / 2
        found.append(PhaseSummary(name, float(median), float(seconds[count - 1]), rank))
    return tuple(found)


def _own_reading(rows: MetricRows, width: int) -> NDArray[np.float64] | None:
    """Return each rank's seconds in calls of the storage, or None without an exchange between ranks.

    In an exchange all ranks wait for the slowest reader, so the length of the phase does not show which rank that was.
    """
    is_total = rows.where("level", "total")
    exchanged = is_total & rows.where("name", "exchanged")
    if not rows.numbers("nbytes")[exchanged].any():
        return None
    at = is_total & rows.where("name", "read")
    return np.bincount(rows.numbers("rank")[at], rows.numbers("seconds")[at], width)


def _stragglers(
    kind: str, phases: _Phases, own_reading: NDArray[np.float64] | None
) -> list[tuple[int, str, float, float]]:
    """Return (rank, phase, seconds, median) of slow ranks, the slowest first."""
    found = []
    for name, of_phase in zip(phases.names, phases.seconds, strict=True):
        if name in SHARED_PHASES.get(kind, ()):
            continue
        seconds = of_phase if name != "read" or own_reading is None else np.fmin(of_phase, own_reading)
        if name == "catalog":  # rank 0 reads the catalog for all
            seconds = np.where(np.arange(len(seconds)) == 0, np.nan, seconds)
        known = seconds[~np.isnan(seconds)]
        if len(known) < 2:  # no other rank to compare with
            continue
        # Of few ranks the slow one would raise the usual median.
        median = float(np.sort(known)[(len(known) - 1) // 2])
        # Of logarithms, as durations vary by a share of themselves and have long tails.
        logs = np.log(np.maximum(known, _SAME_TIME) / max(median, _SAME_TIME))
        deviation = float(np.median(np.abs(logs))) / _NORMAL_MAD
        if len(known) <= 4:  # the deviation of so few is that of the slow one
            deviation = 0.0
        limit = max(
            median * np.exp(min(_DEVIATIONS * deviation, 100.0)), median * (1 + _SHARE), median + _LEAST_SECONDS
        )
        with np.errstate(invalid="ignore"):
            slow = np.flatnonzero(seconds > limit)
        found += [(int(rank), name, float(seconds[rank]), median) for rank in slow]
    return sorted(found, key=lambda straggler: straggler[3] - straggler[2])


def _critical_path(kind: str, phases: _Phases) -> tuple[tuple[str, int, float, float], ...]:
    """Return the parts that all ranks waited for, in order of time. Follows them from the end to the beginning.

    A meeting ends for all ranks when the last one arrives, so before it the path runs along that rank.
    """
    names, ends = phases.parts, phases.ends
    if not names or np.isnan(ends).all():
        return ()
    begins = phases.begins
    place, rank = divmod(int(np.nanargmax(ends)), ends.shape[1])
    path: list[tuple[str, int, float, float]] = []
    until = np.inf
    while True:
        begin, end = begins[place, rank], min(ends[place, rank], until)
        if names[place] in _MEETINGS.get(kind, ()) and not np.isnan(begins[place]).all():
            last = int(np.nanargmax(begins[place]))
            if begin < begins[place, last] <= end + _SAME_TIME:
                rank, begin = last, begins[place, last]
        path.append((names[place], rank, float(begin), float(max(end - begin, 0.0))))
        until = begin
        earlier = np.flatnonzero(begins[:, rank] < begin).tolist()
        if not earlier:
            return tuple(reversed(path))
        place = max(earlier, key=lambda part: (begins[part, rank], ends[part, rank]))


def _bandwidth(kind: str, phases: _Phases, nbytes: int) -> float:
    moving = [place for place, name in enumerate(phases.parts) if name in _MOVING.get(kind, ())]
    if not moving or not nbytes:
        return 0.0
    # Of a phase that is at once over, float32 may lose the length.
    seconds = float(np.nanmax(phases.ends[moving]) - np.nanmin(phases.begins[moving]))
    return nbytes / seconds if seconds > 0 else 0.0


def _most_retries(rows: MetricRows, rank: NDArray[np.int32], width: int) -> tuple[int, float]:
    at = rows.where("level", "total") & rows.where("name", "retry")
    waited = np.bincount(rank[at], rows.numbers("seconds")[at], width)
    return int(waited.argmax()), float(waited.max())


def _failures(rows: MetricRows, rank: NDArray[np.int32]) -> tuple[RankFailure, ...]:
    at = np.flatnonzero(rows.where("level", "rank") & rows.where("name", "failed"))
    if not len(at):
        return ()
    (stages, stage_names), (errors, error_texts) = rows.texts("phase"), rows.texts("subject")
    return tuple(RankFailure(int(rank[i]), stage_names[stages[i]], error_texts[errors[i]]) for i in at)
