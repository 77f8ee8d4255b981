"""Alerts of a running job: rules are applied on rank 0, in the background, whenever metrics come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from bytecheckpoint.concurrency import call_with_timeout
from bytecheckpoint.errors import StorageFullError, UsageError
from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.alerts.evaluation import Evaluation
from bytecheckpoint.monitoring.alerts.rules import Rule, load_rules
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.analysis.words import size_text
from bytecheckpoint.monitoring.background import Background
from bytecheckpoint.monitoring.progress import OperationProgress
from bytecheckpoint.monitoring.record import without_secrets
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.optional import check_room
from bytecheckpoint.storage.posix.storage import PosixStorage

__all__ = ["Watcher"]

_log = logging.getLogger("bytecheckpoint")
_OFF = "off"
#: Records and snapshots of progress that may wait.
_WAITING = 64
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}
#: Seconds that a storage has to say how much room there is.
_ROOM_TIMEOUT = 10.0


class Watcher:
    """Applies the rules of the setting `alerts`, and logs what they find.

    Args:
        hand: gets each alert too.
    """

    def __init__(self, hand: Callable[[Alert], object]) -> None:
        self._hand = hand
        self._background = Background("bytecheckpoint-alerts")
        self._waking = False
        self._evaluation: tuple[str, Evaluation] | None = None  # with the setting that it is made from

    def ended(self, summary: OperationSummary) -> None:
        """Look at an operation that has ended, soon. Returns at once."""
        if settings().monitoring.alerts != _OFF and self._background.waiting() < _WAITING:
            self._background.submit(lambda: self._after(summary))

    def progress(self, progress: OperationProgress) -> None:
        """Look at an operation that runs, soon. Returns at once."""
        if settings().monitoring.alerts != _OFF and self._background.waiting() <= self._waking:
            self._background.submit(lambda: self._tell(self._current().while_running(progress)))

    def finish(self, timeout: float) -> None:
        """Wait until what has come was looked at."""
        self._background.flush(timeout)

    def _current(self) -> Evaluation:
        path = settings().monitoring.alerts
        if self._evaluation is None or self._evaluation[0] != path:
            self._evaluation = path, Evaluation(_rules(path))
        return self._evaluation[1]

    def _after(self, summary: OperationSummary) -> None:
        self._tell(self._current().after(summary, _lacking))
        self._wake()

    def _wake(self) -> None:
        """Come back when the next checkpoint is overdue. One job waits for that at a time, however often saves come."""
        due = self._current().next_time
        if due is not None and not self._waking:
            self._waking = True
            self._background.later(max(due - time.time(), 0.0) + 1.0, self._look_at_clock)

    def _look_at_clock(self) -> None:
        self._waking = False
        if settings().monitoring.alerts == _OFF:
            return
        evaluation = self._current()
        self._tell(evaluation.at(time.time()))
        if (evaluation.next_time or 0.0) > time.time():  # a save has come meanwhile
            self._wake()

    def _tell(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            where = f" ({alert.path})" if alert.path else ""
            _log.log(_LEVELS[alert.severity], "alert %s: %s%s", alert.rule, alert.text, where)
            self._hand(alert)


def _rules(path: str) -> list[Rule]:
    try:
        return load_rules(path)
    except UsageError as error:
        _log.warning("%s; the built-in rules hold", error)
        return load_rules()


def _lacking(path: str, nbytes: int) -> str:
    """Return what the storage of `path` lacks for `nbytes`, "" if nothing is known."""

    def ask() -> str:
        storage = resolve(path)
        storage = getattr(storage, "durable", storage)  # of a tier
        if isinstance(storage, PosixStorage) and (free := storage.free_bytes()) < nbytes:
            return f"{size_text(free)} are free"
        check_room(storage, nbytes)
        return ""

    try:
        return call_with_timeout(_ROOM_TIMEOUT, ask, f"cannot ask {path} for its free room")
    except StorageFullError as error:
        return without_secrets(str(error))
    except Exception:  # noqa: BLE001  of any client: another alert's business
        return ""
