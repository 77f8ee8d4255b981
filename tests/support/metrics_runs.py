"""Simulated runs for tests."""

from __future__ import annotations

from typing import Any

from bytecheckpoint.monitoring.alerts import Alert, Evaluation, load_rules
from bytecheckpoint.monitoring.analysis.summary import OperationSummary, summarize
from bytecheckpoint.monitoring.simulation import SimulatedRun

__all__ = ["alerts_of", "simulated"]


def simulated(*faults: Any, **options: Any) -> list[OperationSummary]:
    """Return the summaries of a small simulated run."""
    run = SimulatedRun(**({"mesh": {"pp": 2, "dp": 2, "tp": 2}, "saves": 10, "faults": faults} | options))
    return [summarize(record) for record in run.records()]


def alerts_of(summaries: list[OperationSummary]) -> list[Alert]:
    """Return what the built-in rules find in a run."""
    evaluation = Evaluation(load_rules())
    return [alert for summary in summaries for alert in evaluation.after(summary)]
