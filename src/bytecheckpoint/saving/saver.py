"""Run one save of one rank: a foreground half in the caller's thread, and a background half after earlier saves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

from bytecheckpoint.calls import refusal
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.frameworks.selected_states import select_states
from bytecheckpoint.handles import SaveFuture, SaveHandle, SaveReport, fail_handle
from bytecheckpoint.saving.call import SaveCall, SaveTask
from bytecheckpoint.saving.channel import CoordinatorChannel
from bytecheckpoint.saving.coordinator import Coordinator
from bytecheckpoint.saving.session import SaveSession
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage import Storage
from bytecheckpoint.tiers.storage import tier_of
from bytecheckpoint.tracing.operation import Operation
from bytecheckpoint.world import World

__all__ = ["Saver"]

_log = logging.getLogger("bytecheckpoint")


class Saver:
    """Runs one save or one preparation of this rank: decides which steps run in the caller's thread, and handles failures.

    A save takes a number on every rank as it is called, whatever happens then. Messages carry the number, so ranks
    that fail at different places still speak of the same save.

    Args:
        world: what this rank keeps from save to save.
        make_call: checks the arguments; what it raises fails the save on all ranks.
        settings: in force at the call.
        operation: this rank's part of the save.
    """

    _task: SaveTask  # set with the number
    _coordinator: Coordinator  # the same, on rank 0

    def __init__(
        self, world: World, make_call: Callable[[], SaveCall], settings: Settings, operation: Operation
    ) -> None:
        self._world = world
        self._make_call = make_call
        self._settings = settings
        self._operation = operation
        self._channel: CoordinatorChannel | None = None
        self._session: SaveSession | None = None

    def save(self, handle: SaveHandle, *, tier: Storage | None, asynchronous: bool, background: bool) -> None:
        """Save, or start a save that goes on in the background.

        Args:
            handle: of the save.
            tier: where the save goes, if that is a tier; the save waits while too many of its steps are not flushed.
            asynchronous: return when staged.
            background: return before that.
        """
        saves = self._world.saves
        try:
            if tier is not None and refusal() is None:
                self._world.flusher.expect(handle, tier.url, self._settings)
            with saves.calling(self._settings.timeout) as stuck, self._taking_number():
                if stuck is not None:
                    raise stuck
                self._run_foreground(handle, asynchronous, background)
        except BaseException as error:
            fail_handle(handle, error)
            raise
        if not asynchronous and (failure := handle.restorable.exception()) is not None:
            raise failure

    def prepare(self) -> Future[None]:
        """Plan the next save and touch the staging pool, in the background.

        Returns:
            A future, done when the plan and the pool are ready.
        """
        done = SaveFuture[None]()
        with self._world.saves.calling(self._settings.timeout) as stuck, self._taking_number():
            if stuck is not None:
                raise stuck
            session = self._capture(self._make_call())
            session.planner.hash_values()  # the caller may change them while `session.prepare` runs

            def run() -> None:
                try:
                    self._world.resources.start_helper(self._settings)
                    session.prepare()
                except BaseException as error:  # noqa: BLE001  kept for the owner of the future
                    cause = self._give_up(error)
                    _log.warning("prepare failed, the first save will plan for itself: %s", cause)
                    done.set_exception(cause)
                else:
                    session.end()
                    done.set_result(None)

            self._world.note_prepared(session.call.states)
            self._world.saves.submit(run)
        return done

    # --- the foreground half --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _taking_number(self) -> Iterator[None]:
        """Give the save its number; on rank 0, have the coordinator wait for its messages. Fail it if the body fails."""
        try:
            try:
                self._world.saves.take_number(self._begin)
            except CheckpointError as error:
                self._coordinator.refuse(error)
                raise
            yield
        except BaseException as error:
            cause = self._give_up(error)
            if cause is not error:
                raise cause from None
            raise

    def _begin(self, number: int) -> Callable[[], None] | None:
        world = self._world
        world.collective.begin_call(f"save/{number}")
        self._operation.number = number
        self._task = SaveTask(number, self._settings.timeout)
        self._channel = CoordinatorChannel(world.collective, number)
        if world.collective.rank != 0:
            return None
        self._coordinator = Coordinator(world.collective, world.resources.global_plans, self._task)
        return self._coordinator.run

    def _capture(self, call: SaveCall) -> SaveSession:
        """Capture the caller's objects."""
        world = self._world
        assert self._channel is not None, "the save has its number"
        world.note_layout(call.states)
        states = select_states(call.framework.capture(call.states, names=call.names), call.selection)
        self._session = SaveSession(
            world.collective, world.resources, call, self._task, self._channel, states, self._operation
        )
        return self._session

    def _run_foreground(self, handle: SaveHandle, asynchronous: bool, background: bool) -> None:
        saves = self._world.saves
        if not background:
            saves.drain()
        self._operation.mark("wait")
        # First, so that a call that is refused leaves the failure to the next one. And hooks of modules may communicate:
        # every rank must run them, also one that knows of an earlier save's failure before the others do.
        session = self._capture(self._make_call())
        saves.raise_failure()
        handle.path = self._operation.path = session.call.storage.url
        self._operation.mark("capture")
        if background:
            session.blocking_seconds = self._operation.seconds()
            self._submit(session, handle, lambda: self._run_in_background(session, handle))
            return
        session.plan()
        self._world.note_prepared(session.call.states)
        if asynchronous:
            session.stage(handle)
            session.blocking_seconds = self._operation.seconds()
            self._submit(session, handle, session.write_staged)
        else:
            self._report_commit(session, handle, session.write_through(handle))

    # --- the background half --------------------------------------------------------------------------------------

    def _run_in_background(self, session: SaveSession, handle: SaveHandle) -> SaveReport:
        """Run all steps of a save whose caller does not even wait for the copy."""
        self._world.saves.raise_failure()
        self._operation.mark("wait")
        session.plan()
        session.stage(handle)
        return session.write_staged()

    def _submit(self, session: SaveSession, handle: SaveHandle, work: Callable[[], SaveReport]) -> None:
        """Run `work`, the background half, after those of earlier saves."""

        def run() -> None:
            try:
                self._report_commit(session, handle, work())
            except BaseException as found:  # noqa: BLE001  kept for result() and the next save
                error = self._give_up(found)
                where = f"rank {self._world.collective.rank}, {self._operation.phase}"
                failure = error if isinstance(error, CheckpointError) else CheckpointError(f"{where}: {error!r}")
                _log.error("asynchronous save to %s failed: %s", handle.path, failure)
                # Else ranks that never ask their handles would fail one save after the other, in turn.
                if failure.repeats != "elsewhere" or getattr(found, "repeats", "") == "here":
                    self._world.saves.keep_failure(handle, failure)
                fail_handle(handle, failure)

        self._world.saves.submit(run)

    # --- the end --------------------------------------------------------------------------------------------------

    def _report_commit(self, session: SaveSession, handle: SaveHandle, report: SaveReport) -> None:
        """Report the commit to the caller, or hand the step to the flusher if the path is a tier."""
        session.end()
        tier = tier_of(session.call.storage)
        if tier is not None:
            keep_failure = partial(self._world.saves.keep_failure, handle)
            self._world.flusher.take(
                self._task.number, tier, handle, report, self._settings, self._operation, keep_failure
            )
            return
        handle.restorable.set_result(None)
        handle.committed.set_result(report)

    def _give_up(self, error: BaseException) -> BaseException:
        """Report to the coordinator that this rank cannot go on, and remove what it wrote.

        Returns:
            The error to raise: that of another rank, if that made this one stop.
        """
        stage = self._operation.phase
        if self._channel is None:
            return error  # it has no number yet
        if self._channel.stopped is not None and isinstance(error, CheckpointError):
            error = self._channel.stopped
        if self._channel.fail(stage, error) and self._session is not None and isinstance(error, CheckpointError):
            # The other ranks read where it happened; this one shall too.
            error.args = (f"rank {self._world.collective.rank}, {stage}: {error}", *error.args[1:])
        self._world.resources.plans.clear()
        self._world.note_prepared({})
        if self._session is not None:
            self._session.discard()
        self._channel.close()
        return error
