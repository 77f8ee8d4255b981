"""The way of metrics from all ranks of a world to rank 0."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
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

__all__ = ["Collector"]

_Arguments = ParamSpec("_Arguments")
_log = logging.getLogger("bytecheckpoint")
#: For which a world that ends waits for the next metrics of other ranks: some may be gone.
_LAST_SECONDS = 2.0
#: Operations whose late messages are recognized.
_REMEMBERED = 256
_TAG, _PROGRESS_TAG = "metrics", "metrics/progress"
_decoder = msgspec.msgpack.Decoder(RankRecord)
_progress_decoder = msgspec.msgpack.Decoder(RankProgress)
#: Collectors that wait for ranks. Each lives until it has delivered, and its world with it; others end with their world.
_incomplete: set[Collector] = set()


class Collector:
    """Sends what this rank has measured to rank 0, and joins on rank 0 what the ranks have sent.

    Nothing here waits, and no failure leaves it: metrics that get lost are missing in a report, and that is all.

    Args:
        collective: the ranks.

    Attributes:
        mesh: this rank's coordinate by mesh dimension.
    """

    def __init__(self, collective: Collective) -> None:
        self.mesh: Mapping[str, int] = {}
        self._rank, self._world_size, self._world_id = collective.rank, collective.world_size, collective.world_id
        self._host = collective.host.split("/", 1)[0]
        self._send = collective.send
        self._background = Background("bytecheckpoint-metrics")
        self._messages: list[bytes] = []
        self._taking = False  # `_take_messages` will be called
        self._lock = threading.Lock()  # of these two
        self._gathered: dict[tuple[str, int], dict[int, RankRecord]] = {}
        self._heard: dict[tuple[str, int], float] = {}  # when a rank last was seen to go on, as `time.monotonic`
        self._delivered: deque[tuple[str, int]] = deque(maxlen=_REMEMBERED)
        self._operations: set[Operation] = set()  # that run, on this rank
        self._telling = False  # `_tell_progress` will be called
        self._progress: dict[tuple[str, int], dict[int, RankProgress]] = {}  # of the operations that run, on rank 0
        self._told: set[tuple[str, int]] = set()  # operations whose progress the sinks know
        if self._rank == 0 and self._world_size > 1:
            # Weak: the transport's thread must not keep the collective alive, which ends that thread when it goes.
            collective.watch(_TAG, _weak(self._receive))
            collective.watch(_PROGRESS_TAG, _weak(self._receive_progress))

    def begin(self, operation: Operation) -> None:
        """Report from time to time how far an operation is, until `report` is called for it."""
        if is_on():
            if self._rank == 0:
                open_sinks()
            self._operations.add(operation)
            if not self._telling:
                self._telling = True
                self._background.later(self._interval(), self._tell_progress)

    def _interval(self) -> float:
        return max(tuning().progress_interval, self._world_size / tuning().progress_rate)

    def observer(self, operation: Operation) -> Callable[[Future[SaveReport]], None]:
        """Return a done-callback that reports the outcome of `operation`."""

        def observe(done: Future[SaveReport]) -> None:
            # Not the methods of `SaveFuture`, which note that a caller has received the failure.
            error = Future.exception(done)
            self.report(operation, Future.result(done) if error is None else error)

        return observe

    def report(self, operation: Operation, outcome: SaveReport | LoadReport | BaseException) -> None:
        """Send what this rank has measured of an operation that has ended.

        Args:
            operation: this rank's part of it.
            outcome: its report, or what made it fail.
        """
        self._operations.discard(operation)
        if not operation.number or not is_on():
            return
        try:
            limit = min(tuning().spans_per_rank, max(tuning().spans_per_world // self._world_size, 1))
            record = make_record(operation, self._rank, self._host, self.mesh, outcome, limit)
            message = msgspec.msgpack.encode(record)
            if self._rank == 0:
                self._receive(message)
            else:
                self._send(0, _TAG, message)
        except CheckpointError:
            pass  # the world has ended
        except UnicodeEncodeError:
            _log.warning("the metrics of a %s are lost: its path is not UTF-8, which they are", operation.kind)
        except Exception:  # noqa: BLE001  metrics never fail a save
            _log.exception("the metrics of a %s are lost", operation.kind)

    def close(self) -> None:
        """Deliver what has come. Waits for as long as ranks still report, some seconds at most."""
        if self._rank != 0:
            self._background.end()
            return
        begun = time.monotonic()
        self._background.submit(self._take_messages)
        self._background.flush(_LAST_SECONDS)
        while self._gathered:
            heard = max([begun, *(self._heard.get(key, begun) for key in list(self._gathered))])
            if time.monotonic() > min(heard + _LAST_SECONDS, begun + tuning().metrics_end):
                break
            time.sleep(0.01)
            self._background.flush(_LAST_SECONDS)
        self._background.submit(self._deliver_all)
        self._background.flush(_LAST_SECONDS)
        self._background.end()

    def _tell_progress(self) -> None:
        """Send how far the operations of this rank are; come back as long as there are any."""
        for operation in list(self._operations):
            if operation.number:
                self._tell_progress_of(operation)
        for key, ranks in list(self._progress.items()):
            if 0 in ranks or key in self._gathered:
                self._told.add(key)
                self._deliver_progress(key, ended=False)
        self._telling = bool(self._operations or self._gathered)  # other ranks may load for longer than rank 0
        if self._telling:
            self._background.later(self._interval(), self._tell_progress)

    def _tell_progress_of(self, operation: Operation) -> None:
        progress = make_progress(operation, self._rank, self._host)
        if self._rank == 0:
            self._progress.setdefault((progress.kind, progress.number), {})[0] = progress
        else:
            # The world has ended, or the path is no UTF-8.
            with contextlib.suppress(CheckpointError, UnicodeEncodeError):
                self._send(0, _PROGRESS_TAG, msgspec.msgpack.encode(progress))

    # --- rank 0 ---------------------------------------------------------------------------------------------------

    def _receive(self, message: bytes) -> None:
        """Take a message, on the transport's thread."""
        with self._lock:
            self._messages.append(message)
            begin, self._taking = not self._taking, True
        if begin:
            self._background.submit(self._take_messages)

    def _receive_progress(self, message: bytes) -> None:
        """Note how far another rank is, on the transport's thread."""
        with contextlib.suppress(msgspec.MsgspecError):
            progress = _progress_decoder.decode(message)
            key = progress.kind, progress.number
            if key not in self._delivered:
                ranks = self._progress.setdefault(key, {})
                before = ranks.get(progress.rank)
                if before is None or (before.phase, before.done) != (progress.phase, progress.done):
                    self._heard[key] = time.monotonic()
                ranks[progress.rank] = progress

    def _deliver_progress(self, key: tuple[str, int], *, ended: bool) -> None:
        ranks = self._progress[key]
        in_order = [ranks[rank] for rank in sorted(ranks)]
        identity = operation_id(self._world_id, *key)
        deliver_progress(OperationProgress.of(in_order, identity, self._world_size, ended=ended))

    def _take_messages(self) -> None:
        while True:
            with self._lock:
                messages, self._messages = self._messages, []
                self._taking = bool(messages)
            if not messages:
                return
            for message in messages:
                with contextlib.suppress(msgspec.MsgspecError):  # a rank with another version of this package
                    self._take(_decoder.decode(message))

    def _take(self, record: RankRecord) -> None:
        key = record.kind, record.number
        if key in self._delivered:
            return  # too late
        if key not in self._gathered:
            if not self._gathered:
                self._background.later(tuning().metrics_wait, _weak(self._deliver_overdue))
                _incomplete.add(self)
            self._gathered[key] = {}
        self._gathered[key][record.rank] = record
        self._heard[key] = time.monotonic()
        if (progress := self._progress.get(key, {}).get(record.rank)) is not None:
            self._progress[key][record.rank] = msgspec.structs.replace(progress, phase="done", done=progress.planned)
        if len(self._gathered[key]) == self._world_size:
            self._deliver(key)

    def _deliver(self, key: tuple[str, int]) -> None:
        records = self._gathered.pop(key)
        del self._heard[key]
        if not self._gathered:
            _incomplete.discard(self)
        self._delivered.append(key)
        if key in self._told:
            self._told.remove(key)
            self._deliver_progress(key, ended=True)
        self._progress.pop(key, None)
        try:
            record = operation_record([*records.values()], self._world_id, self._world_size)
            deliver(record, summarize(record))
        except Exception:  # noqa: BLE001  of one operation must not cost the others theirs
            _log.exception("the metrics of a %s are lost", key[0])

    def _deliver_overdue(self) -> None:
        """Deliver what is not complete although no rank goes on: one is gone, or hangs. A slow one is waited for."""
        now = time.monotonic()
        for key in list(self._gathered):
            if self._heard[key] + tuning().metrics_wait <= now:
                self._deliver(key)
        if self._gathered:
            wait = min(self._heard[key] for key in self._gathered) + tuning().metrics_wait - now
            self._background.later(wait, _weak(self._deliver_overdue))

    def _deliver_all(self) -> None:
        self._take_messages()
        for key in list(self._gathered):
            self._deliver(key)


def _weak(method: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Return a function that calls `method` as long as its object lives, and does not keep it alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if (alive := reference()) is not None:
            alive(*args, **kwargs)

    return call
