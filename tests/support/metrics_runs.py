"""Simulated runs for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bytecheckpoint.monitoring.alerts import Alert, Evaluation, load_rules
from bytecheckpoint.monitoring.analysis.summary import OperationSummary, summarize
from bytecheckpoint.monitoring.record import LEVELS, ROW, RankRecord
from bytecheckpoint.monitoring.simulation import SimulatedRun
from bytecheckpoint.monitoring.sinks.files import METRICS_FOLDER, encode_table
from bytecheckpoint.monitoring.table import OperationRecord, operation_record

__all__ = ["alerts_of", "hostile_record", "simulated", "write_metrics"]


def simulated(*faults: Any, **options: Any) -> list[OperationSummary]:
    """Return the summaries of a small simulated run."""
    run = SimulatedRun(**({"mesh": {"pp": 2, "dp": 2, "tp": 2}, "saves": 10, "faults": faults} | options))
    return [summarize(record) for record in run.records()]


def alerts_of(summaries: list[OperationSummary]) -> list[Alert]:
    """Return what the built-in rules find in a run."""
    evaluation = Evaluation(load_rules())
    return [alert for summary in summaries for alert in evaluation.after(summary)]


def write_metrics(root: Path, records: Iterable[OperationRecord]) -> None:
    """Write the files that a job would leave beside its run."""
    folder = root / METRICS_FOLDER
    folder.mkdir(exist_ok=True)
    for record in records:
        (folder / f"{record.began:.0f}-{record.id}.parquet").write_bytes(encode_table(record.table))


def hostile_record() -> OperationRecord:
    """Return an operation in which every text tries to be markup."""
    bad = '</script><img src=x onerror="document.title=1">'
    rows = np.zeros(1, ROW)
    rows[0] = (LEVELS.index("phase"), 0, 0, 0, 0, 0.0, 1.0, 1, 1)
    records = [
        RankRecord(
            "save", 1, f"/run/{bad}", None, 1.8e9, rank, f"host{bad}", {"dp": rank}, 1, bad if rank else "", bad,
            1.0, 0.1, 1, [bad], rows.tobytes(),
        )
        for rank in range(2)
    ]  # fmt: skip
    return operation_record(records, f"world{bad}", 2)
