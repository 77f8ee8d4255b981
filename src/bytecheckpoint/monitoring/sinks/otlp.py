"""Metrics as traces and metrics of OpenTelemetry, sent over OTLP/HTTP."""

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
#: Ranks of a larger job that get spans, those that were waited for before others; and spans of one trace.
_RANKS, _SPANS = 64, 4000
_NAME = "bytecheckpoint"
_LOGGERS = [logging.getLogger(module.__name__) for module in (trace_exporter, metric_exporter)]


class OtlpSink(Sink):
    """Sends one trace per operation, and metrics.

    The exporter heeds the variables OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_CERTIFICATE, and the resource
    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.

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
        self._duration = meter.create_histogram(
            f"{_NAME}.operation.duration", "s", "From the call to the end, of the slowest rank."
        )
        self._blocking = meter.create_histogram(f"{_NAME}.blocking.duration", "s", "That the training waited.")
        self._phase = meter.create_histogram(f"{_NAME}.phase.duration", "s", "Of the slowest rank in a phase.")
        self._bytes = meter.create_counter(f"{_NAME}.io", "By", "Moved by all ranks.")
        self._bandwidth = meter.create_gauge(f"{_NAME}.bandwidth", "By/s", "Of all ranks, while they moved bytes.")
        self._retries = meter.create_counter(f"{_NAME}.retries", "{retry}", "Requests to a storage that were repeated.")
        self._missing = meter.create_gauge(f"{_NAME}.missing_ranks", "{rank}", "Ranks that reported nothing.")
        self._alerts = meter.create_counter(f"{_NAME}.alerts", "{alert}", "Alerts.")

    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Send the trace of an operation, and the metrics of all operations so far."""
        self._count(summary)
        self._trace(summary, record.table)
        self._send()

    def alert(self, alert: Alert) -> None:
        """Count an alert, and send it as a span of its own."""
        attributes = {"rule": alert.rule, "severity": alert.severity}
        self._alerts.add(1, attributes)
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
        self._duration.record(summary.seconds, outcome)
        self._blocking.record(summary.blocking_seconds, outcome)
        for phase in summary.phases:
            self._phase.record(phase.longest, kind | {"phase": phase.name})
        self._bytes.add(summary.nbytes, kind)
        self._bandwidth.set(summary.bandwidth, kind)
        self._retries.add(summary.retries, kind)
        self._missing.set(len(summary.missing), kind)

    def _send(self) -> None:
        """Send what has been counted and traced.

        Raises:
            RuntimeError: it does not arrive.
        """
        spans, self._ended.spans = self._ended.spans, []
        with _quiet() as messages:
            data = self._reader.get_metrics_data()
            arrived = data is None or self._metrics.export(data) is MetricExportResult.SUCCESS
            arrived = arrived and self._spans.export(spans) is SpanExportResult.SUCCESS
        if not arrived:
            raise RuntimeError(
                messages[0] if messages else "the export failed"
            )  # the last one only says that it gave up

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
    """Whether the environment gives the service no name."""
    return str(resource.attributes.get("service.name", "")).startswith("unknown_service")


def _rows(summary: OperationSummary, table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows that become spans: ranks, then their phases, then the longest spans."""
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
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """Keep a span."""
        self.spans.append(span)


@contextmanager
def _quiet() -> Iterator[list[str]]:
    """Take what the exporters log on this thread: one log line of `delivery` is enough. Gives the messages."""
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
