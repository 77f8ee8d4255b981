"""Find problems in the saves and loads of a run, and advise. One cause is one finding."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.alerts import rules
from bytecheckpoint.monitoring.analysis.limits import Limits
from bytecheckpoint.monitoring.analysis.run import summarize_run
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.analysis.words import bandwidth_text, plural, ranks_text, seconds_text, size_text
from bytecheckpoint.monitoring.report.episodes import RECENT, Episode, episodes
from bytecheckpoint.monitoring.report.slowness import Slowness, slowness

__all__ = ["RunFinding", "findings"]

_SEVERITIES = ("critical", "warning", "info")
#: Most findings about what is over, the newest.
_HISTORY = 20
#: Fewest saves or loads for which the best shows the bandwidth of the storage.
_FEW = 5
#: Rules whose alerts become findings. Their limits are lower than those of a running job: a finding sums up small losses.
_FAILURES = (rules.FailedRule(), rules.VerificationRule())
_MISSING = rules.MissingRule()
_RETRIES = rules.RetriesRule(per_rank=0.0)
#: Advice about a slow rank, by phase.
_SLOW_PHASE = {
    "capture": "Its objects' state_dict or hooks take long: look for hooks of its own, garbage collection or swapping.",
    "stage": "Copies from its device are slow: look at the PCIe link, the NUMA node and the free memory of the machine.",
    "write": "Its storage or network is slow. If other ranks of the machine are slow too, drain the machine.",
    "finish": "Making its files durable is slow: look at the device or the server behind its path.",
    "read": "Its storage or network is slow. If other ranks of the machine are slow too, drain the machine.",
    "destination": "Its objects' state_dict or hooks take long: look for hooks of its own, garbage collection or swapping.",
    "apply": "Its objects take long to install their state: look for hooks of its own, garbage collection or swapping.",
}
#: Advice about a phase that is long on all ranks, by phase.
_LONG_PHASE = {
    "wait": "Saves wait for the one before: save less often, or find out below why saves take so long.",
    "capture": "Collecting the state takes long on all ranks: look for hooks of modules and for gathered state dicts.",
    "plan": "The plan is made anew: keep names and shapes of tensors stable between saves, and call prepare() early.",
    "stage": "Copying to memory takes long: give the staging pool more memory, or pinned memory more bandwidth.",
    "write": "The storage limits the save: more ranks write in parallel with more replicas; or save to tier+URL, which "
    "copies to memory first.",
    "finish": "Making files durable takes long: the storage's fsync or close is slow.",
    "commit": "The commit takes long though all ranks have written: look at the storage's latency for small files.",
    "replicate": "Copies to other machines' memory take long: look at the network between them, or keep fewer replicas.",
    "flush": "Copying from memory to the durable storage takes long: its bandwidth is too small for the interval of saves.",
    "catalog": "Opening the checkpoint takes long: look at the storage's latency for small files.",
    "agree": "Ranks wait for each other: see which rank comes last in the critical path.",
    "read": "The storage limits the load: compare with its own measured bandwidth.",
}  # fmt: skip
#: Advice after a failed operation, by the class of its error.
_ERROR_ADVICE = {
    "StorageFullError": "Free space or keep fewer steps; a replaced checkpoint needs room for both until it is committed.",
    "StorageUnavailableError": "Look at the device, the mount or the network; the next save tries again.",
    "StorageConflictError": "End the other job that saves there, or give each save a folder of its own.",
    "StorageError": "The storage refuses: look at path, permissions and credentials.",
    "CorruptCheckpointError": "Load an older step; `bytecheckpoint verify` lists all damage, `repair` keeps the rest.",
    "IncompatibleCheckpointError": "The checkpoint does not fit: follow the message (cast, strict, exclude, rename).",
    "PeerLostError": "A rank died or left: look at its log and its machine, and start the job again.",
    "StateChangedError": 'Call `bytecheckpoint.fence()` before the code that changes the state, or use staging="blocking".',
    "CheckpointTimeoutError": "A rank or the storage hangs: see whether that rank has called `save` or `load` at all.",
    "UsageError": "The call or the states are wrong: fix the program.",
}
#: Title and advice for a cause that is not a single rank. "{who}" names machines, "{Kind}" the operation.
_CAUSES = {
    "machine": (
        "{who} is slow",
        "Compare its disk, network and memory with other machines; drain it if it stays slow.",
    ),
    "machines": (
        "{who} are slow",
        "Look for what they have in common: a switch, a rack, a mount, another job.",
    ),
    "some ranks": (
        "{Kind}s are slow on a part of the ranks",
        "The heat map of the page shows which; look for what they have in common.",
    ),
    "storage": (
        "{Kind}s are slow because of the storage",
        "Look for throttling and for other users of the storage; saves to tier+URL copy to memory first.",
    ),
    "network": (
        "{Kind}s are slow because of the network between machines",
        "Look at the links of the slowest rank's machine, or keep fewer replicas.",
    ),
    "earlier save": ("Saves wait for the save before", _LONG_PHASE["wait"]),
    "processes": (
        "{Kind}s are slow in the training's processes",
        "Look for hooks of modules, garbage collection, swapping, or other programs on the machines.",
    ),
}


@dataclass(frozen=True, slots=True)
class RunFinding:
    """A problem of a run.

    Attributes:
        severity: "critical", "warning" or "info". What is over is "info".
        title: problem in a few words.
        text: measurements that show it.
        advice: steps to solve it.
        operation: id of the operation that shows it best; "" for the run.
        rank: that it is about; None: no single one.
        phase: that it is about, or "".
        episode: duration and cost of the problem; None if it is about the run as a whole.
    """

    severity: str
    title: str
    text: str
    advice: str
    operation: str = ""
    rank: int | None = None
    phase: str = ""
    episode: Episode | None = None

    @property
    def ended(self) -> float | None:
        """End of the problem, in seconds since 1970; None while it lasts."""
        return None if self.episode is None else self.episode.ended


def findings(summaries: Sequence[OperationSummary], limits: Limits | None = None) -> list[RunFinding]:
    """Return the problems of a run: the worst first, and what is over last.

    Args:
        summaries: operations of the run, in order of time.
        limits: bandwidths of the storage. If unknown, the best bandwidth of the run stands for them.
    """
    slow = sorted(slowness(summaries), key=lambda one: -one.episode.lost)
    lasting = [one for one in slow if one.episode.ended is None]
    # Seconds of an operation, by kind, that a finding explains: a consequence is no finding of its own.
    explained = {one.last.kind: one.episode.lost / one.episode.operations for one in reversed(lasting)}
    found = [
        *_failures(summaries),
        *_missing(summaries),
        *_cut_off(summaries),
        *map(_slow, slow),
        *_retries(summaries, [one.last.kind for one in lasting if one.cause == "storage"]),
        *_balance(summaries),
        *_bandwidth(summaries, limits or Limits(), explained),
        *_cost(summaries, explained),
    ]
    now = [one for one in found if one.ended is None]
    over = sorted((one for one in found if one.ended is not None), key=lambda one: -(one.ended or 0.0))
    return [*sorted(now, key=lambda one: _SEVERITIES.index(one.severity)), *over[:_HISTORY]]


def _severity(lasting: str, episode: Episode) -> str:
    return lasting if episode.ended is None else "info"


def _alerts(summaries: Sequence[OperationSummary], *chosen: rules.AlertRule) -> list[Alert]:
    """Return the alerts of some rules about the operations."""
    return [alert for summary in summaries for rule in chosen for alert in rule.check(summary, ())]


def _joined(
    summaries: Sequence[OperationSummary], cause: Callable[[OperationSummary], str], *chosen: rules.AlertRule
) -> Iterator[tuple[str, OperationSummary, Episode, Alert]]:
    """Yield (cause, last operation, episode, last alert) of the alerts of some rules, joined by kind and cause."""
    for kind in ("save", "load"):
        operations = [summary for summary in summaries if summary.kind == kind]
        by_cause = defaultdict[str, dict[int, Alert]](dict)
        for place, summary in enumerate(operations):
            for alert in _alerts([summary], *chosen):
                by_cause[cause(summary)][place] = alert
        for name, alerts in by_cause.items():
            costs = {place: (operations[place].seconds, operations[place].blocking_seconds) for place in alerts}
            for episode, places in episodes(operations, costs):
                yield name, operations[places[-1]], episode, alerts[places[-1]]


def _failures(summaries: Sequence[OperationSummary]) -> Iterator[RunFinding]:
    def error(summary: OperationSummary) -> str:
        return summary.first_failure.error.partition(":")[0]

    for name, last, episode, alert in _joined(summaries, error, *_FAILURES):
        text = alert.text[0].upper() + alert.text[1:]
        if last.missing:  # they are the cause, and no finding of their own
            text += f"; {ranks_text(last.missing)} reported nothing"
        yield RunFinding(
            _severity("critical", episode), f"{plural(episode.operations, last.kind)} failed by {name}",
            f"{text}." + (f" {episode.words}" if episode.operations > 1 or episode.ended is not None else ""),
            _ERROR_ADVICE.get(name, "Read the error: it says what failed, where and why."),
            last.id, last.missing[0] if last.missing else alert.rank, alert.phase, episode,
        )  # fmt: skip


def _missing(summaries: Sequence[OperationSummary]) -> Iterator[RunFinding]:
    done = [summary for summary in summaries if not summary.failed]
    for _, last, episode, alert in _joined(done, lambda _: "", _MISSING):
        yield RunFinding(
            _severity("warning", episode), "Ranks reported nothing",
            f"{alert.text}; in {plural(episode.operations, last.kind)} altogether. {episode.words}",
            "A rank that ended, hung or was cut off sends no metrics. Look at its log and its machine.",
            last.id, alert.rank, "", episode,
        )  # fmt: skip


def _cut_off(summaries: Sequence[OperationSummary]) -> Iterator[RunFinding]:
    for kind in ("save", "load"):
        operations = [summary for summary in summaries if summary.kind == kind]
        places = {place: (one.seconds, 0.0) for place, one in enumerate(operations) if one.cut_off}
        for episode, group in episodes(operations, places):
            last = operations[group[-1]]
            phase, rank, _, seconds = last.critical_path[0]
            yield RunFinding(
                _severity("warning", episode), f"A job ended in {plural(episode.operations, kind)}",
                f"{last.name}: nothing more was heard after {seconds_text(seconds)}, in {phase}, with "
                f"{size_text(last.nbytes)} moved.{'' if episode.ended is None else ' It is over.'}",
                "Look at the end of the job's log. What was cut off is no checkpoint; the next save removes its files.",
                last.id, rank, phase, episode,
            )  # fmt: skip


def _slow(slow: Slowness) -> RunFinding:
    last = slow.last
    if slow.cause == "rank":
        title, advice = f"{slow.who} is slow in {slow.phase}", _SLOW_PHASE.get(slow.phase, "")
        advice = advice or "Compare its timeline with that of another rank."
    else:
        pattern, advice = _CAUSES[slow.cause]
        title = pattern.format(who=slow.who, Kind=last.kind.capitalize())
    count = plural(slow.episode.operations, f"slow {last.kind}")
    text = f"{slow.text[0].upper()}{slow.text[1:]}; {count}. {slow.episode.words}"
    return RunFinding(
        _severity("warning", slow.episode), title, text, advice, last.id, slow.rank, slow.phase, slow.episode
    )


def _retries(summaries: Sequence[OperationSummary], slow_storage: Sequence[str]) -> Iterator[RunFinding]:
    recent = [summary for summary in summaries[-RECENT:] if summary.kind not in slow_storage]
    longest = {summary.id: summary.most_retries[1] for summary in recent}
    if hit := _alerts(recent, _RETRIES):
        worst = max(hit, key=lambda alert: longest[alert.operation])
        yield RunFinding(
            "warning" if longest[worst.operation] > 1 else "info", "Requests are repeated", f"{worst.text}.",
            "The storage refuses or drops requests: look for throttling, and at the network of that machine.",
            worst.operation, worst.rank,
        )  # fmt: skip


def _balance(summaries: Sequence[OperationSummary]) -> Iterator[RunFinding]:
    saves = [s for s in summaries[-RECENT:] if s.kind == "save" and not s.failed and s.world_size > 1]
    if saves and saves[-1].balance > 1.5 and saves[-1].nbytes > 256 << 20:
        last = saves[-1]
        yield RunFinding(
            "info", "Ranks write unequal amounts",
            f"One rank writes {last.balance:.1f} times the mean of {size_text(last.nbytes / last.world_size)}.",
            "Large tensors that only one rank holds, or values of rank 0, cannot be spread. Shard them if you can.",
            last.id,
        )  # fmt: skip


def _bandwidth(
    summaries: Sequence[OperationSummary], limits: Limits, explained: Mapping[str, float]
) -> Iterator[RunFinding]:
    for kind in ("save", "load"):
        known = [s for s in summaries if s.kind == kind and s.bandwidth and not s.failed]
        limit = limits.of(known[-1]) if known else None
        if not known or (limit is None and len(known) < _FEW):
            continue
        best, source = limit or (max(s.bandwidth for s in known), "the run has reached")
        recent = known[-RECENT:]
        middle = statistics.median(s.bandwidth for s in recent)
        lost = statistics.median(s.nbytes / s.bandwidth - s.nbytes / best for s in recent)
        if middle < 0.5 * best and lost > max(1.0, 2 * explained.get(kind, 0.0)):
            phase = "write" if kind == "save" else "read"
            yield RunFinding(
                "warning", f"{kind.capitalize()}s use {middle / best:.0%} of the storage's bandwidth",
                f"{bandwidth_text(middle)} of all ranks, {bandwidth_text(best)} {source}; that costs "
                f"{seconds_text(lost)} per {kind}.",
                "Look for slow ranks above, for other users of the storage, and at the network.",
                recent[-1].id, None, phase,
            )  # fmt: skip


def _cost(summaries: Sequence[OperationSummary], explained: Mapping[str, float]) -> Iterator[RunFinding]:
    run = summarize_run(summaries)
    saves = [s for s in summaries if s.kind == "save" and not s.failed]
    if not saves or not run.interval:
        return
    share = run.stall / run.interval
    other = 2 * explained.get("save", 0.0)
    last = saves[-1]
    longest = max(last.critical_path, key=lambda part: part[3], default=("", 0, 0.0, 0.0))
    if share > 0.03 and run.stall > other:
        yield RunFinding(
            "warning", f"Saves stop the training for {share:.1%} of the time",
            f"{seconds_text(run.stall)} every {seconds_text(run.interval)}. Longest part of the last save: {longest[0]} of "
            f"rank {longest[1]}, {seconds_text(longest[3])}.",
            ("Save with async_checkpoint=True" if run.stall > 0.9 * run.write else "Save less often")
            + "; `bytecheckpoint plan-interval` says how often a save pays.",
            last.id, longest[1], longest[0],
        )  # fmt: skip
    if run.write > 0.8 * run.interval and run.write > other:
        yield RunFinding(
            "warning", "A save takes as long as the time between saves",
            f"{seconds_text(run.write)} to the commit, {seconds_text(run.interval)} from save to save.",
            _LONG_PHASE.get(longest[0], "Save less often."), last.id, None, longest[0],
        )  # fmt: skip
