"""The order of one rank's saves: one at a time, each in a foreground and a background half."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.handles import SaveHandle, SaveReport, fail_handle, pending
from bytecheckpoint.monitoring.phases import Phases
from bytecheckpoint.saving.call import SaveCall, SaveTask
from bytecheckpoint.saving.channel import CoordinatorChannel
from bytecheckpoint.saving.coordinator import Coordinator
from bytecheckpoint.saving.session import SaveSession
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage import Storage
from bytecheckpoint.world import World

__all__ = ["Saver"]

_log = logging.getLogger("bytecheckpoint")


class Saver:
    """Runs saves of one rank: decides which steps run in the caller's thread, and what follows their end.

    A save takes a number on every rank as it is called, whatever happens then. Messages carry the number, so ranks
    that fail at different places still speak of the same save.

    Args:
        world: what this rank keeps from save to save.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def save(
        self,
        make_call: Callable[[], SaveCall],
        settings: Settings,
        handle: SaveHandle,
        *,
        tier: Storage | None,
        asynchronous: bool,
        background: bool,
    ) -> None:
        """Run one save.

        Args:
            make_call: checks the arguments; what it raises fails the save on all ranks.
            settings: in force at the call.
            handle: of the save.
            tier: where the save goes, if that is a tier; the save waits while too many of its steps are not flushed.
            asynchronous: return when staged.
            background: return before that.
        """
        phases = Phases()
        saves = self._world.saves
        if tier is not None:
            self._world.flusher.expect(handle, tier.url, settings)
        with saves.calling:
            self._start(make_call, settings, handle, phases, asynchronous, background)
        if not asynchronous and (error := handle.restorable.exception()) is not None:
            saves.forget_failure()  # it is raised here
            raise error

    def prepare(self, make_call: Callable[[], SaveCall], settings: Settings) -> Future[None]:
        """Plan, reserve and touch in the background, so that the next save finds everything ready.

        Args:
            make_call: checks the arguments.
            settings: in force at the call.

        Returns:
            Done when everything is ready.
        """
        with self._world.saves.calling:
            task, channel = self._number(settings)
            phases = Phases()
            try:
                call = make_call()
                session = self._session(call, task, channel, phases)
                session.planner.capture_layout(dry=True)
            except BaseException as error:
                self._give_up(channel, phases, None, error)
                raise

            done: Future[None] = pending()

            def run() -> None:
                try:
                    self._world.resources.start_helper(call.settings)
                    session.prepare()
                except BaseException as error:  # noqa: BLE001  kept for the owner of the future
                    self._give_up(channel, phases, session, error)
                    _log.warning("prepare failed, the first save will plan for itself: %s", error)
                    done.set_exception(error)
                else:
                    done.set_result(None)

            self._world.note_prepared(call.states)
            self._world.saves.submit(run)
            return done

    # --- the foreground half --------------------------------------------------------------------------------------

    def _start(
        self,
        make_call: Callable[[], SaveCall],
        settings: Settings,
        handle: SaveHandle,
        phases: Phases,
        asynchronous: bool,
        background: bool,
    ) -> None:
        saves = self._world.saves
        task, channel = self._number(settings)
        session: SaveSession | None = None
        try:
            if not background:
                saves.drain()
            phases.mark("wait")
            saves.raise_failure()
            call = make_call()
            handle.path = call.storage.url
            session = self._session(call, task, channel, phases)
            committed = partial(self._committed, call, handle, task.sequence)
            phases.mark("capture")
            if background:
                session.planner.capture_layout()
                session.blocking_seconds = phases.total()
                work = partial(self._run_in_background, session, phases, handle)
                self._submit(channel, phases, session, handle, work, committed)
                return
            session.plan()
            self._world.note_prepared(call.states)
            if asynchronous:
                session.stage(handle)
                session.blocking_seconds = phases.total()
                self._submit(channel, phases, session, handle, session.write_staged, committed)
            else:
                committed(session.write_through(handle))
        except BaseException as error:
            self._give_up(channel, phases, session, error)
            fail_handle(handle, error)
            raise

    def _number(self, settings: Settings) -> tuple[SaveTask, CoordinatorChannel]:
        """Give the save its number; on rank 0, have the coordinator wait for its messages."""
        world = self._world
        task = SaveTask(world.saves.next_number(), settings.timeout)
        if world.collective.rank == 0:
            world.saves.coordinate(Coordinator(world.collective, world.resources.world_plans, task).run)
        return task, CoordinatorChannel(world.collective, task.sequence)

    def _session(self, call: SaveCall, task: SaveTask, channel: CoordinatorChannel, phases: Phases) -> SaveSession:
        states = call.framework.capture(call.states, names=call.names)
        world = self._world
        return SaveSession(world.collective, world.resources, call, task, channel, states, phases)

    # --- the background half --------------------------------------------------------------------------------------

    def _run_in_background(self, session: SaveSession, phases: Phases, handle: SaveHandle) -> SaveReport:
        """Run all of a save whose caller does not even wait for the copy."""
        self._world.saves.raise_failure()
        phases.mark("wait")
        session.plan()
        session.stage(handle)
        return session.write_staged()

    def _submit(
        self,
        channel: CoordinatorChannel,
        phases: Phases,
        session: SaveSession,
        handle: SaveHandle,
        work: Callable[[], SaveReport],
        committed: Callable[[SaveReport], None],
    ) -> None:
        def run() -> None:
            try:
                committed(work())
            except BaseException as error:  # noqa: BLE001  kept for result() and the next save
                self._give_up(channel, phases, session, error)
                where = f"rank {self._world.collective.rank}, {phases.current}"
                failure = error if isinstance(error, CheckpointError) else CheckpointError(f"{where}: {error!r}")
                _log.error("asynchronous save to %s failed: %s", handle.path, failure)
                self._world.saves.keep_failure(failure)
                fail_handle(handle, failure)

        self._world.saves.submit(run)

    # --- the end --------------------------------------------------------------------------------------------------

    def _committed(self, call: SaveCall, handle: SaveHandle, number: int, report: SaveReport) -> None:
        """Report the commit to the caller, or hand the step to the flusher if the path is a tier."""
        tier = call.storage.tier_to_flush()
        if tier is not None:
            keep_failure = self._world.saves.keep_failure
            self._world.flusher.take(number, tier, handle, report, call.settings, keep_failure)
            return
        handle.restorable.set_result(None)
        handle.committed.set_result(report)

    def _give_up(
        self, channel: CoordinatorChannel, phases: Phases, session: SaveSession | None, error: BaseException
    ) -> None:
        """Report to the coordinator that this rank cannot go on, and remove what it wrote."""
        stage = phases.current
        if channel.fail(stage, error) and session is not None and isinstance(error, CheckpointError):
            # The other ranks read where it happened; this one shall too.
            error.args = (f"rank {self._world.collective.rank}, {stage}: {error}", *error.args[1:])
        self._world.resources.plans.clear()
        self._world.note_prepared({})
        if session is not None:
            session.discard()
