"""Keep the objects of one rank from call to call: one `World` for each collective, shared by its saves and loads."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from bytecheckpoint.calls import one_at_a_time
from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.call_order import CallOrder
from bytecheckpoint.engine.save_resources import SaveResources
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, UsageError
from bytecheckpoint.failures import Failure
from bytecheckpoint.frameworks.coordinates import mesh_coordinates
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.liveness import seconds_busy, seconds_idle
from bytecheckpoint.monitoring import delivery
from bytecheckpoint.monitoring.collector import Collector
from bytecheckpoint.settings import settings
from bytecheckpoint.threads import ADVICE, wait_for_any
from bytecheckpoint.tiers.flush.flusher import Flusher
from bytecheckpoint.tracing.operation import bind_operation

__all__ = ["SaveQueue", "World", "release_memory", "world_of"]

_log = logging.getLogger("bytecheckpoint")


class SaveQueue:
    """The saves of one rank: threads of background halves, and failures that no caller has received."""

    def __init__(self) -> None:
        self._call_lock = threading.RLock()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="bytecheckpoint-save")
        self._coordination = ThreadPoolExecutor(1, thread_name_prefix="bytecheckpoint-coordinate")
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="bytecheckpoint-view")
        self._last: Future[None] | None = None
        self._last_behind: Future[None] | None = None
        self._failures: list[tuple[SaveHandle, CheckpointError]] = []

    @contextlib.contextmanager
    def exclusively(self, timeout: float) -> Iterator[None]:
        """Wait for the foreground halves of other threads' saves, and keep further ones away in the `with` block.

        Args:
            timeout: seconds without progress of the call that runs, after which this one fails.

        Raises:
            CheckpointTimeoutError: the other thread's call makes no progress. This call takes no number.
        """
        try:
            while not self._call_lock.acquire(timeout=timeout):
                if seconds_busy() < 0 and seconds_idle() > timeout:
                    raise CheckpointTimeoutError(
                        f"a save or prepare of another thread has made no progress for {timeout:g} s; find out why it waits"
                    )
            yield
        finally:
            if self._call_lock._is_owned():  # type: ignore[attr-defined]  # Ctrl-C may come right behind `acquire`
                self._call_lock.release()

    def coordinate(self, work: Callable[[], None]) -> None:
        """Run the coordinator of one save, after those of earlier saves.

        Raises:
            UsageError: the interpreter ends.
            CheckpointError: no thread can be started.
        """
        _submit(self._coordination, work)

    def submit(self, work: Callable[[], None]) -> None:
        """Run the background half of one save, after those of earlier saves."""
        try:
            self._last = _submit(self._background, work)
        except CheckpointError as error:
            if isinstance(error, UsageError):
                raise
            _log.warning("an asynchronous save is written by its caller: %s", error)
            work()

    def expect_behind(self) -> None:
        """Start the thread for work behind commits: none can start when the interpreter ends."""
        self._last_behind = self._last_behind or _submit(self._behind, lambda: None)

    def submit_behind(self, work: Callable[[], None]) -> None:
        """Run work behind a commit, for which no later save waits.

        Raises:
            CheckpointError: no thread can be started, or the interpreter ends.
        """
        self._last_behind = _submit(self._behind, work)

    def drain_behind(self) -> None:
        """Wait for all work behind commits."""
        if self._last_behind is not None:
            wait_for_any([self._last_behind])

    def drain(self) -> None:
        """Wait until no earlier save is in flight. Raise no failure."""
        last = self._last
        if last is not None:
            wait_for_any([last])

    def keep_failure(self, handle: SaveHandle, failure: CheckpointError) -> None:
        """Keep the failure of a background half. The next save raises it if no caller has received it from `handle`."""
        self._failures.append((handle, failure))

    def raise_failure(self) -> None:
        """Raise the newest failure of an earlier background half that no caller has received; forget all of them."""
        failures, self._failures = self._failures, []
        unseen = [failure for handle, failure in failures if not handle.failure_retrieved]
        if unseen:
            raise Failure.of(unseen[-1]).as_repeated() from unseen[-1]

    def close(self) -> None:
        """End the threads, after the saves in flight."""
        self._background.shutdown()
        self._coordination.shutdown()
        self._behind.shutdown()


class World:
    """The objects of one rank in one world of ranks. The ranks make the same calls, so their numbers are the same.

    Attributes:
        collective: ranks of the world.
        resources: staging pools, helper process, cached plans.
        saves: order of saves, and their threads.
        flusher: copier of a tier's commits to the durable storage.
        collector: collector of the measurements of operations.
        calls: numbers of the calls of all ranks.
    """

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.resources = SaveResources()
        self.saves = SaveQueue()
        self.flusher = Flusher(collective)
        self.collector = Collector(collective)
        self.calls = CallOrder(collective)
        self._prepared: tuple[object, ...] = ()
        self._looked_at: tuple[object, ...] = ()

    def note_prepared(self, states: Mapping[str, object]) -> None:
        """Remember the states that the next save is prepared for. An empty mapping stands for none."""
        self._prepared = _identity(states)

    def note_layout(self, states: Mapping[str, object]) -> None:
        """Find this rank's place in the layout of the job, for metrics, unless it is known."""
        looked_at = _identity(states)
        if delivery.is_on() and not self.collector.mesh and looked_at != self._looked_at:
            # Once for the same objects: where there is no mesh, this goes through all parameters, and the caller waits.
            self._looked_at = looked_at
            rank, world_size = self.collective.rank, self.collective.world_size
            self.collector.mesh = mesh_coordinates(states, settings().monitoring.mesh, rank, world_size)

    def is_prepared(self, states: Mapping[str, object]) -> bool:
        """Return whether these very objects were saved or prepared last, without a failure since."""
        return self._prepared == _identity(states)

    def drain(self) -> None:
        """Wait for the saves in flight, for their flushes, and for the work behind their commits."""
        self.saves.drain()
        self.flusher.drain()
        self.saves.drain_behind()

    def release_memory(self) -> None:
        """Give the staging memory back and end the helper process, after the saves in flight."""
        with self.saves.exclusively(settings().timeout):
            self.saves.drain()
            self.resources.release()
            self.note_prepared({})

    def close(self) -> None:
        """End threads and the helper process and give the staging memory back, after the saves in flight."""
        self.drain()
        self.saves.close()
        self.collector.close()
        self.resources.release()


def _submit(executor: ThreadPoolExecutor, work: Callable[[], None]) -> Future[None]:
    dropped = threading.Event()
    carries = bind_operation(work)
    try:
        return executor.submit(lambda: None if dropped.is_set() else carries())
    except RuntimeError as error:
        dropped.set()  # an executor that cannot start its thread keeps what it was given
        if "shutdown" in str(error):
            raise UsageError("save was called while the interpreter ends (atexit): call it before that") from error
        raise CheckpointError(f"cannot start a thread: {error}; {ADVICE}") from error


def _identity(states: Mapping[str, object]) -> tuple[object, ...]:
    """Return the identities of the objects. They may name a new object at a dead one's address: that costs a plan only."""
    return tuple(
        (state, *map(id, value)) if isinstance(value, list | tuple) else (state, id(value))
        for state, value in states.items()
    )


#: The worlds of this process, for the hook at its exit. A collective owns its world.
_worlds: weakref.WeakSet[World] = weakref.WeakSet()
_worlds_lock = threading.Lock()


def world_of(collective: Collective) -> World:
    """Return this rank's world for `collective`, which the first call makes; it lives as long as the collective."""
    with _worlds_lock:
        world = collective.attachment
        if not isinstance(world, World) or world not in _worlds:  # none yet, or the parent's after a fork
            world = collective.attachment = World(collective)
            _worlds.add(world)
        return world


@one_at_a_time
def release_memory() -> None:
    """Free the memory that this process keeps for later saves, and end its helper processes.

    Waits for the saves in flight. Later saves and loads work as before. The next asynchronous save reserves its memory
    anew, which makes it as slow as a first one. Ranks need not call it together.

    Examples:
        >>> import bytecheckpoint
        >>> bytecheckpoint.release_memory()  # before a phase that saves nothing and needs the memory itself
    """
    with _worlds_lock:
        worlds = list(_worlds)
    for world in worlds:
        world.release_memory()


def _forget_after_fork() -> None:
    global _worlds, _worlds_lock  # noqa: PLW0603  the parent's threads and locks do not exist in the child
    _worlds = weakref.WeakSet()
    _worlds_lock = threading.Lock()


def _finish_all() -> None:
    for world in list(_worlds):
        world.drain()
        world.collector.close()
    delivery.finish()


os.register_at_fork(after_in_child=_forget_after_fork)
# A save in flight needs its executors, which refuse work once the exit hook of concurrent.futures has run. Hooks run in
# reverse order of registration, so this one runs before that.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
