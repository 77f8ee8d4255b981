"""Send the metrics of all ranks of a world to rank 0, and join them there."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ParamSpec

import msgspec

from bytecheckpoint.collectives import Collective
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.handles import LoadReport, SaveReport
from bytecheckpoint.monitoring.analysis.summary import summarize
from bytecheckpoint.monitoring.background import Background
from bytecheckpoint.monitoring.delivery import deliver, deliver_progress, is_on, open_sinks
from bytecheckpoint.monitoring.progress import OperationProgress, RankProgress, make_progress
from bytecheckpoint.monitoring.record import RankRecord, make_record
from bytecheckpoint.monitoring.table import operation_id, operation_record
from bytecheckpoint.tracing.operation import Operation
from bytecheckpoint.tuning import tuning

__all__ = ["Collector", "deliver_incomplete"]

_Arguments = ParamSpec("_Arguments")
_Key = tuple[str, int]  # kind and number of an operation
_log = logging.getLogger("bytecheckpoint")
#: Seconds for which a world that ends waits for the next metrics of other ranks: some ranks may be gone.
_LAST_SECONDS = 2.0
#: Number of delivered operations whose late messages are recognized.
_REMEMBERED = 256
_TAG, _PROGRESS_TAG = "metrics", "metrics/progress"
_decoder = msgspec.msgpack.Decoder(RankRecord)
_progress_decoder = msgspec.msgpack.Decoder(RankProgress)


class Collector:
    """Sends the metrics of this rank to rank 0; on rank 0 joins those of all ranks.

    Only `close` waits, and no method raises: lost metrics are missing in a report, but fail no save.

    Args:
        collective: connection to the other ranks.

    Attributes:
        mesh: this rank's coordinate by mesh dimension.
    """

    def __init__(self, collective: Collective) -> None:
        self.mesh: Mapping[str, int] = {}
        self._rank, self._world_size = collective.rank, collective.world_size
        self._host = collective.host.split("/", 1)[0]
        self._send = collective.send
        self._background = Background("bytecheckpoint-metrics")
        self._running: set[Operation] = set()
        self._progress_scheduled = False
        self._joined = _Joined(collective, self._background) if self._rank == 0 else None
        if self._joined is not None and is_on():
            open_sinks()  # an endpoint shows zeros before the first operation ends

    def begin(self, operation: Operation) -> None:
        """Send the progress of an operation from time to time, until `report` is called for it."""
        if is_on():
            if self._joined is not None:
                open_sinks()
            self._running.add(operation)
            if not self._progress_scheduled:
                self._progress_scheduled = True
                self._background.later(self._interval(), self._send_progress)

    def _interval(self) -> float:
        return max(tuning().progress_interval, self._world_size / tuning().progress_rate)

    def observer(self, operation: Operation) -> Callable[[Future[SaveReport]], None]:
        """Return a done-callback that reports the outcome of `operation`."""

        def observe(done: Future[SaveReport]) -> None:
            # The methods of `SaveFuture` would note that a caller has received the failure.
            error = Future.exception(done)
            self.report(operation, Future.result(done) if error is None else error)

        return observe

    def report(self, operation: Operation, outcome: SaveReport | LoadReport | BaseException) -> None:
        """Send the measurements of this rank for an operation that has ended.

        Args:
            operation: this rank's part of the operation.
            outcome: report of the operation, or the error that ended it.
        """
        self._running.discard(operation)
        if not operation.number or not is_on():
            return
        if not _is_utf8(operation.path):
            _log.warning("the metrics of a %s are lost: its path is not UTF-8, and metrics have to be", operation.kind)
            return
        try:
            limit = min(tuning().spans_per_rank, max(tuning().spans_per_world // self._world_size, 1))
            record = make_record(operation, self._rank, self._host, self.mesh, outcome, limit)
            message = msgspec.msgpack.encode(record)
            if self._joined is not None:
                self._joined.receive(message)
            else:
                self._send(0, _TAG, message)
        except CheckpointError:
            pass  # the world has ended
        except Exception:  # noqa: BLE001  metrics never fail a save
            _log.exception("the metrics of a %s are lost", operation.kind)

    def close(self) -> None:
        """Deliver the received metrics. Waits while ranks still report, for some seconds at most."""
        if self._joined is not None:
            self._joined.finish()
        self._background.end()

    def _send_progress(self) -> None:
        """Send the progress of this rank's operations, and schedule the next time while there are any."""
        for operation in list(self._running):
            if operation.number and _is_utf8(operation.path):
                progress = make_progress(operation, self._rank, self._host)
                if self._joined is not None:
                    self._joined.note(progress)
                else:
                    with contextlib.suppress(CheckpointError):  # the world has ended
                        self._send(0, _PROGRESS_TAG, msgspec.msgpack.encode(progress))
        others_run = self._joined is not None and self._joined.deliver_progress()
        self._progress_scheduled = bool(self._running) or others_run
        if self._progress_scheduled:
            self._background.later(self._interval(), self._send_progress)


@dataclass
class _Waiting:
    """The reports of one operation on rank 0, until all ranks have sent theirs.

    Attributes:
        records: reports of ranks that have ended, by rank.
        progress: newest progress by rank.
        changed: `time.monotonic` of the last report, or of the last progress that differed from the one before.
        shown: True if sinks have received progress of the operation.
    """

    records: dict[int, RankRecord] = field(default_factory=dict)
    progress: dict[int, RankProgress] = field(default_factory=dict)
    changed: float = field(default_factory=time.monotonic)
    shown: bool = False


class _Joined:
    """The metrics of all ranks, on rank 0.

    Args:
        collective: connection to the other ranks.
        background: thread that joins and delivers.
    """

    def __init__(self, collective: Collective, background: Background) -> None:
        self._collective = collective
        self._background = background
        self._messages: list[bytes] = []
        self._scheduled = False  # whether `_take_messages` is scheduled
        self._lock = threading.Lock()  # guards the two above
        self._waiting: dict[_Key, _Waiting] = {}
        self._delivered: deque[_Key] = deque(maxlen=_REMEMBERED)
        if collective.world_size > 1:
            # Weak: the transport's thread must not keep the collective alive, which ends that thread when it goes.
            collective.watch(_TAG, _weak(self.receive))
            collective.watch(_PROGRESS_TAG, _weak(self._receive_progress))

    def receive(self, message: bytes) -> None:
        """Queue a rank's report. Runs on the transport's thread too."""
        with self._lock:
            self._messages.append(message)
            schedule, self._scheduled = not self._scheduled, True
        if schedule:
            self._background.submit(self._take_messages)

    def note(self, progress: RankProgress) -> None:
        """Keep the newest progress of a rank."""
        key = progress.kind, progress.number
        if key not in self._delivered:
            waiting = self._waiting.setdefault(key, _Waiting())
            before = waiting.progress.get(progress.rank)
            if before is None or (before.phase, before.done) != (progress.phase, progress.done):
                waiting.changed = time.monotonic()
            waiting.progress[progress.rank] = progress

    def deliver_progress(self) -> bool:
        """Hand the progress of running operations to the sinks. Return whether a rank still has to report."""
        for key, waiting in list(self._waiting.items()):
            if 0 in waiting.progress or (waiting.records and waiting.progress):
                waiting.shown = True
                self._deliver_progress(key, waiting, ended=False)
        return bool(self._incomplete())

    def finish(self) -> None:
        """Deliver the received reports. Waits while ranks still report, for some seconds at most."""
        begun = time.monotonic()
        self._background.submit(self._take_messages)
        self._background.flush(_LAST_SECONDS)
        while incomplete := self._incomplete():
            changed = max(begun, *(waiting.changed for waiting in incomplete.values()))
            if time.monotonic() > min(changed + _LAST_SECONDS, begun + tuning().metrics_end):
                break
            time.sleep(0.01)
            self._background.flush(_LAST_SECONDS)
        self._background.submit(self._deliver_all)
        self._background.flush(_LAST_SECONDS)

    def _incomplete(self) -> dict[_Key, _Waiting]:
        """Return the operations of which some ranks have reported and others have not."""
        return {key: waiting for key, waiting in list(self._waiting.items()) if waiting.records}

    def _receive_progress(self, message: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            self.note(_progress_decoder.decode(message))

    def _deliver_progress(self, key: _Key, waiting: _Waiting, *, ended: bool) -> None:
        ranks = [waiting.progress[rank] for rank in sorted(waiting.progress)]
        identity = operation_id(self._collective.world_id, *key)
        deliver_progress(OperationProgress.of(ranks, identity, self._collective.world_size, ended=ended))

    def _take_messages(self) -> None:
        while True:
            with self._lock:
                messages, self._messages = self._messages, []
                self._scheduled = bool(messages)
            if not messages:
                return
            for message in messages:
                with contextlib.suppress(msgspec.MsgspecError):  # a rank with another version of this package
                    self._take(_decoder.decode(message))

    def _take(self, record: RankRecord) -> None:
        key = record.kind, record.number
        if key in self._delivered:
            return  # too late
        if not self._incomplete():
            self._background.later(tuning().metrics_wait, _weak(self._deliver_overdue))
            _incomplete.add(self)
        waiting = self._waiting.setdefault(key, _Waiting())
        waiting.records[record.rank] = record
        waiting.changed = time.monotonic()
        if (progress := waiting.progress.get(record.rank)) is not None:
            waiting.progress[record.rank] = msgspec.structs.replace(progress, phase="done", done=progress.planned)
        if len(waiting.records) == self._collective.world_size:
            self._deliver(key)

    def _deliver(self, key: _Key) -> None:
        self._delivered.append(key)
        waiting = self._waiting.pop(key)
        if not self._incomplete():
            _incomplete.discard(self)
        if waiting.shown:
            self._deliver_progress(key, waiting, ended=True)
        try:
            world_id, world_size = self._collective.world_id, self._collective.world_size
            record = operation_record([*waiting.records.values()], world_id, world_size)
            deliver(record, summarize(record))
        except Exception:  # noqa: BLE001  an error in one operation's metrics must not cost the others theirs
            _log.exception("the metrics of a %s are lost", key[0])

    def _deliver_overdue(self) -> None:
        """Deliver operations of which no rank makes progress: a rank is gone, or hangs. A slow rank is waited for."""
        now, wait = time.monotonic(), tuning().metrics_wait
        for key, waiting in self._incomplete().items():
            if waiting.changed + wait <= now:
                self._deliver(key)
        if incomplete := self._incomplete():
            due = min(waiting.changed for waiting in incomplete.values()) + wait
            self._background.later(due - now, _weak(self._deliver_overdue))

    def _deliver_all(self) -> None:
        self._take_messages()
        for key in self._incomplete():
            self._deliver(key)


#: Objects that wait for reports. Each lives until it has delivered, and its world with it; others end with their world.
_incomplete: set[_Joined] = set()


def deliver_incomplete() -> None:
    """Deliver the metrics of all worlds of this process, also of operations that lack the report of a rank."""
    for joined in list(_incomplete):
        joined.finish()


def _weak(method: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Return a function that calls `method` as long as its object lives, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if (alive := reference()) is not None:
            alive(*args, **kwargs)

    return call


def _is_utf8(path: str) -> bool:
    """Return whether metrics can name a path: their files and receivers take UTF-8 only."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
