"""Show progress on rank 0's standard error: as a bar on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.analysis.words import seconds_text
from bytecheckpoint.monitoring.progress import OperationProgress
from bytecheckpoint.monitoring.sinks.base import Sink
from bytecheckpoint.monitoring.table import OperationRecord

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["ConsoleSink"]

_MIB = 1 << 20
#: Seconds between two plain lines.
_LINE_SECONDS = 10.0


class ConsoleSink(Sink):
    """Shows operations that run for longer than a second."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._tasks: dict[str, Any] = {}
        self._printed: dict[str, float] = {}  # time of the last plain line, by operation

    def progress(self, progress: OperationProgress) -> None:
        """Show the progress of an operation."""
        if self._console.is_terminal:
            self._move(progress)
        elif not progress.ended and progress.time - self._printed.get(progress.operation, 0.0) >= _LINE_SECONDS:
            self._printed[progress.operation] = progress.time
            _write(_line(progress))

    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Print the end of an operation whose progress was printed."""
        self._close_bar(record.id)
        if self._printed.pop(record.id, None) is not None:
            _write(f"{record.kind} {record.path}: {'failed' if summary.failed else 'done'}")

    def close(self) -> None:
        """Leave the terminal as it was."""
        for operation in list(self._tasks):
            self._close_bar(operation)

    def _move(self, progress: OperationProgress) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        if self._bar is None:
            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
        task = self._tasks.get(progress.operation)
        if task is None:
            task = self._tasks[progress.operation] = self._bar.add_task("")
        total = max(progress.planned, progress.done, 1)
        self._bar.update(task, description=_label(progress), completed=progress.done, total=total, refresh=True)
        if progress.ended:
            self._close_bar(progress.operation)

    def _close_bar(self, operation: str) -> None:
        task = self._tasks.pop(operation, None)
        if self._bar is None or task is None:
            return
        self._bar.remove_task(task)
        if not self._tasks:
            self._bar.stop()
            self._bar = None


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _label(progress: OperationProgress) -> str:
    """Return the operation, and the phase of the rank that is furthest behind."""
    ranks = progress.ranks
    behind = progress.furthest_behind
    step = "" if progress.step is None else f" step {progress.step}"
    return f"{progress.kind}{step}, rank {ranks['rank'][behind]} in {ranks['phase'][behind]}"


def _line(progress: OperationProgress) -> str:
    seconds = progress.time - progress.began
    done, planned = progress.done / _MIB, progress.planned / _MIB
    left = f", about {seconds_text(progress.seconds_left)} left" if 0 < progress.seconds_left < math.inf else ""
    return f"{_label(progress)}: {done:.0f} of {planned:.0f} MiB after {seconds:.0f} s{left}"
