"""Find why saves and loads of a run are slow: a rank, a machine, the storage, the network, or the training's processes."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bytecheckpoint.monitoring.analysis.run import COMPARED, FEWEST
from bytecheckpoint.monitoring.analysis.summary import OperationSummary, Straggler
from bytecheckpoint.monitoring.analysis.words import plural, rank_text, ranks_text, seconds_text
from bytecheckpoint.monitoring.report.episodes import Episode, episodes, waited_for

__all__ = ["Slowness", "slowness"]

#: Part of the worst loss on a machine from which a second rank shows that the machine is slow.
_SECOND = 0.2
#: Fewest machines with slow ranks at once, and their part of all, that have a common cause.
_MACHINES, _MACHINES_SHARE = 3, 0.25
#: Growth of a phase's median as a part of that of the slowest rank, below which only some ranks are slow.
_ALL = 0.6
#: Factor of the usual time and seconds above it, from which an operation is slow.
_FACTOR, _SECONDS = 1.5, 1.0
#: Fewest seconds lost at once, and as a part of the operation; part of the time of operations lost again and again.
_NOTABLE_SECONDS, _NOTABLE_PART, _NOTABLE_SHARE = 1.0, 0.4, 0.1
#: Fewest seconds in all, or operations, of something that is over.
_HISTORIC_SECONDS, _HISTORIC_OPERATIONS = 60.0, 5
#: Cause of a slowness of all ranks, by the phase that has grown most.
_CAUSES = {
    "write": "storage", "finish": "storage", "read": "storage", "catalog": "storage", "flush": "storage",
    "commit": "storage", "replicate": "network", "wait": "earlier save",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slowness:
    """Slow operations of one kind with one cause.

    Attributes:
        cause: "rank", "machine", "machines", "some ranks", "storage", "network", "earlier save" or "processes".
        who: rank or machines in words; "" for other causes.
        text: measurements of the last such operation.
        last: last operation.
        rank: slowest rank of that operation.
        phase: phase of that operation that lost most.
        episode: duration and cost.
    """

    cause: str
    who: str
    text: str
    last: OperationSummary
    rank: int
    phase: str
    episode: Episode


@dataclass(frozen=True, slots=True)
class _Symptom:
    """The loss of one operation by one cause, and the ranks that it is about."""

    cause: tuple[str, str]
    lost: float
    cost: float
    text: str
    rank: int
    phase: str
    ranks: frozenset[int]


def slowness(summaries: Sequence[OperationSummary]) -> Iterator[Slowness]:
    """Find what makes operations slow.

    Args:
        summaries: operations of a run, in order of time.
    """
    for kind in ("save", "load"):
        operations = [summary for summary in summaries if summary.kind == kind and not summary.failed]
        found = defaultdict[tuple[str, str], dict[int, _Symptom]](dict)
        for place, symptom in _symptoms(operations):
            found[symptom.cause][place] = symptom
        hosts = {slow.rank: slow.host for operation in operations for slow in operation.stragglers}
        _join(found, hosts)
        for (cause, who), symptoms in found.items():
            if cause == "rank":
                shown = rank_text(int(who), hosts[int(who)])
            elif cause == "machines":
                shown = _names({hosts[rank] for one in symptoms.values() for rank in one.ranks if rank in hosts})
            else:
                shown = who
            affected = {place: (symptom.lost, symptom.cost) for place, symptom in symptoms.items()}
            for episode, places in episodes(operations, affected):
                if _is_notable(episode, [operations[place] for place in places], max(affected[p][0] for p in places)):
                    last = symptoms[places[-1]]
                    yield Slowness(cause, shown, last.text, operations[places[-1]], last.rank, last.phase, episode)


def _names(hosts: Collection[str]) -> str:
    shown = sorted(hosts)[:3]
    more = f" and {len(hosts) - len(shown)} more" if len(hosts) > len(shown) else ""
    return f"{', '.join(shown)}{more}"


def _is_notable(episode: Episode, operations: Sequence[OperationSummary], most: float) -> bool:
    again = len(operations) > 1 and episode.lost > _NOTABLE_SHARE * sum(one.seconds for one in operations)
    if episode.ended is None:
        return again or most >= max(_NOTABLE_SECONDS, _NOTABLE_PART * operations[-1].seconds)
    return episode.lost > _HISTORIC_SECONDS or (again and len(operations) >= _HISTORIC_OPERATIONS)


def _symptoms(operations: Sequence[OperationSummary]) -> Iterator[tuple[int, _Symptom]]:
    # Saves with and without an optimizer may alternate: only operations of similar size are compared. Slow ones do not
    # become the usual.
    healthy = defaultdict[tuple[int, int], deque[OperationSummary]](lambda: deque(maxlen=COMPARED))
    before: list[_Symptom] = []
    for place, now in enumerate(operations):
        found = list(_by_ranks(now))
        usual = healthy[now.world_size, round(2 * math.log2(now.nbytes + 1))]
        grown = _growth(now, usual)
        if grown is None:
            usual.append(now)
        elif sum(symptom.lost for symptom in found) < grown.lost / 2:
            if before and grown.phase == "wait":  # for the save before
                grown = replace(grown, cause=max(before, key=lambda one: one.lost).cause)
            found = [*(one for one in found if one.cause != grown.cause), grown]
        yield from ((place, symptom) for symptom in found)
        before = found


def _growth(now: OperationSummary, usual: Sequence[OperationSummary]) -> _Symptom | None:
    """Return by how much an operation is slower than usual; None if it is not."""
    if len(usual) < FEWEST:
        return None
    seconds = statistics.median(one.seconds for one in usual)
    if now.seconds <= _FACTOR * seconds or now.seconds - seconds <= _SECONDS:
        return None
    longest, median = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for phase in (phase for one in usual for phase in one.phases):
        longest[phase.name].append(phase.longest)
        median[phase.name].append(phase.median)
    known = {name: (statistics.median(longest[name]), statistics.median(median[name])) for name in longest}
    # A commit waits for the slowest rank, so that another phase explains its length.
    grown = max(
        now.phases,
        key=lambda p: (p.longest - known.get(p.name, (p.longest, 0))[0]) * (0.5 if p.name == "commit" else 1),
    )
    before, typical = known.get(grown.name, (0.0, 0.0))
    text = (
        f"{seconds_text(now.seconds)} instead of {seconds_text(seconds)}; most of it in {grown.name}: "
        f"{seconds_text(grown.longest)} instead of {seconds_text(before)}"
    )
    if now.retries:
        text += f"; {plural(now.retries, 'request')} repeated, with {seconds_text(now.retry_seconds)} of waiting"
    cost = max(now.blocking_seconds - statistics.median(one.blocking_seconds for one in usual), 0.0)
    cause = _CAUSES.get(grown.name, "processes")
    if cause != "earlier save" and grown.median - typical < _ALL * (grown.longest - before):
        cause = "some ranks"
    rank = grown.slowest_rank
    return _Symptom((cause, ""), now.seconds - seconds, cost, text, rank, grown.name, frozenset([rank]))


def _by_ranks(now: OperationSummary) -> Iterator[_Symptom]:
    """Yield what ranks lost that were much slower than others: as a machine, if several of its ranks were."""
    by_host = defaultdict[str, list[Straggler]](list)
    for slow in now.stragglers:
        by_host[slow.host if now.hosts > 1 else ""].append(slow)
    if len(by_host) >= max(_MACHINES, _MACHINES_SHARE * now.hosts):
        yield _symptom(now, ("machines", ""), now.stragglers)
        return
    for host, slow_ranks in by_host.items():
        lost = defaultdict[int, float](float)
        for slow in slow_ranks:
            lost[slow.rank] = max(lost[slow.rank], slow.seconds - slow.median)
        worst = max(lost.values())
        if host and sum(one > _SECOND * worst for one in lost.values()) > 1:
            yield _symptom(now, ("machine", host), slow_ranks)
        else:
            for rank in lost:
                yield _symptom(now, ("rank", str(rank)), [slow for slow in slow_ranks if slow.rank == rank])


def _symptom(now: OperationSummary, cause: tuple[str, str], slow_ranks: Sequence[Straggler]) -> _Symptom:
    by_phase = defaultdict[str, list[Straggler]](list)
    for slow in slow_ranks:
        by_phase[slow.phase].append(slow)
    # The ranks of one phase are slow at the same time; the phases follow one another.
    lost = {phase: max(slow.seconds - slow.median for slow in found) for phase, found in by_phase.items()}
    phase = max(lost, key=lost.__getitem__)
    slowest = max(by_phase[phase], key=lambda slow: slow.seconds)
    ranks = ranks_text(sorted({slow.rank for slow in by_phase[phase]}))
    takes = "takes" if len(by_phase[phase]) == 1 else "take up to"
    load = f", with {slowest.load:.1f} times the mean bytes" if slowest.load > 1.5 else ""
    median = seconds_text(slowest.median)
    text = f"{ranks} {takes} {seconds_text(slowest.seconds)} for {phase}{load}; the median is {median}"
    if len(lost) > 1:
        text += f"; slow in {', '.join(sorted(lost.keys() - {phase}))}, too"
    # A copy in the background takes time in `stage` for which nobody waits.
    cost = min(sum(seconds for name, seconds in lost.items() if waited_for(now, name)), now.blocking_seconds)
    everybody = frozenset(slow.rank for slow in slow_ranks)
    return _Symptom(cause, sum(lost.values()), cost, text, slowest.rank, phase, everybody)


def _join(found: dict[tuple[str, str], dict[int, _Symptom]], hosts: Mapping[int, str]) -> None:
    """Join what is about ranks of a slow machine, or of several, also where only a part of them was slow."""
    lost = {cause: sum(symptom.lost for symptom in symptoms.values()) for cause, symptoms in found.items()}
    ranks = {cause: {rank for one in symptoms.values() for rank in one.ranks} for cause, symptoms in found.items()}
    machines = {cause: {hosts[rank] for rank in ranks[cause] if rank in hosts} for cause in found}

    def is_part(cause: tuple[str, str], other: tuple[str, str]) -> bool:
        if cause[0] in ("rank", "machine"):
            return other[0] in ("machine", "machines") and machines[cause] <= machines[other]
        # The median of a noisy storage may be quick.
        if {cause[0], other[0]} == {"some ranks", "storage"}:
            return True
        return other[0] in ("rank", "machine", "machines") and ranks[cause] <= ranks[other]

    for cause in sorted(found, key=lost.__getitem__):
        wider = [other for other in found if other != cause and lost[cause] <= lost[other] and is_part(cause, other)]
        if wider:
            for place, symptom in found.pop(cause).items():
                found[wider[0]].setdefault(place, symptom)
