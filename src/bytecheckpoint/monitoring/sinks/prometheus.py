"""Metrics for Prometheus to scrape from rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from bytecheckpoint.monitoring.sinks.base import Sink, split_address
from bytecheckpoint.monitoring.table import KINDS, OperationRecord

if TYPE_CHECKING:
    from bytecheckpoint.monitoring.alert import Alert
    from bytecheckpoint.monitoring.analysis.summary import OperationSummary

__all__ = ["PrometheusSink"]

_KIND = ("kind",)
_PHASE = ("kind", "phase")
_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
_BLOCKING_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, *_BUCKETS[3:])


class PrometheusSink(Sink):
    """Serves /metrics. Labels are kinds, phases and rules, never ranks or paths: their number does not grow.

    Args:
        address: prometheus://127.0.0.1:9464; without a host, loopback.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        parts = split_address(address)
        registry = self._registry = CollectorRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = _KIND) -> Gauge:
            return Gauge(f"bytecheckpoint_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = _KIND) -> Counter:
            return Counter(f"bytecheckpoint_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"bytecheckpoint_{name}", text, _KIND, registry=registry, buckets=buckets)

        self._operations = counter("operations", "Saves and loads that have ended.", ("kind", "outcome"))
        self._seconds = histogram("operation_seconds", "From the call to the end, of the slowest rank.", _BUCKETS)
        self._blocking = histogram("blocking_seconds", "That the training waited.", _BLOCKING_BUCKETS)
        self._last = {
            "seconds": gauge("last_operation_seconds", "Length of the newest operation."),
            "blocking_seconds": gauge("last_blocking_seconds", "That the training waited for the newest operation."),
            "nbytes": gauge("last_operation_bytes", "Bytes that all ranks moved in the newest operation."),
            "bandwidth": gauge(
                "last_bandwidth_bytes_per_second", "Of all ranks, while the newest operation moved bytes."
            ),
            "balance": gauge("last_balance", "Largest share of bytes of a rank over the mean share."),
        }
        self._step = gauge("last_successful_step", "Training step of the newest operation that succeeded.")
        self._time = gauge("last_success_timestamp_seconds", "When it began.")
        self._missing = gauge("last_missing_ranks", "Ranks that reported nothing of the newest operation.")
        self._failed = gauge("last_failed_ranks", "Ranks that failed in the newest operation.")
        self._stragglers = gauge("last_stragglers", "Ranks and phases that were much slower than the median.")
        self._phase_median = gauge("last_phase_median_seconds", "Of a phase of the newest operation.", _PHASE)
        self._phase_longest = gauge("last_phase_longest_seconds", "Of the slowest rank in a phase.", _PHASE)
        self._phase_rank = gauge("last_phase_slowest_rank", "Number of the slowest rank in a phase.", _PHASE)
        self._phase_seconds = counter("phase_seconds", "Seconds of the slowest rank in a phase, summed.", _PHASE)
        self._bytes = counter("bytes", "Moved by all ranks.")
        self._retries = counter("retries", "Requests to a storage that were repeated.")
        self._retry_seconds = counter("retry_seconds", "Waited before them, summed over ranks and threads.")
        self._alerts = counter("alerts", "Alerts.", ("rule", "severity"))
        self._alert_time = gauge("last_alert_timestamp_seconds", "Of the newest alert of a rule.", ("rule", "severity"))
        # A counter that begins at 1 has no increase that PromQL could see.
        for kind in KINDS:
            for outcome in ("done", "failed"):
                self._operations.labels(kind, outcome)
            for metric in (self._seconds, self._blocking, self._bytes, self._retries, self._retry_seconds):
                metric.labels(kind)
        self._server, self._thread = start_http_server(parts.port or 9464, parts.hostname or "127.0.0.1", registry)

    @property
    def port(self) -> int:
        """The port of the endpoint."""
        return int(self._server.server_port)

    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Count an operation, and show it as the newest one."""
        kind = summary.kind
        self._operations.labels(kind, "failed" if summary.failed else "done").inc()
        self._seconds.labels(kind).observe(summary.seconds)
        self._blocking.labels(kind).observe(summary.blocking_seconds)
        for name, gauge in self._last.items():
            gauge.labels(kind).set(getattr(summary, name))
        self._missing.labels(kind).set(len(summary.missing))
        self._failed.labels(kind).set(len(summary.failures))
        self._stragglers.labels(kind).set(len(summary.stragglers))
        if not summary.failed:
            self._time.labels(kind).set(summary.began)
            if summary.step is not None:
                self._step.labels(kind).set(summary.step)
        for phase in summary.phases:
            self._phase_median.labels(kind, phase.name).set(phase.median)
            self._phase_longest.labels(kind, phase.name).set(phase.longest)
            self._phase_rank.labels(kind, phase.name).set(phase.slowest_rank)
            self._phase_seconds.labels(kind, phase.name).inc(phase.longest)
        self._bytes.labels(kind).inc(summary.nbytes)
        self._retries.labels(kind).inc(summary.retries)
        self._retry_seconds.labels(kind).inc(summary.retry_seconds)

    def alert(self, alert: Alert) -> None:
        """Count an alert."""
        self._alerts.labels(alert.rule, alert.severity).inc()
        self._alert_time.labels(alert.rule, alert.severity).set(alert.time)

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
