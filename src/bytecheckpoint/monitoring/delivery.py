"""The sinks of this process, each with a bounded queue and a thread of its own."""

from __future__ import annotations

import logging
import os
import threading
import time

from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.alerts.watching import Watcher
from bytecheckpoint.monitoring.background import Background
from bytecheckpoint.monitoring.progress import OperationProgress
from bytecheckpoint.monitoring.record import without_secrets
from bytecheckpoint.monitoring.sinks import Sink, make_sink, shown_address
from bytecheckpoint.monitoring.table import OperationRecord
from bytecheckpoint.settings import settings
from bytecheckpoint.tuning import tuning

__all__ = ["deliver", "deliver_alert", "deliver_progress", "finish", "is_on"]

_log = logging.getLogger("bytecheckpoint")
_OFF = ("", "off")
#: Records that wait for one sink.
_WAITING = 64


class _Delivery:
    """Delivers records to one sink.

    Attributes:
        dropped: records that did not reach the sink: its queue was full, or it failed.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._shown = shown_address(address)
        self._background = Background(f"bytecheckpoint-sink-{self._shown.split(':')[0]}", _WAITING)
        self._sink: Sink | None = None
        self._failing = ""  # what the sink could not take
        self.dropped = 0

    def put(self, record: OperationRecord) -> None:
        if not self._background.submit(lambda: self._call("deliver", record)):
            self.dropped += 1

    def put_progress(self, progress: OperationProgress) -> None:
        if progress.ended or not self._background.waiting():  # what a slow sink misses is old
            self._background.submit(lambda: self._call("progress", progress))

    def put_alert(self, alert: Alert) -> None:
        if not self._background.submit(lambda: self._call("alert", alert)):
            self.dropped += 1

    def finish(self, timeout: float) -> None:
        self._background.flush(timeout)

    def close(self) -> None:
        self._background.submit(self._close)

    def _call(self, method: str, argument: object) -> None:
        try:
            self._sink = self._sink or make_sink(self._address)
            getattr(self._sink, method)(argument)
        except Exception as error:  # noqa: BLE001  of any client
            self.dropped += 1
            if not self._failing:
                why = without_secrets(f"{type(error).__name__}: {error}")
                _log.warning("metrics do not reach %s, which disturbs nothing else: %s", self._shown, why)
                self._failing = method
        else:
            if method == self._failing:
                _log.warning("metrics reach %s again; %d records are lost", self._shown, self.dropped)
                self._failing = ""

    def _close(self) -> None:
        if self._sink is not None:
            self._sink.close()


_deliveries: dict[str, _Delivery] = {}
_lock = threading.Lock()


def deliver_alert(alert: Alert) -> None:
    """Hand to all sinks what a rule has found."""
    for delivery in _current():
        delivery.put_alert(alert)


_watcher = Watcher(deliver_alert)


def _forget_after_fork() -> None:
    global _deliveries, _lock, _watcher
    _deliveries, _lock, _watcher = {}, threading.Lock(), Watcher(deliver_alert)


os.register_at_fork(after_in_child=_forget_after_fork)


def is_on() -> bool:
    """Whether metrics are collected."""
    return settings().metrics not in _OFF


def _current() -> list[_Delivery]:
    """Return the deliveries to the sinks of the settings in force, and close others."""
    wanted = [address.strip() for address in settings().metrics.split(",")]
    wanted = [address for address in wanted if address not in _OFF]
    with _lock:
        for address in _deliveries.keys() - set(wanted):
            _deliveries.pop(address).close()
        for address in wanted:
            if address not in _deliveries:
                _deliveries[address] = _Delivery(address)
        return [_deliveries[address] for address in wanted]


def deliver(record: OperationRecord) -> None:
    """Hand a record to all sinks. Returns at once; a sink that cannot follow loses records."""
    _watcher.record(record)
    for delivery in _current():
        delivery.put(record)


def deliver_progress(progress: OperationProgress) -> None:
    """Hand to all sinks how far an operation is."""
    for delivery in _current():
        delivery.put_progress(progress)
    _watcher.progress(progress)


def finish() -> None:
    """Wait some seconds at most until the sinks have what was handed to them."""
    deadline = time.monotonic() + tuning().metrics_end
    _watcher.finish(tuning().metrics_end)
    for delivery in list(_deliveries.values()):
        delivery.finish(max(deadline - time.monotonic(), 0.0))
