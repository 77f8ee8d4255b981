"""Apply rules to the operations of a running job in the background, or of a whole run afterwards."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.errors import StorageFullError
from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.alerts.rules import (
    OFF,
    AlertRule,
    OverdueRule,
    StorageRule,
    UnflushedRule,
    rules_in_force,
)
from bytecheckpoint.monitoring.analysis.run import COMPARED
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.analysis.words import size_text
from bytecheckpoint.monitoring.background import Background
from bytecheckpoint.monitoring.progress import OperationProgress
from bytecheckpoint.monitoring.record import without_secrets
from bytecheckpoint.monitoring.table import run_of_path
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.optional import check_room
from bytecheckpoint.storage.posix.storage import PosixStorage

__all__ = ["AlertWatcher", "Evaluation", "lacking_room"]


_log = logging.getLogger("bytecheckpoint")
#: Most operations in the queue.
_WAITING = 64
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}
#: Seconds for which a storage may take to return its free space.
_SPACE_TIMEOUT = 10.0


class Evaluation:
    """Applies rules to one operation after the other, and compares it with earlier ones.

    Args:
        rules: rules to apply.
    """

    def __init__(self, rules: Iterable[AlertRule]) -> None:
        self._rules = list(rules)
        self._before: dict[tuple[str, str, int], deque[OperationSummary]] = {}
        self._saves: deque[OperationSummary] = deque(maxlen=COMPARED)  # newest saves of the newest run
        self._raised: dict[tuple[AlertRule, str, int | None, str], float] = {}  # time of the last alert

    def after(self, summary: OperationSummary, lacking: Callable[[str, int], str] | None = None) -> list[Alert]:
        """Return the alerts about an operation that has ended.

        Args:
            summary: summary of the operation.
            lacking: function of a path and a number of bytes; returns why the storage cannot take them, "" if it can. None
                for no such check.
        """
        before = self._before.setdefault(
            (summary.kind, run_of_path(summary.path), summary.world_size), deque(maxlen=COMPARED)
        )
        found: list[Alert] = []
        if summary.kind == "save":
            found += self.at(summary.began)  # alerts that this process could not raise before it began
        for rule in self._rules:
            if rule.operations not in ("all", summary.kind):
                continue
            alerts = list(rule.check(summary, before))
            if isinstance(rule, StorageRule) and lacking is not None:
                alerts += rule.check_room(summary, lacking)
            found += self._new(rule, alerts)
        if not summary.failed:
            before.append(summary)
            if summary.kind == "save":
                if self._saves and run_of_path(self._saves[-1].path) != run_of_path(summary.path):
                    self._saves.clear()
                self._saves.append(summary)
        return found

    def at(self, moment: float) -> list[Alert]:
        """Return the alerts about overdue checkpoints.

        Args:
            moment: time to compare with, in seconds since 1970.
        """
        return [
            alert
            for rule in self._rules
            if isinstance(rule, OverdueRule)
            for alert in self._new(rule, list(rule.check_time(self._saves, moment)))
        ]

    def while_running(self, progress: OperationProgress) -> list[Alert]:
        """Return the alerts about a running operation."""
        return [
            alert
            for rule in self._rules
            if isinstance(rule, UnflushedRule)
            for alert in self._new(rule, list(rule.check_running(progress)))
        ]

    @property
    def next_time(self) -> float | None:
        """Time at which the next save is overdue, in seconds since 1970; None if never."""
        limits = [rule.limit(self._saves) for rule in self._rules if isinstance(rule, OverdueRule)]
        known = [limit for limit in limits if limit is not None]
        return self._saves[-1].began + min(known) if known else None

    def _new(self, rule: AlertRule, alerts: Sequence[Alert]) -> list[Alert]:
        """Return the alerts that were not raised within the rule's `repeat`."""
        found = []
        for alert in alerts:
            key = rule, run_of_path(alert.path), alert.rank, alert.phase  # several rules may have one name
            when = alert.time or time.time()
            if key not in self._raised or abs(when - self._raised[key]) >= rule.repeat:  # a clock may be set back
                self._raised[key] = when
                found.append(alert)
        return found


class AlertWatcher:
    """Applies the rules of the setting `alerts` whenever metrics come, on rank 0, and logs the alerts.

    Args:
        on_alert: callback, given each alert.
    """

    def __init__(self, on_alert: Callable[[Alert], object]) -> None:
        self._on_alert = on_alert
        self._background = Background("bytecheckpoint-alerts")
        self._clock_scheduled = False  # `_look_at_clock` waits in the background
        self._evaluation: tuple[str, Evaluation] | None = None  # with the setting that its rules come from

    def ended(self, summary: OperationSummary) -> None:
        """Apply the rules to an operation that has ended, in the background. Returns at once."""
        if settings().monitoring.alerts != OFF and self._background.waiting() < _WAITING:
            self._background.submit(lambda: self._after(summary))

    def progress(self, progress: OperationProgress) -> None:
        """Apply the rules to a running operation, in the background. Returns at once."""
        if settings().monitoring.alerts != OFF and self._background.waiting() <= self._clock_scheduled:
            self._background.submit(lambda: self._raise(self._current().while_running(progress)))

    def finish(self, timeout: float) -> None:
        """Wait until the rules have been applied to all operations, for `timeout` seconds at most."""
        self._background.flush(timeout)

    def _current(self) -> Evaluation:
        path = settings().monitoring.alerts
        if self._evaluation is None or self._evaluation[0] != path:
            self._evaluation = path, Evaluation(rules_in_force(path))
        return self._evaluation[1]

    def _after(self, summary: OperationSummary) -> None:
        self._raise(self._current().after(summary, lacking_room), summary.id if summary.failed else "")
        self._schedule_clock()

    def _schedule_clock(self) -> None:
        """Schedule a look at the clock for the time at which the next checkpoint is overdue, unless one is scheduled."""
        due = self._current().next_time
        if due is not None and not self._clock_scheduled:
            self._clock_scheduled = True
            self._background.later(max(due - time.time(), 0.0) + 1.0, self._look_at_clock)

    def _look_at_clock(self) -> None:
        self._clock_scheduled = False
        if settings().monitoring.alerts == OFF:
            return
        evaluation = self._current()
        self._raise(evaluation.at(time.time()))
        if (evaluation.next_time or 0.0) > time.time():  # a save has come meanwhile
            self._schedule_clock()

    def _raise(self, alerts: Sequence[Alert], failed: str = "") -> None:
        """Log alerts and pass them on. The program gets the error of the operation `failed`, so no warning repeats it."""
        for alert in alerts:
            level = logging.INFO if failed and alert.operation == failed else _LEVELS[alert.severity]
            where = f" ({alert.path})" if alert.path else ""
            _log.log(level, "alert %s: %s%s", alert.rule, alert.text, where)
            self._on_alert(alert)


def lacking_room(path: str, nbytes: int) -> str:
    """Return why the storage of `path` cannot take `nbytes`, "" if it can or nothing is known."""

    def ask() -> str:
        storage = resolve(path)
        storage = getattr(storage, "durable", storage)  # for a tier
        if isinstance(storage, PosixStorage) and (free := storage.free_bytes()) < nbytes:
            return f"{size_text(free)} are free"
        check_room(storage, nbytes)
        return ""

    try:
        return call_with_timeout(_SPACE_TIMEOUT, ask, f"cannot ask {path} for its free room")
    except StorageFullError as error:
        return without_secrets(str(error))
    except Exception:  # noqa: BLE001  any error of a client: another alert reports it
        return ""
