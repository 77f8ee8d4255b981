"""What the page of a run shows, as columns that its scripts read."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bytecheckpoint.monitoring.analysis.findings import findings
from bytecheckpoint.monitoring.analysis.summary import OperationSummary, summarize
from bytecheckpoint.monitoring.reading import RunMetrics
from bytecheckpoint.monitoring.table import MESH_AXES, OperationRecord

__all__ = ["page_data"]

#: Operations in the history; older ones are left out.
OPERATIONS = 1000
#: Rows of phases of all operations together: three operations of 8,960 ranks.
PHASE_ROWS = 300_000
#: Spans of one operation, and of all operations together.
SPANS_PER_OPERATION, SPANS = 10_000, 60_000
#: Ranks whose spans are kept where not all are: so many of the slowest, and so many at equal distances.
SLOWEST, SAMPLED = 32, 32
#: Stragglers, failures and missing ranks of one operation in the lists; the heat map shows all.
LISTED = 50
_STATES = ("done", "failed", "missing")


def page_data(run: RunMetrics, root: str, made: float) -> dict[str, Any]:
    """Return what the page embeds: plain values, and columns as base64.

    Args:
        run: the metrics of the run.
        root: folder of the run, as it is shown.
        made: seconds since 1970 at which the metrics were read.
    """
    records = run.records[-OPERATIONS:]
    summaries = [summarize(record) for record in records]
    left_out = []
    if len(records) < len(run.records):
        left_out.append(f"The history shows the newest {len(records):,} of {len(run.records):,} operations.")
    details, notes = _details(records, summaries)
    return {
        "version": 1,
        "root": root,
        "made": made,
        "simulated": any(record.path.startswith("simulated://") for record in records),
        "skipped": run.skipped,
        "leftOut": left_out + notes,
        "operations": [_operation(summary) for summary in summaries],
        "details": details,
        "findings": [asdict(finding) for finding in findings(summaries)],
    }


def _operation(summary: OperationSummary) -> dict[str, Any]:
    """Return one operation as the history and the lists of the page show it."""
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
        "critical": [[phase, rank, _number(begin), _number(sec)] for phase, rank, begin, sec in summary.critical_path],
        "failures": [[f.rank, f.stage, f.error] for f in summary.failures[:LISTED]],
        "failureCount": len(summary.failures),
        "missing": list(summary.missing[:LISTED]),
        "missingCount": len(summary.missing),
    }


def _number(value: float) -> float | None:
    """Round to six digits; JSON has no NaN and no infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


# --- ranks, phases and spans of the operations that the heat map can show ---


def _details(records: Sequence[OperationRecord], summaries: Sequence[OperationSummary]) -> tuple[Any, list[str]]:
    """Return the columns of the newest operations that fit, by id, and sentences that say what is left out."""
    details: dict[str, Any] = {}
    rows = spans = 0
    sampled = False
    for place in _newest_first(records):
        record, summary = records[place], summaries[place]
        columns = _Columns(record.table)
        phases = columns.select("phase")
        rows += len(phases)
        if details and rows > PHASE_ROWS:
            break
        chosen = columns.select("span")
        if len(chosen) > SPANS_PER_OPERATION or spans + len(chosen) > SPANS:
            ranks = _interesting_ranks(columns, summary)
            chosen = chosen[np.isin(columns.rank[chosen], ranks)][: max(min(SPANS_PER_OPERATION, SPANS - spans), 0)]
            sampled = True
        spans += len(chosen)
        details[record.id] = _detail(columns, phases, chosen)
    notes = []
    if len(details) < len(records):
        notes.append(
            f"Values of every rank are in this page for {len(details)} of {len(records):,} operations: the newest."
        )
    if sampled:
        notes.append(
            f"Single reads and writes of large operations are in this page for stragglers, the {SLOWEST} slowest ranks and "
            f"{SAMPLED} others; --trace has those of more."
        )
    return details, notes


def _newest_first(records: Sequence[OperationRecord]) -> list[int]:
    """Return the places of operations, the newest of each kind first."""
    places = list(range(len(records) - 1, -1, -1))
    firsts = {records[place].kind: place for place in reversed(places)}.values()
    return sorted(firsts, reverse=True) + [place for place in places if place not in firsts]


def _interesting_ranks(columns: _Columns, summary: OperationSummary) -> NDArray[np.int32]:
    own = columns.select("rank")
    slowest = columns.rank[own[np.argsort(columns.seconds[own])[-SLOWEST:]]]
    sample = columns.rank[own[:: max(len(own) // SAMPLED, 1)]]
    return np.unique(np.concatenate([slowest, sample, [s.rank for s in summary.stragglers[:LISTED]]]).astype(np.int32))


class _Columns:
    """Columns of the table of one operation as arrays."""

    def __init__(self, table: pa.Table) -> None:
        self.rank: NDArray[np.int32] = table["rank"].to_numpy()
        self.begin: NDArray[np.float32] = table["begin"].to_numpy()
        self.seconds: NDArray[np.float32] = table["seconds"].to_numpy()
        self.nbytes: NDArray[np.int64] = table["nbytes"].to_numpy()
        self.failed: NDArray[np.bool_] = table["failed"].to_numpy()
        self._table = table
        self._level, self._levels = self.coded("level")

    def coded(self, name: str) -> tuple[NDArray[np.int32], list[str]]:
        """Return a text column as numbers of strings, and the strings."""
        column = self._table[name]
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        column = pa.chunked_array(column.unify_dictionaries())
        codes = np.concatenate([chunk.indices.to_numpy(zero_copy_only=False) for chunk in column.chunks] or [[]])
        return codes.astype(np.int32), column.chunk(0).dictionary.to_pylist() if column.num_chunks else []

    def axis(self, name: str) -> NDArray[np.int32]:
        """Return the coordinates of a mesh axis, -1 where unknown."""
        return self._table[name].fill_null(-1).to_numpy()

    def select(self, level: str) -> NDArray[np.int64]:
        """Return the places of the rows of a level in order of rank and time."""
        if level not in self._levels:
            return np.zeros(0, np.int64)
        places = np.flatnonzero(self._level == self._levels.index(level))
        return places[np.lexsort((self.begin[places], self.rank[places]))]


def _detail(columns: _Columns, phases: NDArray[np.int64], spans: NDArray[np.int64]) -> dict[str, Any]:
    """Return the columns of one operation; rows of phases and spans lie in order of the ranks' rows."""
    own = columns.select("rank")
    ranks = columns.rank[own]
    names, strings = columns.coded("name")
    states = np.array([_STATES.index(strings[code]) if strings[code] in _STATES else 0 for code in names[own]])
    axes = {axis: columns.axis(axis)[own] for axis in MESH_AXES}
    totals = columns.select("total")
    sums = {}
    for code in np.unique(names[totals]):
        rows = totals[names[totals] == code]
        rows = rows[np.isin(columns.rank[rows], ranks)]
        values = np.zeros(len(ranks), np.float32)
        np.add.at(values, np.searchsorted(ranks, columns.rank[rows]), columns.seconds[rows])
        if values.any():
            sums[strings[code]] = _packed(values)
    return {
        "rank": _packed(ranks),
        "host": _texts(columns, "host", own),
        "axes": {axis: _packed(values) for axis, values in axes.items() if (values >= 0).any()},
        "state": _packed(states.astype(np.uint8)),
        "seconds": _packed(columns.seconds[own]),
        "nbytes": _packed(columns.nbytes[own].astype(np.float64)),
        "totals": sums,
        "phases": _rows(columns, phases, ranks),
        "spans": _rows(columns, spans, ranks)
        | {"nbytes": _packed(columns.nbytes[spans].astype(np.float64)), "subject": _texts(columns, "subject", spans)},
    }


def _rows(columns: _Columns, rows: NDArray[np.int64], ranks: NDArray[np.int32]) -> dict[str, Any]:
    rows = rows[np.isin(columns.rank[rows], ranks)]
    counts = np.bincount(np.searchsorted(ranks, columns.rank[rows]), minlength=len(ranks))
    return {
        "counts": _packed(counts.astype(np.int32)),
        "name": _texts(columns, "name", rows),
        "begin": _packed(columns.begin[rows]),
        "seconds": _packed(columns.seconds[rows]),
        "failed": _packed(columns.failed[rows].astype(np.uint8)),
    }


def _texts(columns: _Columns, name: str, rows: NDArray[np.int64]) -> dict[str, Any]:
    codes, strings = columns.coded(name)
    used, codes = np.unique(codes[rows], return_inverse=True)
    width = np.uint8 if len(used) <= 256 else np.int32
    return {"values": [strings[code] for code in used], "codes": _packed(codes.astype(width))}


def _packed(values: NDArray[Any]) -> dict[str, str]:
    """Return a column as little-endian bytes in base64, with its type."""
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return {"type": f"{values.dtype.kind}{values.dtype.itemsize}", "data": base64.b64encode(values).decode()}

