"""What tools that plot numbers over training steps get of an operation."""

from __future__ import annotations

from abc import abstractmethod

from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.sinks.base import Sink
from bytecheckpoint.monitoring.table import OperationRecord

__all__ = ["PREFIX", "ScalarSink", "scalars_of"]

#: Beginning of all names.
PREFIX = "bytecheckpoint"


def scalars_of(summary: OperationSummary) -> dict[str, float]:
    """Return the numbers of one operation by name, as "bytecheckpoint/save/seconds"."""
    values = {
        "seconds": summary.seconds,
        "blocking_seconds": summary.blocking_seconds,
        "bytes": summary.nbytes,
        "bytes_per_second": summary.bandwidth,
        "balance": summary.balance,
        "retries": summary.retries,
        "retry_seconds": summary.retry_seconds,
        "stragglers": len(summary.stragglers),
        "failed_ranks": len(summary.failures),
        "missing_ranks": len(summary.missing),
    }
    for phase in summary.phases:
        values[f"phase/{phase.name}/longest"] = phase.longest
        values[f"phase/{phase.name}/median"] = phase.median
    return {f"{PREFIX}/{summary.kind}/{name}": float(value) for name, value in values.items()}


class ScalarSink(Sink):
    """A sink for the scalars of an operation."""

    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Write the scalars of an operation."""
        self.write(scalars_of(summary), summary.step, summary.began)

    @abstractmethod
    def write(self, scalars: dict[str, float], step: int | None, began: float) -> None:
        """Write numbers by name.

        Args:
            scalars: the numbers.
            step: the training step; None where it is not known.
            began: seconds since 1970.
        """
