"""Run the steps of a save: those for which the caller waits in its thread, the others on the thread for saves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from bytecheckpoint.arguments import value_of
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.collectives.current import thread_scope
from bytecheckpoint.engine.pieces import SharedCopy
from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.failures import Failure
from bytecheckpoint.handles import SaveFuture, SaveHandle, SaveReport, fail_handle, failing_handle
from bytecheckpoint.saving.capture import CapturedState
from bytecheckpoint.saving.channel import FOREGROUND_CALL, CoordinatorChannel
from bytecheckpoint.saving.coordinator import Coordinator, refuse_save
from bytecheckpoint.saving.request import SaveMode, SaveRequest
from bytecheckpoint.saving.save_steps import Save, StagedSave
from bytecheckpoint.saving.step_view import VIEW_STEP, ViewOfSave
from bytecheckpoint.settings import Settings
from bytecheckpoint.step_fence import PendingCopy, arm
from bytecheckpoint.storage import Storage
from bytecheckpoint.tiers.storage import tier_of
from bytecheckpoint.tracing.operation import Operation
from bytecheckpoint.world import World

__all__ = ["follow_with_view", "run_prepare", "run_save"]

_log = logging.getLogger("bytecheckpoint")


def run_save(
    world: World, request: SaveRequest | Exception, settings: Settings, operation: Operation, handle: SaveHandle
) -> None:
    """Save, or start a save that continues in the background.

    Args:
        world: world of the ranks.
        request: arguments of the save, or the error of wrong ones, which fails the save on all ranks.
        settings: settings in force at the call.
        operation: measurements of the save.
        handle: handle whose futures are set.
    """
    try:
        if isinstance(request, SaveRequest) and (tier := tier_of(request.storage)) is not None:
            world.flusher.expect(handle, tier.url, settings)
        if isinstance(request, SaveRequest) and request.states.view is not None:
            world.saves.expect_behind()
        with _begin(world, request, settings, operation) as run:
            run.start(handle)
    except BaseException as error:
        fail_handle(handle, error)
        handle.committed.failure_retrieved = True  # also if the background half has begun already
        raise
    if run.request.mode is SaveMode.SYNCHRONOUS and (failure := handle.restorable.exception()) is not None:
        raise failure


def run_prepare(
    world: World, request: SaveRequest | Exception, settings: Settings, operation: Operation
) -> Future[None]:
    """Plan the next save and touch the staging pool, in the background.

    Args:
        world: world of the ranks.
        request: arguments of the next save, or the error of wrong ones, which fails the preparation on all ranks.
        settings: settings in force at the call.
        operation: measurements of the preparation.

    Returns:
        A future, done when the plan and the pool are ready.
    """
    done = SaveFuture[None]()
    with _begin(world, request, settings, operation) as run:
        captured = run.capture()
        if world.collective.world_size > 1:
            captured.hash_values()  # the caller may change them while the coordinator plans

        def prepare() -> None:
            try:
                world.resources.start_helper(settings)
                run.save.prewarm(run.save.agree_plan(captured, dry=True))
            except BaseException as error:  # noqa: BLE001  kept for the owner of the future
                cause = run.fail(error)
                run.clean_up()
                _log.warning("prepare failed, the first save will plan for itself: %s", cause)
                done.set_exception(cause)
            else:
                run.channel.close()
                done.set_result(None)

        world.note_prepared(run.request.states.objects)
        world.saves.submit(prepare)
    return done


@contextlib.contextmanager
def _begin(
    world: World, request: SaveRequest | Exception, settings: Settings, operation: Operation
) -> Iterator[_SaveRun]:
    """Take the next number and run the body, the foreground half of the save. Its failure ends the save on all ranks.

    A save takes its number on every rank, also if its arguments are wrong. Messages carry the number, so ranks that fail at
    different places still refer to the same save.
    """
    collective, saves = world.collective, world.saves
    path = ""
    if isinstance(request, SaveRequest) and operation.kind == "save":
        # Ranks may save to one path each time. Then the step shows which calls belong together.
        path = request.storage.url + ("" if request.step is None else f" at step {request.step}")
    with saves.exclusively(settings.timeout):
        if operation.kind == "save" and isinstance(request, SaveRequest) and request.mode is not SaveMode.BACKGROUND:
            saves.drain()  # before the number, as the failure of an earlier save may show that the numbers differ
        number = operation.number = world.calls.begin(operation.kind, path, settings.timeout)
        collective.begin_call(f"save/{number}", path)
        channel = CoordinatorChannel(collective, number, settings.timeout)
        run: _SaveRun | None = None
        try:
            arguments = value_of(request)
            if collective.rank == 0:
                plans = world.resources.global_plans
                saves.coordinate(Coordinator(collective, number, plans, arguments, channel.stop).run)
            run = _SaveRun(world, arguments, channel, operation)
            yield run
        except BaseException as error:
            if run is not None:
                cause = run.fail(error)
                run.clean_up()
                if cause is not error:
                    raise cause from error
                raise
            world.calls.note_failure("save", number, path, channel.fail(FOREGROUND_CALL, error))
            if collective.rank == 0 and channel.stop.cancel.failure is not None:
                world.resources.global_plans.clear()
                refuse_save(collective, number, channel.stop.cancel.failure)
            _forget_plans(world)
            channel.close()
            raise


class _SaveRun:
    """One save between its number and its end.

    Args:
        world: world of the ranks.
        request: arguments of the save.
        channel: this rank's messages in the save.
        operation: measurements of the save.

    Attributes:
        request: arguments of the save.
        channel: this rank's messages in the save.
        save: steps of the save.
    """

    def __init__(self, world: World, request: SaveRequest, channel: CoordinatorChannel, operation: Operation) -> None:
        self.request = request
        self.channel = channel
        self.save = Save(world.collective, world.resources, request, channel, operation)
        self._world = world
        self._operation = operation

    def capture(self) -> CapturedState:
        """Capture the caller's objects."""
        self._world.note_layout(self.request.states.objects)
        return self.save.capture()

    def start(self, handle: SaveHandle) -> None:
        """Run the steps for which the caller waits, and leave the others to the thread for saves."""
        world, operation, mode = self._world, self._operation, self.request.mode
        operation.mark("wait")
        # Before the failure of an earlier save is raised: hooks of modules may communicate, so every rank must run them,
        # also one that knows of the failure before the others do.
        captured = self.capture()
        world.saves.raise_failure()
        self.save.take_pieces(captured)
        handle.path = operation.path = self.request.storage.url
        operation.mark("capture")
        if mode is SaveMode.BACKGROUND:
            assert captured.proof is not None
            guarded = self.request.settings.staging.guard
            copy = PendingCopy(
                handle.staged,
                SharedCopy(),
                self.request.settings.timeout,
                captured.proof.error_of_versions,
                partial(self.channel.fail, "stage"),
                operation,
                thread_scope(),
                captured.proof.storages() if guarded else frozenset(),
            )
            arm(copy)
            self._submit(handle, partial(self._stage_in_background, handle, captured, copy))
            return
        staged = [self._stage(handle, captured)]
        world.note_prepared(self.request.states.objects)
        if mode is SaveMode.SYNCHRONOUS:
            self._report_commit(handle, self._finish(handle, staged.pop))
        else:
            self._submit(handle, staged.pop)

    def _stage_in_background(self, handle: SaveHandle, captured: CapturedState, copy: PendingCopy) -> StagedSave:
        copy.turn.set_result(None)
        self._world.saves.raise_failure()
        if self._world.calls.overtaken("save", self.channel.number):
            raise CheckpointError("an earlier save has shown that ranks make different calls; save again")
        self._operation.mark("wait")
        return self._stage(handle, captured, copy.shared)

    def _stage(self, handle: SaveHandle, captured: CapturedState, shared: SharedCopy | None = None) -> StagedSave:
        staged = self.save.stage(self.save.agree_plan(captured), shared)
        if self.request.mode is not SaveMode.SYNCHRONOUS:
            handle.staged.set_result(None)
        return staged

    def _finish(self, handle: SaveHandle, staged: Callable[[], StagedSave]) -> SaveReport:
        """Write and commit.

        Args:
            handle: handle of the save.
            staged: function that returns the staged save. No other reference to it may keep the staging memory alive.
        """
        written = self.save.write(staged())
        if self.request.mode is SaveMode.SYNCHRONOUS:
            handle.staged.set_result(None)
        return self.save.commit(written)

    def _submit(self, handle: SaveHandle, staged: Callable[[], StagedSave]) -> None:
        """Write and commit after earlier saves; keep a failure for `result()` and the next save."""
        blocking_seconds = self._operation.seconds()

        def run() -> None:
            try:
                report = self._finish(handle, staged)
                fence_seconds = self._operation.total("fence").seconds
                waited = blocking_seconds + fence_seconds
                self._report_commit(handle, replace(report, blocking_seconds=waited, fence_seconds=fence_seconds))
            except BaseException as error:  # noqa: BLE001  kept for result() and the next save
                cause = self.fail(error)
                rank, stage = self._world.collective.rank, self._operation.phase
                failure = (
                    cause
                    if isinstance(cause, CheckpointError)
                    else Failure.of(cause, rank=rank, stage=stage).as_error()
                )
                _log.error("asynchronous save to %s failed: %s", handle.path, failure)
                # Else ranks that never ask their handles would fail one save after the other, in turn.
                if failure.repeats != "elsewhere" or getattr(error, "repeats", "") == "here":
                    self._world.saves.keep_failure(handle, failure)
                with failing_handle(handle, failure):
                    self.clean_up()

        self._world.saves.submit(run)

    def _report_commit(self, handle: SaveHandle, report: SaveReport) -> None:
        """Report the commit to the caller, or hand the step to the flusher if the path is a tier."""
        self.channel.close()
        tier = tier_of(self.request.storage)
        if tier is not None:
            keep_failure = partial(self._world.saves.keep_failure, handle)
            self._world.flusher.take(
                self.channel.number, tier, handle, report, self.request.settings, self._operation, keep_failure
            )
            return
        handle.restorable.set_result(None)
        handle.committed.set_result(report)

    def fail(self, error: BaseException) -> BaseException:
        """End the save on all ranks.

        Returns:
            The error to raise: that of another rank, if that made this one stop.
        """
        cause = self.channel.fail(self._operation.phase, error)
        path = self.request.storage.url
        self._world.calls.note_failure(self._operation.kind, self.channel.number, path, cause)
        _forget_plans(self._world)
        return cause

    def clean_up(self) -> None:
        """Remove the files of this rank after a failure."""
        try:
            self.save.discard()
            self.channel.close()
        except Exception:  # noqa: BLE001  logged; the caller gets the first failure
            _log.exception(
                "%s: files of a failed save may stay; the next save there removes them", self._operation.path
            )


def follow_with_view(
    world: World, request: SaveRequest | Exception, operation: Operation, viewed: SaveFuture[None]
) -> Callable[[Future[SaveReport]], None]:
    """Return a callback of a commit that begins the files of its view, if there are any, and sets a future behind them.

    A future keeps its callbacks, so this one holds neither the states nor the handle of the save.

    Args:
        world: world of the ranks, which all call this.
        request: arguments of the save.
        operation: measurements of the save, which get its number later.
        viewed: future to set when the view is there.
    """
    if isinstance(request, Exception):
        return lambda committed: viewed.set_exception(Future.exception(committed))
    return partial(_follow, world, request.states.view, request.storage, request.settings.timeout, operation, viewed)


def _follow(
    world: World,
    view: ViewOfSave | None,
    storage: Storage,
    timeout: float,
    operation: Operation,
    viewed: SaveFuture[None],
    committed: Future[SaveReport],
) -> None:
    failure = Future.exception(committed)  # `SaveFuture.exception` would note a retrieved failure
    if failure is not None:
        viewed.set_exception(failure)
        return
    report = Future.result(committed)
    if report.view != "files":
        viewed.set_result(None)
        return
    agreement = Agreement(world.collective, f"view/{operation.number}", timeout)

    def write() -> None:
        try:
            if view is None:
                agreement.agree(VIEW_STEP, _refuse_no_view, lambda _: None)
            else:
                view.write(agreement, storage, report.generation)
        except BaseException as error:  # noqa: BLE001  kept for the owner of the future
            _log.warning("%s is committed without its view, which `export` writes elsewhere: %s", storage.url, error)
            viewed.set_exception(error)
        else:
            viewed.set_result(None)

    try:
        world.saves.submit_behind(write)
    except Exception as error:  # noqa: BLE001  kept for the owner of the future
        _log.warning("%s is committed without its view: %s", storage.url, error)
        viewed.set_exception(error)


def _refuse_no_view() -> None:
    raise UsageError("this rank gave no view=, others did: give all ranks the same")


def _forget_plans(world: World) -> None:
    """Let the next save plan anew, after a failure."""
    world.resources.plans.clear()
    world.note_prepared({})
