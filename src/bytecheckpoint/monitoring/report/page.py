"""Make the page of a run: one HTML file with its styles, scripts, chart library and data, which needs no network."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bytecheckpoint.monitoring.analysis.summary import SHARED_PHASES, OperationSummary
from bytecheckpoint.monitoring.report.report import Report
from bytecheckpoint.monitoring.table import MESH_AXES, MetricRows, OperationRecord

__all__ = ["content_security_policy", "make_page", "page_data"]

#: Most operations in the history, the newest.
OPERATIONS = 1000
#: Most alerts in the list, the newest.
ALERTS = 200
#: Most rows of phases of all operations together: three operations of 8,960 ranks.
PHASE_ROWS = 200_000
#: Most spans of one operation, and of all operations together.
SPANS_PER_OPERATION, SPANS = 10_000, 60_000
#: Number of ranks whose spans are kept in a large operation: slowest ranks, and ranks at equal distances.
SLOWEST, SAMPLED = 32, 32
#: Most stragglers, failures and missing ranks of one operation in the lists. The heat map shows all.
LISTED = 50
#: Most seconds between two phases that count as contiguous.
_SAME_TIME = 1e-4
_STATES = ("done", "failed", "missing")


_ASSETS = files("bytecheckpoint.monitoring.report") / "assets"
#: The scripts in the order in which they run, in one scope.
_SCRIPTS = (
    "format.js",
    "data.js",
    "theme.js",
    "summary.js",
    "history.js",
    "heatmap.js",
    "timeline.js",
    "live.js",
    "main.js",
)
_ECHARTS = "echarts/echarts.min.js"
#: Inside a script element a browser ends the text at "</script"; JSON may write these characters as escapes.
_MARKUP = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page_data(report: Report, root: str, made: float) -> dict[str, Any]:
    """Return the data in the page: plain values, and columns as base64.

    Args:
        report: report of the run.
        root: folder of the run, to show.
        made: time of the metrics, in seconds since 1970.
    """
    run, alerts = report.metrics, report.alerts
    operations = run.operations[-OPERATIONS:]
    left_out = []
    if len(operations) < len(run.operations):
        left_out.append(f"The history shows the newest {len(operations):,} of {len(run.operations):,} operations.")
    if len(alerts) > ALERTS:
        left_out.append(f"The newest {ALERTS:,} of {len(alerts):,} alerts are listed.")
    details, notes = _details(run.records, operations)
    return {
        "version": 1,
        "root": root.encode(errors="backslashreplace").decode(),  # a name need not be UTF-8, JSON has to
        "made": made,
        "simulated": any(operation.path.startswith("simulated://") for operation in operations),
        "skipped": run.skipped,
        "leftOut": left_out + notes,
        "operations": [_operation(operation) for operation in operations],
        "details": details,
        "findings": [asdict(finding) for finding in report.findings],
        "words": report.words,
        "alerts": [msgspec.to_builtins(alert) for alert in alerts[-ALERTS:]],
    }


def _operation(summary: OperationSummary) -> dict[str, Any]:
    """Return one operation for the history and the lists of the page."""
    # Shared phases take all ranks equally long, as ranks wait for each other.
    own = [phase for phase in summary.phases if phase.name not in SHARED_PHASES.get(summary.kind, ())]
    return {
        "id": summary.id,
        "kind": summary.kind,
        "path": summary.path,
        "step": summary.step,
        "began": summary.began,
        "worldSize": summary.world_size,
        "hosts": summary.hosts,
        "seconds": _number(summary.seconds),
        "blocking": _number(summary.blocking_seconds),
        "nbytes": summary.nbytes,
        "bandwidth": _number(summary.bandwidth),
        "balance": _number(summary.balance),
        "retries": summary.retries,
        "retrySeconds": _number(summary.retry_seconds),
        "phases": [[p.name, _number(p.median), _number(p.longest), p.slowest_rank] for p in summary.phases],
        "stragglers": [
            [s.rank, s.host, s.phase, _number(s.seconds), _number(s.median)] for s in summary.stragglers[:LISTED]
        ],
        "stragglerCount": len(summary.stragglers),
        "ownPhase": max(own, key=lambda phase: phase.longest).name if own else "",
        "critical": [[phase, rank, _number(begin), _number(sec)] for phase, rank, begin, sec in summary.critical_path],
        "failures": [[f.rank, f.stage, f.error] for f in summary.failures[:LISTED]],
        "cause": summary.first_failure.rank if summary.failures else None,
        "failureCount": len(summary.failures),
        "missing": list(summary.missing[:LISTED]),
        "missingCount": len(summary.missing),
        "state": summary.state,
    }


def _number(value: float) -> float | None:
    """Round to six digits; JSON has no NaN and no infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def make_page(data: Any, *, live: bool = False) -> bytes:
    """Return the page as HTML.

    Args:
        data: result of `page_data`; None if the page asks the monitor for it.
        live: True if the page asks the monitor for news, about once a second.
    """
    page = Template(_asset("page.html"))
    text = page.substitute(
        policy=content_security_policy(live=live).replace("'", "&#39;"),
        style=_asset("style.css"),
        echarts=_asset(_ECHARTS),
        scripts=_scripts(),
        live="true" if live else "false",
        data=msgspec.json.encode(data).decode().translate(_MARKUP),
    )
    return text.encode()


def content_security_policy(*, live: bool) -> str:
    """Return the policy that lets a browser run the two scripts of the page only, and load nothing from elsewhere."""
    scripts = " ".join(f"'sha256-{_digest(text)}'" for text in (_asset(_ECHARTS), _scripts()))
    policy = f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'"
    return policy + ("; connect-src 'self'" if live else "")


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text("utf-8")


@cache
def _scripts() -> str:
    return '"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in _SCRIPTS) + "\n})();"


@cache
def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# --- ranks, phases and spans of the operations that the heat map can show ---


def _details(
    records: Sequence[OperationRecord], operations: Sequence[OperationSummary]
) -> tuple[dict[str, Any], list[str]]:
    """Return the columns of the newest operations that fit, by id, and sentences about the others."""
    details: dict[str, Any] = {}
    summaries = {operation.id: operation for operation in operations}
    records = [record for record in records if record.id in summaries]
    phase_rows = spans = 0
    sampled = False
    for place in _newest_first(records):
        record = records[place]
        rows = MetricRows(record.table)
        phases, chosen = _places(rows, "phase"), _places(rows, "span")
        phase_rows += len(phases)
        if details and phase_rows > PHASE_ROWS:
            break
        if len(chosen) > SPANS_PER_OPERATION or spans + len(chosen) > SPANS:
            ranks = _interesting_ranks(rows, summaries[record.id])
            chosen = chosen[np.isin(rows.numbers("rank")[chosen], ranks)][
                : max(min(SPANS_PER_OPERATION, SPANS - spans), 0)
            ]
            sampled = True
        spans += len(chosen)
        details[record.id] = _detail(rows, phases, chosen, _complete(records, record))
    notes = []
    if len(details) < len(operations):
        notes.append(
            f"Values of every rank are in this page for {len(details)} of {len(operations):,} operations: the newest."
        )
    if sampled:
        notes.append(
            f"Single reads and writes of large operations are in this page for stragglers, the {SLOWEST} slowest ranks and "
            f"{SAMPLED} others; --trace has those of more."
        )
    return details, notes


def _newest_first(records: Sequence[OperationRecord]) -> list[int]:
    """Return the indices of operations, the newest of each kind first."""
    places = list(range(len(records) - 1, -1, -1))
    firsts = {records[place].kind: place for place in reversed(places)}.values()
    return sorted(firsts, reverse=True) + [place for place in places if place not in firsts]


def _interesting_ranks(rows: MetricRows, summary: OperationSummary) -> NDArray[np.int32]:
    rank = rows.numbers("rank")[_places(rows, "rank")]
    shared = np.logical_or.reduce([rows.where("name", phase) for phase in SHARED_PHASES.get(summary.kind, ("",))])
    own = rows.where("level", "phase") & ~shared
    slowest = np.argsort(np.bincount(rows.numbers("rank")[own], rows.numbers("seconds")[own]))[-SLOWEST:]
    sample = rank[:: max(len(rank) // SAMPLED, 1)]
    return np.unique(np.concatenate([slowest, sample, [s.rank for s in summary.stragglers[:LISTED]]]).astype(np.int32))


def _complete(records: Sequence[OperationRecord], record: OperationRecord) -> MetricRows | None:
    """Return an operation of the same world with reports of all ranks; None if there is none, or none is needed."""
    same = (r for r in reversed(records) if r.world_size == record.world_size and not r.missing)
    found = next(same, None) if record.missing else None
    return None if found is None else MetricRows(found.table)


def _places(rows: MetricRows, level: str) -> NDArray[np.int64]:
    """Return the indices of the rows of a level, in order of rank and time."""
    places = np.flatnonzero(rows.where("level", level))
    return places[np.lexsort((rows.numbers("begin")[places], rows.numbers("rank")[places]))]


def _detail(
    rows: MetricRows, phases: NDArray[np.int64], spans: NDArray[np.int64], complete: MetricRows | None
) -> dict[str, Any]:
    """Return the columns of one operation; phases and spans lie in the order of the ranks' rows.

    Args:
        rows: rows of the operation.
        phases: indices of its phases.
        spans: indices of the spans to show.
        complete: rows of an operation of all ranks, for the machines of ranks that reported nothing in this one.
    """
    own = _places(rows, "rank")
    of_place = rows if complete is None else complete
    places = own if complete is None else _places(complete, "rank")
    ranks, seconds = rows.numbers("rank")[own], rows.numbers("seconds")
    names, strings = rows.texts("name")
    states = np.array([_STATES.index(text) if text in _STATES else 0 for text in strings], np.uint8)[names[own]]
    known = {axis: of_place.known(axis)[places] for axis in MESH_AXES}
    totals = _places(rows, "total")
    totals = totals[np.isin(rows.numbers("rank")[totals], ranks)]
    sums = {}
    for code in np.unique(names[totals]):
        of_name = totals[names[totals] == code]
        at = np.searchsorted(ranks, rows.numbers("rank")[of_name])
        values = np.bincount(at, seconds[of_name], len(ranks)).astype(np.float32)
        if values.any():
            sums[strings[code]] = _packed(values)
    return {
        "rank": _packed_small(ranks),
        "host": _texts(of_place, "host", places),
        "axes": {
            axis: _packed_small(np.where(has, of_place.numbers(axis)[places], -1))
            for axis, has in known.items()
            if has.any()
        },
        "state": _packed(states),
        "seconds": _packed(seconds[own]),
        "nbytes": _packed(rows.numbers("nbytes")[own].astype(np.float64)),
        "totals": sums,
        "phases": _parts(rows, phases, ranks),
        "spans": _parts(rows, spans, ranks)
        | {
            "nbytes": _packed(rows.numbers("nbytes")[spans].astype(np.float64)),
            "subject": _texts(rows, "subject", spans),
        },
    }


def _parts(rows: MetricRows, places: NDArray[np.int64], ranks: NDArray[np.int32]) -> dict[str, Any]:
    """Return phases or spans: their number by rank, and their columns."""
    rank, begin, seconds = (rows.numbers(name)[places] for name in ("rank", "begin", "seconds"))
    counts = np.bincount(np.searchsorted(ranks, rank), minlength=len(ranks))
    columns = {
        "counts": _packed_small(counts),
        "name": _texts(rows, "name", places),
        "begin": _packed(begin),
        "seconds": _packed(seconds),
    }
    follows = (rank[1:] != rank[:-1]) | (np.abs(begin[1:] - (begin + seconds)[:-1]) < _SAME_TIME)
    if follows.all():  # all are contiguous: the beginning of the first is enough
        columns["begin"] = _packed(begin[np.diff(rank, prepend=-1) != 0])
    if rows.numbers("failed")[places].any():
        columns["failed"] = _packed_small(rows.numbers("failed")[places])
    return columns


def _texts(rows: MetricRows, name: str, places: NDArray[np.int64]) -> dict[str, Any]:
    codes, strings = rows.texts(name)
    used, codes = np.unique(codes[places], return_inverse=True)
    return {"values": [strings[code] if code >= 0 else "" for code in used], "codes": _packed_small(codes)}


def _packed_small(values: NDArray[Any]) -> dict[str, str]:
    """Return a column of integers in the smallest type that the page knows."""
    low, high = values.min(initial=0), values.max(initial=0)
    fits = (t for t in (np.uint8, np.int8, np.int16, np.int32) if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
    return _packed(values.astype(next(fits)))


def _packed(values: NDArray[Any]) -> dict[str, str]:
    """Return a column as its type and its little-endian bytes in base64."""
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return {"type": f"{values.dtype.kind}{values.dtype.itemsize}", "data": base64.b64encode(values).decode()}
