"""Serve metrics on rank 0 for Prometheus to scrape."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from bytecheckpoint.monitoring.alerts.rules import rules_in_force
from bytecheckpoint.monitoring.analysis.summary import PHASES
from bytecheckpoint.monitoring.sinks.base import Sink, split_address
from bytecheckpoint.monitoring.table import KINDS, OperationRecord
from bytecheckpoint.settings import settings

if TYPE_CHECKING:
    from bytecheckpoint.monitoring.alert import Alert
    from bytecheckpoint.monitoring.analysis.summary import OperationSummary

__all__ = ["PrometheusSink"]

_KIND, _PHASE, _RULE = ("kind",), ("kind", "phase"), ("rule", "severity")
_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
_BLOCKING_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, *_BUCKETS[3:])
#: Name, help and labels of each metric.
_COUNTERS = (
    ("operations", "Saves and loads that have ended.", ("kind", "outcome")),
    ("phase_seconds", "Seconds of the slowest rank in a phase, summed.", _PHASE),
    ("bytes", "Bytes that all ranks moved.", _KIND),
    ("retries", "Requests to a storage that were repeated.", _KIND),
    ("retry_seconds", "Seconds waited before repeated requests, summed over ranks and threads.", _KIND),
    ("alerts", "Alerts.", _RULE),
)
_GAUGES = (
    ("last_operation_seconds", "Length of the newest operation.", _KIND),
    ("last_blocking_seconds", "Seconds for which the training waited for the newest operation.", _KIND),
    ("last_operation_bytes", "Bytes that all ranks moved in the newest operation.", _KIND),
    ("last_bandwidth_bytes_per_second", "Bandwidth of all ranks, while the newest operation moved bytes.", _KIND),
    ("last_balance", "Largest share of bytes of a rank over the mean share.", _KIND),
    ("last_successful_step", "Training step of the newest operation that succeeded.", _KIND),
    ("last_success_timestamp_seconds", "Beginning of the newest operation that succeeded.", _KIND),
    ("last_missing_ranks", "Ranks that reported nothing of the newest operation.", _KIND),
    ("last_failed_ranks", "Ranks that failed in the newest operation.", _KIND),
    ("last_stragglers", "Ranks and phases that were much slower than the median.", _KIND),
    ("last_phase_median_seconds", "Median of a phase of the newest operation.", _PHASE),
    ("last_phase_longest_seconds", "Seconds of the slowest rank in a phase.", _PHASE),
    ("last_phase_slowest_rank", "Number of the slowest rank in a phase.", _PHASE),
    ("last_alert_timestamp_seconds", "Time of the newest alert of a rule.", _RULE),
)
_HISTOGRAMS = (
    ("operation_seconds", "Time from the call to the end, of the slowest rank.", _BUCKETS),
    ("blocking_seconds", "Time for which the training waited.", _BLOCKING_BUCKETS),
)


class PrometheusSink(Sink):
    """Serves /metrics. Labels are kinds, phases and rules, never ranks or paths, so that their number does not grow.

    Args:
        address: prometheus://127.0.0.1:9464; without a host, loopback.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        parts = split_address(address)
        registry = CollectorRegistry()
        prefix = "bytecheckpoint_"
        self._counters = {n: Counter(prefix + n, text, labels, registry=registry) for n, text, labels in _COUNTERS}
        self._gauges = {n: Gauge(prefix + n, text, labels, registry=registry) for n, text, labels in _GAUGES}
        self._histograms = {
            n: Histogram(prefix + n, text, _KIND, registry=registry, buckets=buckets)
            for n, text, buckets in _HISTOGRAMS
        }
        self._begin_with_zero()
        self._server, self._thread = start_http_server(parts.port or 9464, parts.hostname or "127.0.0.1", registry)

    @property
    def port(self) -> int:
        """Port of the endpoint."""
        return int(self._server.server_port)

    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Count an operation, and show it as the newest one."""
        kind = summary.kind
        self._counters["operations"].labels(kind, "failed" if summary.failed else "done").inc()
        self._histograms["operation_seconds"].labels(kind).observe(summary.seconds)
        self._histograms["blocking_seconds"].labels(kind).observe(summary.blocking_seconds)
        self._add(bytes=summary.nbytes, retries=summary.retries, retry_seconds=summary.retry_seconds, labels=(kind,))
        self._show(
            last_operation_seconds=summary.seconds, last_blocking_seconds=summary.blocking_seconds,
            last_operation_bytes=summary.nbytes, last_bandwidth_bytes_per_second=summary.bandwidth,
            last_balance=summary.balance, last_missing_ranks=len(summary.missing),
            last_failed_ranks=len(summary.failures), last_stragglers=len(summary.stragglers), labels=(kind,),
        )  # fmt: skip
        if not summary.failed:
            self._show(last_success_timestamp_seconds=summary.began, labels=(kind,))
            if summary.step is not None:
                self._show(last_successful_step=summary.step, labels=(kind,))
        for phase in summary.phases:
            self._add(phase_seconds=phase.longest, labels=(kind, phase.name))
            self._show(
                last_phase_median_seconds=phase.median, last_phase_longest_seconds=phase.longest,
                last_phase_slowest_rank=phase.slowest_rank, labels=(kind, phase.name),
            )  # fmt: skip

    def alert(self, alert: Alert) -> None:
        """Count an alert."""
        self._add(alerts=1, labels=(alert.rule, alert.severity))
        # Not the alert's own time: a save that fails after an hour has begun an hour ago.
        self._show(last_alert_timestamp_seconds=time.time(), labels=(alert.rule, alert.severity))

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _begin_with_zero(self) -> None:
        """Make all known series: PromQL sees no increase in a counter that begins at 1."""
        for kind in KINDS:
            for outcome in ("done", "failed"):
                self._counters["operations"].labels(kind, outcome)
            self._add(bytes=0, retries=0, retry_seconds=0, labels=(kind,))
            for phase in PHASES[kind]:
                self._add(phase_seconds=0, labels=(kind, phase))
            for histogram in self._histograms.values():
                histogram.labels(kind)
        for rule in rules_in_force(settings().monitoring.alerts):
            self._add(alerts=0, labels=(rule.title, rule.severity))

    def _add(self, *, labels: tuple[str, ...], **amounts: float) -> None:
        for name, amount in amounts.items():
            self._counters[name].labels(*labels).inc(amount)

    def _show(self, *, labels: tuple[str, ...], **values: float) -> None:
        for name, value in values.items():
            self._gauges[name].labels(*labels).set(value)
