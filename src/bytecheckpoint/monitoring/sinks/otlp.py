"""Send metrics as traces and metrics of OpenTelemetry, over OTLP/HTTP."""

from __future__ import annotations

import base64
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from opentelemetry.exporter.otlp.proto.http import metric_exporter, trace_exporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from bytecheckpoint._version import __version__
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.sinks.base import Sink, split_address
from bytecheckpoint.monitoring.table import OperationRecord

if TYPE_CHECKING:
    from bytecheckpoint.monitoring.alert import Alert

__all__ = ["OtlpSink"]

#: Seconds that one export may take.
_TIMEOUT = 5.0
#: Most ranks with spans, those that the others waited for first; and most spans of one trace.
_RANKS, _SPANS = 64, 4000
_NAME = "bytecheckpoint"
#: Name, unit and description of each metric.
_HISTOGRAMS = (
    ("operation.duration", "s", "Time from the call to the end, of the slowest rank."),
    ("blocking.duration", "s", "Time for which the training waited."),
    ("phase.duration", "s", "Time of the slowest rank in a phase."),
)
_COUNTERS = (
    ("io", "By", "Bytes that all ranks moved."),
    ("retries", "{retry}", "Requests to a storage that were repeated."),
    ("alerts", "{alert}", "Alerts."),
)
_GAUGES = (
    ("bandwidth", "By/s", "Bandwidth of all ranks, while they moved bytes."),
    ("missing_ranks", "{rank}", "Ranks that reported nothing."),
)
_LOGGERS = [logging.getLogger(module.__name__) for module in (trace_exporter, metric_exporter)]


class OtlpSink(Sink):
    """Sends one trace per operation, and metrics.

    The exporter reads the variables OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_CERTIFICATE, and the resource those
    of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.

    Args:
        address: otlp://host:4318; otlps:// for HTTPS. A user and a password go into an Authorization header.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        parts = split_address(address)
        scheme, port = ("https" if parts.scheme == "otlps" else "http"), parts.port or 4318
        host = parts.hostname or "127.0.0.1"
        root = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{parts.path.rstrip('/')}"
        options: dict[str, Any] = {"timeout": _TIMEOUT}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            options["headers"] = {"Authorization": f"Basic {base64.b64encode(login).decode()}"}
        self._spans = trace_exporter.OTLPSpanExporter(f"{root}/v1/traces", **options)
        self._metrics = metric_exporter.OTLPMetricExporter(f"{root}/v1/metrics", **options)
        own = Resource.create()
        resource = own.merge(Resource({"service.name": _NAME})) if _unnamed(own) else own
        self._ended = _Ended()
        # Sampling of the training's own traces is no reason to lose the one trace of a save.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False, sampler=sampling.ALWAYS_ON)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer(_NAME, __version__)
        self._reader = InMemoryMetricReader()
        meters = MeterProvider([self._reader], resource=resource, shutdown_on_exit=False)
        meter = meters.get_meter(_NAME, __version__)
        self._histograms = {n: meter.create_histogram(f"{_NAME}.{n}", unit, text) for n, unit, text in _HISTOGRAMS}
        self._counters = {n: meter.create_counter(f"{_NAME}.{n}", unit, text) for n, unit, text in _COUNTERS}
        self._gauges = {n: meter.create_gauge(f"{_NAME}.{n}", unit, text) for n, unit, text in _GAUGES}

    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Send the trace of an operation, and the metrics of all operations so far."""
        self._count(summary)
        self._trace(summary, record.table)
        self._send()

    def alert(self, alert: Alert) -> None:
        """Count an alert, and send it as a span of its own."""
        attributes = {"rule": alert.rule, "severity": alert.severity}
        self._counters["alerts"].add(1, attributes)
        at = _nanoseconds(alert.time)
        span = self._tracer.start_span(
            f"alert {alert.rule}", attributes=attributes | {"text": alert.text}, start_time=at
        )
        span.end(at)
        self._send()

    def close(self) -> None:
        """Close connections."""
        self._spans.shutdown()  # type: ignore[no-untyped-call]
        self._metrics.shutdown()

    def _count(self, summary: OperationSummary) -> None:
        kind = {"kind": summary.kind}
        outcome = kind | {"outcome": "failed" if summary.failed else "done"}
        self._histograms["operation.duration"].record(summary.seconds, outcome)
        self._histograms["blocking.duration"].record(summary.blocking_seconds, outcome)
        for phase in summary.phases:
            self._histograms["phase.duration"].record(phase.longest, kind | {"phase": phase.name})
        self._counters["io"].add(summary.nbytes, kind)
        self._counters["retries"].add(summary.retries, kind)
        self._gauges["bandwidth"].set(summary.bandwidth, kind)
        self._gauges["missing_ranks"].set(len(summary.missing), kind)

    def _send(self) -> None:
        """Send the counted metrics and the ended spans.

        Raises:
            RuntimeError: the server has not taken them.
        """
        spans, self._ended.spans = self._ended.spans, []
        with _quiet() as messages:
            data = self._reader.get_metrics_data()
            arrived = data is None or self._metrics.export(data) is MetricExportResult.SUCCESS
            arrived = arrived and self._spans.export(spans) is SpanExportResult.SUCCESS
        if not arrived:
            # The first message says why, the last one only that the exporter has given up.
            raise RuntimeError(messages[0] if messages else "the export failed")

    def _trace(self, summary: OperationSummary, table: pa.Table) -> None:
        attributes = {
            "operation": summary.id, "path": summary.path, "step": summary.step, "world_size": summary.world_size,
            "bytes": summary.nbytes, "blocking_seconds": summary.blocking_seconds, "retries": summary.retries,
        }  # fmt: skip
        known = {f"{_NAME}.{name}": value for name, value in attributes.items() if value is not None}
        began = summary.began
        root = self._tracer.start_span(summary.kind, start_time=_nanoseconds(began), attributes=known)
        if summary.failed or summary.missing:
            why = "; ".join(f"rank {f.rank}: {f.error}" for f in summary.failures[:3])
            root.set_status(Status(StatusCode.ERROR, why or f"{len(summary.missing)} ranks are missing"))
        parents: dict[int, tuple[Span, float]] = {}
        for row in _rows(summary, table):
            name, begin, seconds = row["name"], row["begin"], row["seconds"]
            attributes = {
                f"{_NAME}.{key}": row[key] for key in ("rank", "host", "mesh", "nbytes", "subject") if row[key]
            }
            attributes[f"{_NAME}.rank"] = row["rank"]
            parent = root
            if row["level"] == "rank":
                name = f"rank {row['rank']}"
            elif row["rank"] in parents:
                parent = parents[row["rank"]][0]
            span = self._tracer.start_span(
                name, set_span_in_context(parent), start_time=_nanoseconds(began + begin), attributes=attributes
            )
            if row["failed"]:
                span.set_status(Status(StatusCode.ERROR, row["subject"] if row["level"] == "rank" else None))
            if row["level"] == "rank":
                parents[row["rank"]] = span, began + begin + seconds
            else:
                span.end(_nanoseconds(began + begin + seconds))
        for span, end in parents.values():
            span.end(_nanoseconds(end))
        root.end(_nanoseconds(max([began + summary.seconds, *(end for _, end in parents.values())])))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _unnamed(resource: Resource) -> bool:
    """Return whether the environment gives the service no name."""
    return str(resource.attributes.get("service.name", "")).startswith("unknown_service")


def _rows(summary: OperationSummary, table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows for spans of the trace: ranks, then their phases, then the longest spans."""
    matter = [straggler.rank for straggler in summary.stragglers]
    matter += [phase.slowest_rank for phase in summary.phases] + [rank for _, rank, _, _ in summary.critical_path]
    chosen = list(dict.fromkeys([*matter, *range(summary.world_size)]))[:_RANKS]
    of_chosen = pc.is_in(table["rank"], value_set=pa.array(chosen, pa.int32()))
    level = table["level"].cast(pa.string())
    left = _SPANS
    for name in ("rank", "phase", "span"):
        rows = table.filter(pc.and_(of_chosen, pc.equal(level, name)))
        rows = rows.sort_by([("seconds", "descending")]).slice(0, left)
        left -= len(rows)
        yield from rows.select(
            ["level", "name", "rank", "host", "mesh", "subject", "failed", "begin", "seconds", "nbytes"]
        ).to_pylist()


class _Ended(SpanProcessor):
    """Collects the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """Keep a span."""
        self.spans.append(span)


@contextmanager
def _quiet() -> Iterator[list[str]]:
    """Collect the messages that the exporters log on this thread: one log line of `delivery` is enough."""
    messages: list[str] = []
    thread = threading.get_ident()

    def take(entry: logging.LogRecord) -> bool:
        if entry.thread == thread:
            messages.append(entry.getMessage())
        return entry.thread != thread

    for logger in _LOGGERS:
        logger.addFilter(take)
    try:
        yield messages
    finally:
        for logger in _LOGGERS:
            logger.removeFilter(take)
