"""The sinks of this process, each with a bounded queue and a thread of its own."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.alerts.evaluation import AlertWatcher
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.background import Background
from bytecheckpoint.monitoring.progress import OperationProgress
from bytecheckpoint.monitoring.record import error_text
from bytecheckpoint.monitoring.sinks import Sink, make_sink, shown
from bytecheckpoint.monitoring.table import OperationRecord
from bytecheckpoint.settings import settings
from bytecheckpoint.tuning import tuning

__all__ = ["deliver", "deliver_alert", "deliver_progress", "finish", "is_on", "open_sinks"]

_log = logging.getLogger("bytecheckpoint")
_OFF = ("", "off")
#: Records that wait for one sink.
_WAITING = 64


class _Delivery:
    """Delivers records to one sink.

    Attributes:
        dropped: records and alerts that did not reach the sink: its queue was full, or it failed.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._shown = shown(address)
        self._background = Background(f"bytecheckpoint-sink-{self._shown.split(':')[0]}")
        self._sink: Sink | None = None
        self._failed: str | None = None  # what did not reach the sink, "" if it was neither a record nor an alert
        self._late = False
        # Whoever saves into a temporary folder removes it at once, and a file that is being written is in the way then.
        self._delay = tuning().files_delay if address == "files" else 0.0
        self.dropped = 0
        self._background.submit(lambda: self._call(lambda _: None))  # importing a client may take seconds

    def put(self, record: OperationRecord, summary: OperationSummary) -> None:
        # A failure may be the last thing that the process does.
        delay = 0.0 if summary.failed else self._delay
        self._put(lambda sink: sink.deliver(record, summary), "records", delay)

    def put_progress(self, progress: OperationProgress) -> None:
        # What a slow sink misses is old, but for the end.
        if self._background.due() < (_WAITING if progress.ended else 1):
            delay = self._delay if progress.ended else 0.0
            self._background.later(delay, lambda: self._call(lambda sink: sink.progress(progress)))

    def put_alert(self, alert: Alert) -> None:
        self._put(lambda sink: sink.alert(alert), "alerts")

    def _put(self, work: Callable[[Sink], None], what: str, delay: float = 0.0) -> None:
        if self._background.due() < _WAITING:
            self._background.later(delay, lambda: self._call(work, what))
            return
        self.dropped += 1
        if not self._late:
            _log.warning("metrics are dropped, which disturbs nothing else: %s is too slow", self._shown)
        self._late = True

    def finish(self, timeout: float) -> None:
        self._background.flush(timeout)

    def close(self) -> None:
        """Close the sink after what waits, without waiting for that."""
        self._background.hurry()
        self._background.submit(self._close)
        self._background.end()

    def _call(self, work: Callable[[Sink], None], what: str = "") -> None:
        """Let the sink do something; if that fails, say so once and count what is lost."""
        try:
            self._sink = self._sink or make_sink(self._address)
            work(self._sink)
        except Exception as error:  # noqa: BLE001  of any client
            self.dropped += bool(what)
            if self._failed is None:
                _log.warning("metrics do not reach %s, which disturbs nothing else: %s", self._shown, error_text(error))
                self._failed = what
        else:
            # A sink may take alerts only, and then taking a record proves nothing.
            if what and self._failed in ("", what):
                _log.warning("metrics reach %s again; %d %s are lost", self._shown, self.dropped, what)
                self._failed, self._late = None, False
            elif self._late and not self._background.due():
                _log.warning("%s keeps up again; %d records and alerts are lost", self._shown, self.dropped)
                self._late = False

    def _close(self) -> None:
        if self._sink is not None:
            self._call(lambda sink: sink.close())


_deliveries: dict[str, _Delivery] = {}
_lock = threading.Lock()


def deliver_alert(alert: Alert) -> None:
    """Hand to all sinks what a rule has found."""
    for delivery in _current():
        delivery.put_alert(alert)


_watcher = AlertWatcher(deliver_alert)


def _forget_after_fork() -> None:
    global _deliveries, _lock, _watcher
    _deliveries, _lock, _watcher = {}, threading.Lock(), AlertWatcher(deliver_alert)


os.register_at_fork(after_in_child=_forget_after_fork)


def is_on() -> bool:
    """Whether metrics are collected."""
    return settings().monitoring.metrics not in _OFF


def _current() -> list[_Delivery]:
    """Return the deliveries to the sinks of the settings in force, and close others."""
    wanted = [address.strip() for address in settings().monitoring.metrics.split(",")]
    wanted = list(dict.fromkeys(address for address in wanted if address not in _OFF))  # each counts once
    with _lock:
        for address in _deliveries.keys() - set(wanted):
            _deliveries.pop(address).close()
        for address in wanted:
            if address not in _deliveries:
                _deliveries[address] = _Delivery(address)
        return [_deliveries[address] for address in wanted]


def open_sinks() -> None:
    """Begin to open the sinks of the settings in force. Returns at once."""
    _current()


def deliver(record: OperationRecord, summary: OperationSummary) -> None:
    """Hand a record and its summary to all sinks. Returns at once; a sink that cannot follow loses records."""
    _watcher.ended(summary)
    for delivery in _current():
        delivery.put(record, summary)


def deliver_progress(progress: OperationProgress) -> None:
    """Hand to all sinks how far an operation is."""
    for delivery in _current():
        delivery.put_progress(progress)
    _watcher.progress(progress)


def finish() -> None:
    """Close the sinks; wait some seconds at most until they have what was handed to them."""
    deadline = time.monotonic() + tuning().metrics_end
    _watcher.finish(tuning().metrics_end)
    with _lock:
        deliveries = [_deliveries.pop(address) for address in list(_deliveries)]
    for delivery in deliveries:
        delivery.close()
    for delivery in deliveries:
        delivery.finish(max(deadline - time.monotonic(), 0.0))
