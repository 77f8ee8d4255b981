"""Apply rules to the operations of a process, or of a whole run afterwards."""

from __future__ import annotations

import time as clock
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.alerts.rules import Overdue, Rule, Storage, Unflushed
from bytecheckpoint.monitoring.analysis.run import COMPARED
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.progress import OperationProgress
from bytecheckpoint.monitoring.sinks.files import run_of_path

__all__ = ["Evaluation"]


class Evaluation:
    """Applies rules to one operation after the other, and remembers what it needs of them.

    Args:
        rules: to apply.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = list(rules)
        self._before: dict[tuple[str, str, int], deque[OperationSummary]] = {}
        self._saves: deque[OperationSummary] = deque(maxlen=COMPARED)  # of the run that was saved last
        self._raised: dict[tuple[Rule, str, int | None, str], float] = {}  # when an alert came last

    def after(self, summary: OperationSummary, lacking: Callable[[str, int], str] | None = None) -> list[Alert]:
        """Return the alerts about an operation that has ended.

        Args:
            summary: the operation.
            lacking: returns what the storage of a path lacks for so many bytes, "" if nothing; None: do not ask.
        """
        before = self._before.setdefault(
            (summary.kind, run_of_path(summary.path), summary.world_size), deque(maxlen=COMPARED)
        )
        found: list[Alert] = []
        if summary.kind == "save":
            found += self.at(summary.began)  # what would have been told if this process had lived then
        for rule in self._rules:
            if rule.operations not in ("all", summary.kind):
                continue
            alerts = list(rule.check(summary, before))
            if isinstance(rule, Storage) and lacking is not None:
                alerts += rule.check_room(summary, lacking)
            found += self._new(rule, alerts)
        if not summary.failed:
            before.append(summary)
            if summary.kind == "save":
                if self._saves and run_of_path(self._saves[-1].path) != run_of_path(summary.path):
                    self._saves.clear()
                self._saves.append(summary)
        return found

    def at(self, time: float) -> list[Alert]:
        """Return the alerts about checkpoints that are overdue at `time`, in seconds since 1970."""
        return [
            alert
            for rule in self._rules
            if isinstance(rule, Overdue)
            for alert in self._new(rule, list(rule.check_time(self._saves, time)))
        ]

    def while_running(self, progress: OperationProgress) -> list[Alert]:
        """Return the alerts about an operation that runs."""
        return [
            alert
            for rule in self._rules
            if isinstance(rule, Unflushed)
            for alert in self._new(rule, list(rule.check_running(progress)))
        ]

    @property
    def next_time(self) -> float | None:
        """When `at` may have alerts if no save comes before, in seconds since 1970; None: never."""
        limits = [rule.limit(self._saves) for rule in self._rules if isinstance(rule, Overdue)]
        known = [limit for limit in limits if limit is not None]
        return self._saves[-1].began + min(known) if known else None

    def _new(self, rule: Rule, alerts: Sequence[Alert]) -> list[Alert]:
        """Return those of `alerts` that did not come a short while ago."""
        found = []
        for alert in alerts:
            key = rule, run_of_path(alert.path), alert.rank, alert.phase  # several rules may have one name
            when = alert.time or clock.time()
            if key not in self._raised or abs(when - self._raised[key]) >= rule.repeat:  # a clock may be set back
                self._raised[key] = when
                found.append(alert)
        return found
