"""Find problems in the saves and loads of a run, and advise."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.alerts import rules
from bytecheckpoint.monitoring.analysis.limits import Limits
from bytecheckpoint.monitoring.analysis.run import summarize_run, usual
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.analysis.words import bandwidth_text, rank_text, seconds_text, size_text

__all__ = ["RunFinding", "findings"]

_SEVERITIES = ("critical", "warning", "info")
#: Number of operations at the end of a run that are examined one by one.
_RECENT = 10
#: Fewest lost seconds for a finding about a rank that was slow once.
_NOTABLE_SECONDS = 1.0
#: Fewest saves or loads for which the best shows the bandwidth of the storage.
_FEW = 5
#: Rules whose alerts become findings. Their limits are lower than those of a running job: a finding sums up small losses.
_FAILURES = (rules.FailedRule(), rules.VerificationRule())
_MISSING = rules.MissingRule()
_STRAGGLERS = rules.StragglerRule(ratio=1.0, seconds=0.0)
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


@dataclass(frozen=True, slots=True)
class RunFinding:
    """A problem of a run.

    Attributes:
        severity: "critical", "warning" or "info".
        title: problem in a few words.
        text: measurements that show it.
        advice: steps to solve it.
        operation: id of the operation that shows it best; "" for the run.
        rank: that it is about; None: no single one.
        phase: that it is about, or "".
    """

    severity: str
    title: str
    text: str
    advice: str
    operation: str = ""
    rank: int | None = None
    phase: str = ""


def findings(summaries: Sequence[OperationSummary], limits: Limits | None = None) -> list[RunFinding]:
    """Return the problems of a run, the worst first.

    Args:
        summaries: operations of the run, in order of time.
        limits: bandwidths of the storage. If unknown, the best bandwidth of the run stands for them.
    """
    found: list[RunFinding] = []
    for look in _LOOKS:
        found += look(summaries)
    found += _bandwidth(summaries, limits or Limits())
    return sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity))


def _alerts(summaries: Sequence[OperationSummary], *chosen: rules.Rule) -> list[Alert]:
    """Return the alerts of some rules about the operations."""
    return [alert for summary in summaries for rule in chosen for alert in rule.check(summary, ())]


def _failures(summaries: Sequence[OperationSummary]) -> Iterator[RunFinding]:
    if failed := _alerts(summaries, *_FAILURES):
        last = failed[-1]
        yield RunFinding(
            "critical", f"{len(failed)} of {len(summaries)} operations failed", f"The last one, {last.text}",
            "Read the error; docs/how-to/when-things-fail.md says what each means.",
            last.operation, last.rank, last.phase,
        )  # fmt: skip


def _missing(summaries: Sequence[OperationSummary]) -> Iterator[RunFinding]:
    if hit := _alerts(summaries, _MISSING):
        yield RunFinding(
            "warning", "Ranks reported nothing", f"{hit[-1].text}; in {len(hit)} operations altogether.",
            "A rank that ended, hung or was cut off sends no metrics. Look at its log and its machine.",
            hit[-1].operation, hit[-1].rank,
        )  # fmt: skip


def _stragglers(summaries: Sequence[OperationSummary]) -> Iterator[RunFinding]:
    recent = summaries[-_RECENT:]
    kinds = {summary.id: summary.kind for summary in recent}
    seen = defaultdict[tuple[str, str], list[Alert]](list)
    for alert in _alerts(recent, _STRAGGLERS):
        seen[kinds[alert.operation], alert.phase].append(alert)
    for (kind, phase), alerts in sorted(seen.items(), key=lambda item: -sum(map(_lost, item[1]))):
        lost = defaultdict[int | None, float](float)
        for alert in alerts:
            lost[alert.rank] += _lost(alert)
        rank = max(lost, key=lost.__getitem__)
        own = [alert for alert in alerts if alert.rank == rank]
        last = own[-1]
        if len(own) > 1 or _lost(last) >= _NOTABLE_SECONDS:
            of = sum(summary.kind == kind for summary in recent)
            yield RunFinding(
                "warning", f"{rank_text(rank or 0, last.host)} is slow in {phase}",
                f"{last.text}; slowest in {len(own)} of the last {of} {kind}s.",
                _SLOW_PHASE.get(phase, "Compare its timeline with that of another rank."),
                last.operation, rank, phase,
            )  # fmt: skip


def _lost(alert: Alert) -> float:
    """Return the seconds that a straggler takes over the median, which is the limit of the rule."""
    return (alert.value or 0.0) - (alert.limit or 0.0)


def _retries(summaries: Sequence[OperationSummary]) -> Iterator[RunFinding]:
    longest = {summary.id: summary.most_retries[1] for summary in summaries[-_RECENT:]}
    if hit := _alerts(summaries[-_RECENT:], _RETRIES):
        worst = max(hit, key=lambda alert: longest[alert.operation])
        yield RunFinding(
            "warning" if longest[worst.operation] > 1 else "info", "Requests are repeated", f"{worst.text}.",
            "The storage refuses or drops requests: look for throttling, and at the network of that machine.",
            worst.operation, worst.rank,
        )  # fmt: skip


def _balance(summaries: Sequence[OperationSummary]) -> Iterator[RunFinding]:
    saves = [s for s in summaries[-_RECENT:] if s.kind == "save" and not s.failed and s.world_size > 1]
    if saves and saves[-1].balance > 1.5 and saves[-1].nbytes > 256 << 20:
        last = saves[-1]
        yield RunFinding(
            "info", "Ranks write unequal amounts",
            f"One rank writes {last.balance:.1f} times the mean of {size_text(last.nbytes / last.world_size)}.",
            "Large tensors that only one rank holds, or values of rank 0, cannot be spread. Shard them if you can.",
            last.id,
        )  # fmt: skip


def _changes(summaries: Sequence[OperationSummary]) -> Iterator[RunFinding]:
    for kind in ("save", "load"):
        places = [place for place, s in enumerate(summaries) if s.kind == kind and not s.failed]
        if not places:
            continue
        now, before = summaries[places[-1]], usual(summaries, places[-1])
        if before and now.seconds > 1.5 * before["seconds"] and now.seconds - before["seconds"] > 1:
            grown = max(
                now.phases, key=lambda p: p.longest - before.get(p.name, p.longest) if p.name != "commit" else 0
            )
            yield RunFinding(
                "warning", f"The last {kind} is slower than before",
                f"{seconds_text(now.seconds)} instead of {seconds_text(before['seconds'])}; most of it in {grown.name}: "
                f"{seconds_text(grown.longest)} instead of {seconds_text(before.get(grown.name, 0.0))}.",
                "If one rank is slow, a finding says so. If all are, the storage or the network has changed.",
                now.id, grown.slowest_rank, grown.name,
            )  # fmt: skip


def _bandwidth(summaries: Sequence[OperationSummary], limits: Limits) -> Iterator[RunFinding]:
    for kind in ("save", "load"):
        known = [s for s in summaries if s.kind == kind and s.bandwidth and not s.failed]
        limit = limits.of(known[-1]) if known else None
        if not known or (limit is None and len(known) < _FEW):
            continue
        best, source = limit or (max(s.bandwidth for s in known), "the run has reached")
        recent = known[-_RECENT:]
        middle = statistics.median(s.bandwidth for s in recent)
        lost = statistics.median(s.nbytes / s.bandwidth - s.nbytes / best for s in recent)
        if middle < 0.5 * best and lost > 1:
            phase = "write" if kind == "save" else "read"
            yield RunFinding(
                "warning", f"{kind.capitalize()}s use {middle / best:.0%} of the storage's bandwidth",
                f"{bandwidth_text(middle)} of all ranks, {bandwidth_text(best)} {source}; that costs "
                f"{seconds_text(lost)} per {kind}.",
                "Look for slow ranks above, for other users of the storage, and at the network.",
                recent[-1].id, None, phase,
            )  # fmt: skip


def _cost(summaries: Sequence[OperationSummary]) -> Iterator[RunFinding]:
    run = summarize_run(summaries)
    saves = [s for s in summaries if s.kind == "save" and not s.failed]
    if not saves or not run.interval:
        return
    share = run.stall / run.interval
    last = saves[-1]
    longest = max(last.critical_path, key=lambda part: part[3], default=("", 0, 0.0, 0.0))
    if share > 0.03:
        yield RunFinding(
            "warning", f"Saves stop the training for {share:.1%} of the time",
            f"{seconds_text(run.stall)} every {seconds_text(run.interval)}. Longest part of the last save: {longest[0]} of "
            f"rank {longest[1]}, {seconds_text(longest[3])}.",
            ("Save with async_checkpoint=True" if run.stall > 0.9 * run.write else "Save less often")
            + "; `bytecheckpoint plan-interval` says how often a save pays.",
            last.id, longest[1], longest[0],
        )  # fmt: skip
    if run.write > 0.8 * run.interval:
        yield RunFinding(
            "warning", "A save takes as long as the time between saves",
            f"{seconds_text(run.write)} to the commit, {seconds_text(run.interval)} from save to save.",
            _LONG_PHASE.get(longest[0], "Save less often."), last.id, None, longest[0],
        )  # fmt: skip


_LOOKS: tuple[Callable[[Sequence[OperationSummary]], Iterator[RunFinding]], ...] = (
    _failures, _missing, _stragglers, _retries, _changes, _balance, _cost,
)  # fmt: skip
