"""Write metrics as Chrome trace events, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

A rank is a process; its operations, phases and spans are threads of it. Slices of one thread have to nest, so spans that
overlap are in several threads.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec
import numpy as np

from bytecheckpoint.monitoring.table import MetricRows, OperationRecord

__all__ = ["write_trace"]

#: Most events, about as many as Perfetto opens in seconds. Older operations are left out.
EVENTS = 1_000_000
_NUMBERS = ("rank", "failed", "begin", "seconds", "nbytes")
_TEXTS = ("host", "mesh", "level", "name", "subject")
#: Threads of one kind of operation; the first two are for operations and phases.
_LANES = {"save": 1, "load": 1001}


def write_trace(records: Sequence[OperationRecord], file: BinaryIO) -> int:
    """Write the newest operations as one JSON object. Return how many operations it holds.

    Args:
        records: records of operations, in order of time.
        file: file to write to.
    """
    events, first = 0, len(records)
    while first and (events == 0 or events + records[first - 1].table.num_rows <= EVENTS):
        first -= 1
        events += records[first].table.num_rows
    encoder, writer, separator = msgspec.json.Encoder(), _EventWriter(), b"\n"
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for record in records[first:]:
        for event in writer.events(record, records[first].began):
            file.write(separator + encoder.encode(event))
            separator = b",\n"
    file.write(b"\n]}\n")
    return len(records) - first


class _EventWriter:
    """Makes events, and names each process and thread once."""

    def __init__(self) -> None:
        self._named: set[tuple[int, int]] = set()
        self._ends: dict[tuple[int, int], int] = {}

    def events(self, record: OperationRecord, origin: float) -> Iterator[dict[str, Any]]:
        """Return the events of one operation.

        Args:
            record: record of the operation.
            origin: beginning of the trace, in seconds since 1970.
        """
        title = f"{record.kind} {record.path if record.step is None else record.step}"
        lanes: dict[int, list[tuple[float, int]]] = {}  # heap of (end, lane) of spans, by rank
        for row in _rows_in_order(record):
            begin = record.began - origin + row["begin"]
            end = begin + row["seconds"]
            lane = 0 if row["level"] == "rank" else 1
            if row["level"] == "span":
                free = lanes.setdefault(row["rank"], [])
                lane = heapq.heappop(free)[1] if free and free[0][0] <= begin else len(free) + 2
                heapq.heappush(free, (end, lane))
            # Process and thread 0 are the idle ones of Linux's kernel in Perfetto.
            process, thread = row["rank"] + 1, _LANES[record.kind] + lane
            yield from self._names(process, thread, lane, record.kind, row)
            # Times are rounded: without the bound, a slice could begin before the one in front of it ends.
            start = max(round(begin * 1e6), self._ends.get((process, thread), 0))
            self._ends[process, thread] = finish = max(round(end * 1e6), start)
            yield {
                "ph": "X", "cat": row["level"], "name": row["name"] if lane else title,
                "pid": process, "tid": thread, "ts": start, "dur": finish - start, "args": _arguments(row, record),
            }  # fmt: skip

    def _names(self, process: int, thread: int, lane: int, kind: str, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if (process, 0) not in self._named:
            place = ", ".join(filter(None, (row["host"], row["mesh"])))
            yield _metadata(
                "process_name", process, thread, name=f"rank {row['rank']}" + (f" ({place})" if place else "")
            )
            yield _metadata("process_sort_index", process, thread, sort_index=process)
        if (process, thread) not in self._named:
            name = f"{kind}s" if lane == 0 else f"{kind}: phases" if lane == 1 else f"{kind}: spans {lane - 1}"
            yield _metadata("thread_name", process, thread, name=name)
            yield _metadata("thread_sort_index", process, thread, sort_index=thread)
        self._named |= {(process, 0), (process, thread)}


def _rows_in_order(record: OperationRecord) -> Iterator[dict[str, Any]]:
    """Iterate over ranks, phases and spans, in order of rank and time."""
    rows = MetricRows(record.table)
    order = np.lexsort((rows.numbers("begin"), rows.numbers("rank")))
    order = order[~(rows.where("level", "total") | rows.where("level", "drift"))[order]]
    columns = [rows.numbers(name)[order].tolist() for name in _NUMBERS]
    for name in _TEXTS:
        codes, strings = rows.texts(name)
        columns.append(np.array([*strings, ""], object)[codes[order]].tolist())
    for values in zip(*columns, strict=True):
        yield dict(zip((*_NUMBERS, *_TEXTS), values, strict=True))


def _arguments(row: dict[str, Any], record: OperationRecord) -> dict[str, Any]:
    """Return the details that Perfetto shows for a selected slice."""
    own = {key: row[key] for key in ("subject", "nbytes", "failed") if row[key]}
    return own | {"state": row["name"], "path": record.path, "began": record.began} if row["level"] == "rank" else own


def _metadata(what: str, process: int, thread: int, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": values}
