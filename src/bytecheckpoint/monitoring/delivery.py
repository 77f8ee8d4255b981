"""Hand metrics to the sinks of this process, each with a bounded queue and a thread of its own."""

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

__all__ = ["SinkQueue", "deliver", "deliver_alert", "deliver_progress", "finish", "is_on", "open_sinks", "queues"]

_log = logging.getLogger("bytecheckpoint")
_OFF = ("", "off")
#: Most records in the queue of one sink.
_WAITING = 64


class SinkQueue:
    """A queue of records, alerts and progress for one sink, with a thread that delivers them.

    Args:
        address: address of the sink, as in the setting `metrics`.

    Attributes:
        dropped: number of records and alerts that did not reach the sink: the queue was full, or the sink failed.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._shown = shown(address)
        self._background = Background(f"bytecheckpoint-sink-{self._shown.split(':')[0]}")
        self._sink: Sink | None = None
        self._failed: str | None = None  # "records" or "alerts" that did not reach the sink, "" for progress
        self._late = False
        # Programs that save into a temporary folder remove it at once, and a file that is being written would prevent that.
        self._delay = tuning().files_delay if self._shown.split(":")[0] == "files" else 0.0
        self.dropped = 0
        self._background.submit(lambda: self._call(lambda _: None))  # importing a client may take seconds

    def put(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Queue the record of an operation that has ended."""
        # The process may end right after a failure.
        delay = 0.0 if summary.failed else self._delay
        self._put(lambda sink: sink.deliver(record, summary), "records", delay)

    def put_progress(self, progress: OperationProgress) -> None:
        """Queue the progress of a running operation."""
        # A slow sink may miss progress, which the next one replaces, but not its end.
        if self._background.due() < (_WAITING if progress.ended else 1):
            delay = self._delay if progress.ended else 0.0
            self._background.later(delay, lambda: self._call(lambda sink: sink.progress(progress)))

    def put_alert(self, alert: Alert) -> None:
        """Queue an alert."""
        self._put(lambda sink: sink.alert(alert), "alerts")

    def _put(self, work: Callable[[Sink], None], what: str, delay: float = 0.0) -> None:
        if self._background.due() < _WAITING:
            self._background.later(delay, lambda: self._call(work, what))
            return
        self.dropped += 1
        if not self._late:
            _log.warning("metrics are dropped, which disturbs nothing else: %s is too slow", self._shown)
        self._late = True

    def waiting(self) -> int:
        """Return the number of deliveries in the queue."""
        return self._background.waiting()

    def flush(self, timeout: float) -> bool:
        """Wait until the due deliveries have ended. Return False after `timeout` seconds."""
        return self._background.flush(timeout)

    def close(self) -> None:
        """Close the sink after the deliveries in the queue. Does not wait for that."""
        self._background.hurry()
        self._background.submit(self._close)
        self._background.end()

    def _call(self, work: Callable[[Sink], None], what: str = "") -> None:
        """Call the sink. Log the first of several failures, and count the lost records and alerts."""
        try:
            self._sink = self._sink or make_sink(self._address)
            work(self._sink)
        except Exception as error:  # noqa: BLE001  a client may raise any error
            self.dropped += bool(what)
            if self._failed is None:
                _log.warning("metrics do not reach %s, which disturbs nothing else: %s", self._shown, error_text(error))
                self._failed = what
        else:
            # For a sink that sends alerts only, a delivered record proves nothing.
            if what and self._failed in ("", what):
                _log.warning("metrics reach %s again; %d %s are lost", self._shown, self.dropped, what)
                self._failed, self._late = None, False
            elif self._late and not self._background.due():
                _log.warning("%s keeps up again; %d records and alerts are lost", self._shown, self.dropped)
                self._late = False

    def _close(self) -> None:
        if self._sink is not None:
            self._call(lambda sink: sink.close())


_queues: dict[str, SinkQueue] = {}
_lock = threading.Lock()


def deliver_alert(alert: Alert) -> None:
    """Hand an alert to all sinks."""
    for queue in _current():
        queue.put_alert(alert)


_watcher = AlertWatcher(deliver_alert)


def _forget_after_fork() -> None:
    global _queues, _lock, _watcher
    _queues, _lock, _watcher = {}, threading.Lock(), AlertWatcher(deliver_alert)


os.register_at_fork(after_in_child=_forget_after_fork)


def is_on() -> bool:
    """Return whether metrics are collected."""
    return settings().monitoring.metrics not in _OFF


def queues() -> dict[str, SinkQueue]:
    """Return the queues of the open sinks, by address."""
    with _lock:
        return dict(_queues)


def _current() -> list[SinkQueue]:
    """Return the queues of the sinks of the current settings; close the others."""
    wanted = [address.strip() for address in settings().monitoring.metrics.split(",")]
    wanted = list(dict.fromkeys(address for address in wanted if address not in _OFF))  # each counts once
    with _lock:
        for address in _queues.keys() - set(wanted):
            _queues.pop(address).close()
        for address in wanted:
            if address not in _queues:
                _queues[address] = SinkQueue(address)
        return [_queues[address] for address in wanted]


def open_sinks() -> None:
    """Begin to open the sinks of the current settings. Returns at once."""
    _current()


def deliver(record: OperationRecord, summary: OperationSummary) -> None:
    """Hand a record and its summary to all sinks. Returns at once; a sink that is too slow loses records."""
    _watcher.ended(summary)
    for queue in _current():
        queue.put(record, summary)


def deliver_progress(progress: OperationProgress) -> None:
    """Hand the progress of an operation to all sinks."""
    for queue in _current():
        queue.put_progress(progress)
    _watcher.progress(progress)


def finish() -> None:
    """Close the sinks. Waits until their queues are empty, for some seconds at most."""
    deadline = time.monotonic() + tuning().metrics_end
    _watcher.finish(tuning().metrics_end)
    with _lock:
        closing = [_queues.pop(address) for address in list(_queues)]
    for queue in closing:
        queue.close()
    for queue in closing:
        queue.flush(max(deadline - time.monotonic(), 0.0))
