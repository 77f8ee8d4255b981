"""Make the report of a run that the terminal, the page and the monitor show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.alerts import AlertRule, Evaluation
from bytecheckpoint.monitoring.analysis.limits import Limits
from bytecheckpoint.monitoring.analysis.run import RunSummary, Shares, summarize_run
from bytecheckpoint.monitoring.analysis.words import plural, seconds_text
from bytecheckpoint.monitoring.reading import RunMetrics
from bytecheckpoint.monitoring.report.findings import RunFinding, findings

__all__ = ["Report", "Reporter"]


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a run.

    Attributes:
        metrics: metrics of the run.
        run: summary of the run.
        expected: expected shares of the time with the given rate of failures; None without one, or after too few saves.
        findings: problems, the worst first.
        alerts: alerts in order of time.
        words: sentences about the whole run.
    """

    metrics: RunMetrics
    run: RunSummary
    expected: Shares | None
    findings: Sequence[RunFinding]
    alerts: Sequence[Alert]
    words: Sequence[str]


@dataclass(frozen=True, slots=True)
class Reporter:
    """Makes reports.

    Attributes:
        rules: rules for alerts, beside the alerts of the jobs.
        bandwidth: bytes per second that the storage takes from all ranks; None for the measured bandwidth, or else the best
            of the run.
        mtbf: mean seconds between two failures; None if unknown.
    """

    rules: Sequence[AlertRule] = ()
    bandwidth: float | None = None
    mtbf: float | None = None

    def report(self, metrics: RunMetrics) -> Report:
        """Make the report of a run."""
        operations = metrics.operations
        run = summarize_run(operations)
        evaluation = Evaluation(self.rules)
        alerts = [alert for operation in operations for alert in evaluation.after(operation)]
        # Only the job itself could find some problems, such as a full storage.
        raised = {_identity(alert) for alert in alerts}
        alerts += [alert for alert in metrics.alerts if _identity(alert) not in raised]
        expected = run.at(self.mtbf) if self.mtbf is not None else None
        words = [_sentence(run)] if operations else []
        if expected is not None and self.mtbf is not None:
            words.append(
                f"with a failure every {seconds_text(self.mtbf)}: {expected.effective:.2%} of the time is training that "
                "counts (ETTR)"
            )
        in_order = sorted(alerts, key=lambda alert: alert.time)
        limits = Limits(self.bandwidth, metrics.limits)
        words += limits.words(operations)
        return Report(metrics, run, expected, findings(operations, limits), in_order, words)


def _identity(alert: Alert) -> tuple[str, str, int | None, str]:
    return alert.rule, alert.operation, alert.rank, alert.phase


def _sentence(run: RunSummary) -> str:
    between = f", {seconds_text(run.between_seconds)} at least passed between jobs" if run.between_seconds else ""
    return (
        f"{plural(run.saves, 'save')}, {plural(run.loads, 'load')} and {run.failed} that failed, by "
        f"{plural(run.jobs, 'job')} in {seconds_text(run.seconds)}: "
        f"the training waited {seconds_text(run.stalled_seconds)}, at most {seconds_text(run.undone_seconds)} of work were "
        f"undone{between}; at least {run.effective:.2%} of the time counts (ETTR)"
    )
