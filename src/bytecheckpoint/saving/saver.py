"""One rank's saves: in order, one at a time, each in a foreground and a background half."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from ..collectives import Collective
from ..engine.helper import HelperProcess
from ..engine.pool import StagingPool, available_memory
from ..errors import CheckpointError, UsageError
from ..frameworks.base import Framework
from ..handles import SaveHandle, SaveReport, pending
from ..monitoring.phases import Phases
from ..settings import Settings
from ..storage import Storage
from ..storage.tier import TierStorage
from ..storage.wrappers import WrappedStorage
from ..tiers.background import Flusher
from .coordinator import Coordinator, SaveTask
from .local import LocalPlan
from .messages import Failure, encode, tag
from .session import SaveSession

__all__ = ["SaveCall", "Saver", "saver_of"]

_log = logging.getLogger("bytecheckpoint")
_KEPT_PLANS = 4


@dataclass(frozen=True, slots=True)
class SaveCall:
    """The arguments of one save, checked.

    Attributes:
        storage: where to.
        framework: the adapter.
        states: what to save.
        names: explicit parameter names.
        check_replicas: compare all copies of replicated tensors.
        settings: in force at the call.
        metadata: the caller's own facts for the catalog.
    """

    storage: Storage
    framework: Framework
    states: Mapping[str, object]
    names: Mapping[Any, Any] | None
    check_replicas: bool
    settings: Settings
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Saver:
    """All saves of one rank of one world.

    A save takes a number on every rank as it is called, whatever happens then; messages carry the number, so ranks
    that fail at different places still speak of the same save.
    """

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.pool = StagingPool()
        self.plans: OrderedDict[bytes, LocalPlan] = OrderedDict()
        self._helper: HelperProcess | None = None
        self._sequence = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="bytecheckpoint-save")
        self._coordinator_thread = ThreadPoolExecutor(1, thread_name_prefix="bytecheckpoint-coordinate")
        self._coordinator = Coordinator(collective)
        self._last: Future[None] | None = None
        self._failed: CheckpointError | None = None
        self._ready: tuple[object, ...] = ()
        self._calls = threading.Lock()
        self.flusher = Flusher(collective)

    def helper(self, settings: Settings) -> HelperProcess | None:
        """The writer process, started when it is wanted and not running."""
        if settings.writer != "process":
            return None
        if self._helper is None or not self._helper.alive:
            self._helper = HelperProcess()
            weakref.finalize(self, self._helper.stop)
        return self._helper

    def reserve(self, nbytes: int, settings: Settings, *, touch: bool = False) -> None:
        """Make the pool fit an image of `nbytes`, or as large as it may be."""
        limit = self._limit(settings)
        if nbytes > limit:
            nbytes = max(limit // settings.chunk_bytes, 2) * settings.chunk_bytes
        if nbytes:
            self.pool.reserve(nbytes, touch=touch)

    def staging_pool(self, nbytes: int, settings: Settings) -> StagingPool:
        """A pool for an image of `nbytes`: the one that is ready, else one that is quickly made and used once.

        On an accelerator's host pages must be locked, which touches them in any case.
        """
        fits = 2 * nbytes <= self._limit(settings)
        if nbytes > self.pool.capacity and fits and not torch.accelerator.is_available():
            pool = StagingPool(shared=False)
            pool.reserve(nbytes, touch=False)
            return pool
        self.reserve(nbytes, settings)
        return self.pool

    def whole_pool(self, nbytes: int, settings: Settings) -> StagingPool | None:
        """A pool that holds a whole image of `nbytes`, as `staging_pool` gives it; None where it may not be as large."""
        fits = nbytes <= max(self.pool.capacity, self._limit(settings))
        return self.staging_pool(nbytes, settings) if fits else None

    def _limit(self, settings: Settings) -> int:
        return settings.staging_bytes or (self.pool.capacity + available_memory()) // 2

    def remember(self, key: bytes, plan: LocalPlan) -> None:
        """Keep a plan for saves that look the same."""
        self.plans[key] = plan
        while len(self.plans) > _KEPT_PLANS:
            self.plans.popitem(last=False)

    def ready(self, states: Mapping[str, object]) -> bool:
        """Whether a save or `prepare` of these very objects has been here since the last failure."""
        return self._ready == _identity(states)

    def drain(self) -> None:
        """Wait until no earlier save is in flight; its failure is not raised here."""
        last = self._last
        if last is not None:
            last.exception()

    def _number(self, settings: Settings) -> SaveTask:
        self._sequence += 1
        task = SaveTask(self._sequence, settings.timeout)
        if self.collective.rank == 0:
            try:
                self._coordinator_thread.submit(self._coordinator.run, task)
            except RuntimeError as error:  # executors take no work any more
                raise UsageError("save was called while the interpreter ends (atexit): call it before that") from error
        return task

    def _raise_earlier_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise type(failed)(f"an earlier asynchronous save failed: {failed}") from failed

    def save(self, call: Any, settings: Settings, *, path: str, asynchronous: bool, background: bool) -> SaveHandle:
        """Run one save.

        Args:
            call: makes the `SaveCall`; what it raises fails the save on all ranks.
            settings: in force.
            path: for messages.
            asynchronous: return when staged.
            background: return before that.
        """
        phases = Phases()
        handle = SaveHandle(path)
        self.flusher.expect(handle, settings)
        with self._calls:
            self._save(call, settings, handle, phases, asynchronous, background)
        if not asynchronous and (error := handle.restorable.exception()) is not None:
            self._failed = None  # it is raised here
            raise error
        return handle

    def committed(self, call: SaveCall, handle: SaveHandle, report: SaveReport, number: int) -> None:
        """The checkpoint stands under its path: tell the caller, or take it further where that is only a first tier."""
        storage = call.storage
        while isinstance(storage, WrappedStorage):
            storage = storage.inner
        if isinstance(storage, TierStorage):
            self.flusher.take(number, storage, handle, report, call.settings, self._keep_failure)
            return
        handle.restorable.set_result(None)
        handle.committed.set_result(report)

    def _keep_failure(self, failure: CheckpointError) -> None:
        self._failed = failure

    def _save(
        self,
        call: Any,
        settings: Settings,
        handle: SaveHandle,
        phases: Phases,
        asynchronous: bool,
        background: bool,
    ) -> SaveHandle:
        task = self._number(settings)
        session: SaveSession | None = None
        try:
            if not background:
                self.drain()
            phases.mark("wait")
            self._raise_earlier_failure()
            checked: SaveCall = call()
            handle.path = checked.storage.url
            states = checked.framework.capture(checked.states, names=checked.names)
            session = SaveSession(self, task, checked, states, phases)
            phases.mark("capture")
            if background:
                session.foresee()
                session.blocking = phases.total()
                self._submit(session, handle, session.run_in_background)
                return handle
            session.plan()
            self._ready = _identity(checked.states)
            if asynchronous:
                session.stage(handle)
                session.blocking = phases.total()
                self._submit(session, handle, session.write_and_commit)
                return handle
            session.write_through(handle)
            return handle
        except BaseException as error:
            self._give_up(task, session, error)
            handle._fail(error)
            raise

    def prepare(self, call: Any, settings: Settings) -> Future[None]:
        """Plan, reserve and touch in the background, so that the next save finds everything ready."""
        with self._calls:
            task = self._number(settings)
            try:
                checked: SaveCall = call()
                states = checked.framework.capture(checked.states, names=checked.names)
                session = SaveSession(self, task, checked, states, Phases())
                session.foresee(dry=True)
            except BaseException as error:
                self._give_up(task, None, error)
                raise

            done: Future[None] = pending()

            def run() -> None:
                try:
                    session.prepare()
                except BaseException as error:  # noqa: BLE001  kept for whoever asks
                    self._give_up(task, session, error)
                    _log.warning("prepare failed, the first save will plan for itself: %s", error)
                    done.set_exception(error)
                else:
                    done.set_result(None)

            self._ready = _identity(checked.states)
            self._last = self._worker.submit(run)
            return done

    def _submit(self, session: SaveSession, handle: SaveHandle, work: Any) -> None:
        def run() -> None:
            try:
                work(handle)
            except BaseException as error:  # noqa: BLE001  kept for result() and the next save
                self._give_up(session.task, session, error)
                where = f"rank {self.collective.rank}, {session.stage_name}"
                failure = error if isinstance(error, CheckpointError) else CheckpointError(f"{where}: {error!r}")
                _log.error("asynchronous save to %s failed: %s", handle.path, failure)
                self._failed = failure
                handle._fail(failure)

        self._last = self._worker.submit(run)

    def _give_up(self, task: SaveTask, session: SaveSession | None, error: BaseException) -> None:
        """Tell the coordinator that this rank cannot go on, and remove what it wrote."""
        step, stage = ("a", "call") if session is None else (session.next_report, session.stage_name)
        if step:
            try:
                failure = Failure.of(self.collective.rank, stage, error)
                self.collective.send(0, tag(task.sequence, step), encode(failure))
            except CheckpointError as lost:
                _log.warning("save %d: the coordinator cannot be told of the failure: %s", task.sequence, lost)
            if session is not None and isinstance(error, CheckpointError):
                # The other ranks read where it happened; this one shall too.
                error.args = (f"rank {self.collective.rank}, {stage}: {error}", *error.args[1:])
        self.plans.clear()
        self._ready = ()
        if session is not None:
            session.discard()

    def close(self) -> None:
        """End the helper process and give the staging memory back, after the saves in flight."""
        self.drain()
        self.flusher.drain()
        self._worker.shutdown()
        self._coordinator_thread.shutdown()
        if self._helper is not None:
            self._helper.stop()
        self.pool.release()


def _identity(states: Mapping[str, object]) -> tuple[object, ...]:
    """Which objects these are; one that took the place of a dead one at its address only costs the next save a plan."""
    return tuple(
        (kind, *map(id, value)) if isinstance(value, list | tuple) else (kind, id(value))
        for kind, value in states.items()
    )


#: A saver hangs on its collective and ends with it (threads, pool, helper): nothing else may keep either alive.
_savers: weakref.WeakSet[Saver] = weakref.WeakSet()
_savers_lock = threading.Lock()


def _forget_after_fork() -> None:
    global _savers, _savers_lock  # noqa: PLW0603  the parent's threads and locks do not exist in the child
    _savers = weakref.WeakSet()
    _savers_lock = threading.Lock()


def _finish_all() -> None:
    for saver in list(_savers):
        saver.drain()
        saver.flusher.drain()


os.register_at_fork(after_in_child=_forget_after_fork)
# Executors refuse new work from the moment that concurrent.futures hears of the interpreter's exit, and a save in flight
# still needs theirs. Such hooks run in reverse order, so this one comes first.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]


def saver_of(collective: Collective) -> Saver:
    """The saver of this rank in the world of `collective`."""
    with _savers_lock:
        saver: Saver | None = vars(collective).get("_saver")
        if saver is None or saver not in _savers:  # none yet, or one of the process that this is a fork of
            saver = vars(collective)["_saver"] = Saver(collective)
            _savers.add(saver)
        return saver
