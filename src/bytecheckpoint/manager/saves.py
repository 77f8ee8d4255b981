"""Run the saves of a manager one after the other, and report their failures once."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from bytecheckpoint.arguments import checked
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.errors import (
    CheckpointError,
    IncompatibleCheckpointError,
    StateChangedError,
    StorageFullError,
    UsageError,
)
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.manager.cadence import Cadence, EverySeconds
from bytecheckpoint.manager.folder_keeper import FolderKeeper
from bytecheckpoint.manager.interval import Interval
from bytecheckpoint.manager.run_folder import step_metadata
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.saving import prepare, save
from bytecheckpoint.saving.background import StillnessTrial
from bytecheckpoint.saving.request import RequestedStates
from bytecheckpoint.saving.step_view import complete_view
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import resolve
from bytecheckpoint.threads import wait_for_any
from bytecheckpoint.tiers.storage import tier_of
from bytecheckpoint.tools.fingerprints import fingerprint
from bytecheckpoint.world import world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ReplicaChecks", "RunSaves"]

_log = logging.getLogger("bytecheckpoint")
#: Saves in the call before those in the background.
_TRIALS = 2


class _Staging:
    """Chooses between copies in the call and in the background, for staging="auto".

    The first two saves copy in the call, and behind each one a trial looks whether the state changes before the next step
    of an optimizer. If it never does, later saves copy in the background.

    Args:
        options: options of the saves.

    Attributes:
        mode: argument of the next save.
    """

    def __init__(self, options: SaveOptions) -> None:
        self._trials: list[StillnessTrial] = []
        self._stays = not options.async_checkpoint or options.staging != "auto"
        self.mode: Literal["blocking", "background"] = "background" if options.staging == "background" else "blocking"

    @contextlib.contextmanager
    def around_save(self) -> Iterator[None]:
        """Judge the trial of the save before, and begin that of the save that is made in a `with` block."""
        self._judge()
        if self._stays:
            yield
            return
        trial = StillnessTrial()
        with trial.behind_save():
            yield
        if trial.begun:
            self._trials.append(trial)

    def _judge(self) -> None:
        if self._stays or not self._trials:
            return
        outcome = self._trials[-1].outcome
        if outcome is None:
            outcome = "no optimizer stepped between two saves"
        if outcome:
            self.block(outcome)
        elif len(self._trials) == _TRIALS:
            self.mode, self._stays = "background", True

    def block(self, reason: str) -> None:
        """Copy in the call from now on."""
        self.mode, self._stays = "blocking", True
        _log.info("saves of this run copy the state in the call, not behind the training: %s", reason)


@dataclass
class _StepSave:
    """A save of a step, in flight or done.

    Attributes:
        handle: handle of the save.
        step: step number.
        since_full: value of `RunSaves.since_full` behind it.
        second: True if the save before, or the first try of this one, met a full storage.
        begun: time at which it began, by `time.monotonic`.
        stall: seconds that the call took.
        ended: event that is set when all work behind the commit is done.
    """

    handle: SaveHandle
    step: int
    since_full: int
    second: bool
    begun: float
    stall: float
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def met_full_storage(self) -> bool:
        """True if it failed because the storage was full."""
        return self.handle.done() and isinstance(Future.exception(self.handle.committed), StorageFullError)

    def wait(self, timeout: float | None) -> bool:
        """Wait until all work behind the commit is done; return False if the commit takes longer than some seconds."""
        if not wait_for_any([self.handle.committed], timeout):
            return False
        self.ended.wait(timeout)  # the thread that ends the save wakes this one first
        return True


class ReplicaChecks:
    """Comparisons of the copies that ranks hold of tensors (DDP, HSDP, replicated ones), every so many steps.

    Args:
        every: steps between two of them; None: there are none.
        states: live objects.
        options: options of saves, which say how objects are seen.
        process_group: ranks of the run.

    Raises:
        UsageError: `every` is no positive number.
    """

    def __init__(
        self, every: int | None, states: Mapping[str, Any], options: SaveOptions, process_group: ProcessGroup | None
    ) -> None:
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise UsageError(f"check_replicas={every!r}: give the number of steps between two comparisons")
        self._every, self._states, self._options, self._group = every, states, options, process_group
        self._last = 0
        self._agreed: int | None = None

    def check(self, step: int) -> None:
        """Compare the copies if a comparison is due at a step. All ranks call it.

        Raises:
            IncompatibleCheckpointError: copies differ, on all ranks; the message names the tensor and the ranks.
        """
        if self._every is None or step // self._every == self._last // self._every:
            return
        self._last = step
        begin = time.monotonic()
        try:
            fingerprint(self._states, names=self._options.names, process_group=self._group)
        except IncompatibleCheckpointError as error:
            known = (
                f"at step {self._agreed} all copies agreed" if self._agreed is not None else "none was compared before"
            )
            raise IncompatibleCheckpointError(f"step {step}: {error}; {known}, so later steps may be corrupt") from None
        self._agreed = step
        _log.debug("step %d: the copies on all ranks agree (%.2f s)", step, time.monotonic() - begin)


class RunSaves:
    """Saves one step after the other.

    Args:
        states: live objects, as for `save`.
        options: options of the saves.
        cadence: times of the saves.
        group: ranks that save together.
        keeper: object that claims the folder before a save, and deletes old steps after it.
        replicas: comparisons of copies, which come before the saves.

    Attributes:
        states, options, cadence, keeper, replicas: arguments.
        step: step that was saved or loaded last.
        committed: newest step that is known to be committed.
        longest: seconds of the longest save so far.
        prepared: True once a save or a load has planned the next save.
        since_full: number of incremental saves since the last one that shares no file with earlier steps.
        repeat: True if the last save failed for a reason that the next one may not meet, so a step is to be saved soon.
            On rank 0 False once it has asked for that.
    """

    def __init__(
        self,
        states: MutableMapping[str, Any],
        options: SaveOptions,
        cadence: Cadence,
        group: ProcessGroup | None,
        keeper: FolderKeeper,
        replicas: ReplicaChecks,
    ) -> None:
        self.states, self.options, self.cadence, self._group, self.keeper = states, options, cadence, group, keeper
        self.replicas = replicas
        self._last: _StepSave | None = None
        self._began, self._clock_asked, self._cadence_checked = time.monotonic(), False, False
        self.step = self.committed = self.since_full = 0
        self.longest = 0.0
        self.prepared = self.repeat = False
        self._staging = _Staging(options)

    def check_cadence(self, rank: int) -> None:
        """Warn once, on rank 0, if no rule can make a save due."""
        if not (self._cadence_checked or rank or self.cadence.rules or self.cadence.at_end):
            _log.warning(
                "maybe_save has no every= by which a save is due: only `save` saves, and the notice that the job is to stop"
            )
        self._cadence_checked = True

    def asks_by_clock(self) -> bool:
        """Return True once when a save is due by the clock, or is to be repeated. Rank 0 calls it."""
        if self.repeat:
            self.repeat = False
            return True
        seconds = [rule.seconds for rule in self.cadence.rules if isinstance(rule, EverySeconds | Interval)]
        if not seconds or self._clock_asked or time.monotonic() - self._began < min(seconds):
            return False
        self._clock_asked = True
        return True

    def restart_clock(self) -> None:
        """Count the seconds until the next save from now on, also after a save that is skipped."""
        self._began, self._clock_asked = time.monotonic(), False

    def complete_view(self, path: str, agreement: Agreement) -> None:
        """Write the view of a restored step in the background, if a kill has left it without one. Never raise.

        Args:
            path: address of its checkpoint.
            agreement: ranks of the run.
        """
        chosen, storage = self.options, resolve(path)
        durable = tier.durable if (tier := tier_of(storage)) is not None else storage
        selected = chosen.framework, chosen.names, chosen.include, chosen.exclude
        view = checked(lambda: RequestedStates.of(self.states, *selected, chosen.view).view)
        assert view is not None, "it is among the options"

        def complete() -> None:
            try:
                if complete_view(agreement, view, durable):
                    _log.info("%s: the view that was missing is there now", path)
            except CheckpointError as error:
                _log.warning("%s stays without its view, which `export` writes elsewhere: %s", path, error)

        try:
            world_of(agreement.collective).saves.submit_behind(complete)
        except CheckpointError as error:
            _log.warning("%s stays without its view: %s", path, error)

    @property
    def busy(self) -> bool:
        """True while a save is in flight, as far as this rank knows."""
        return self._last is not None and not self._last.handle.restorable.done()

    def start(self, path: str, step: int, metrics: Mapping[str, Any], metadata: Mapping[str, Any]) -> SaveHandle | None:
        """Save after the save in flight; return None after a failure that is only a warning.

        Args:
            path: address of the checkpoint.
            step: step number.
            metrics: numbers for the catalog.
            metadata: facts for the catalog, those of the options among them.

        Raises:
            CheckpointError: this save failed, or the one before.
        """
        before = self._last
        if self.options.on_error == "warn" and before is not None:
            wait_for_any([before.handle.restorable])  # a save in the background would fail in place of this one
            self.raise_failure()
        if self.keeper.lacks_room:
            if before is not None:
                before.wait(settings().timeout / 2)  # so that the deletion of steps behind it is in the queue
            self.keeper.make_room()
        self.keeper.begin_save(step, metrics)
        self.restart_clock()
        begun, since_full = time.monotonic(), self.next_since_full
        arguments = {**self.options.arguments(), "metadata": step_metadata(step, metrics, metadata, since_full)}
        if self.options.incremental and not since_full:
            arguments["incremental"] = "full"
        handle, full = None, False
        while handle is None:
            try:
                with self._staging.around_save():
                    arguments["staging"] = self._staging.mode
                    handle = save(path, self.states, step=step, process_group=self._group, **arguments)
            except CheckpointError as error:
                if error.repeats:
                    self._report(error, before.step if before else self.step)
                elif isinstance(error, StorageFullError) and not full and not (before and before.met_full_storage):
                    full = True
                    _log.warning("step %d is tried once more, without the files of retired steps: %s", step, error)
                    self.keeper.make_room()
                    self.keeper.begin_save(step, metrics)
                else:
                    self.repeat = False
                    self._report(error, step, final=isinstance(error, StorageFullError))
                    return None
        second = full or (before is not None and before.met_full_storage)
        made = _StepSave(handle, step, since_full, second, begun, time.monotonic() - begun)
        self.since_full, self.repeat = since_full, False
        handle.committed.add_done_callback(functools.partial(self._note_end, made))
        # Only now: `wait` must not wait for a callback that an interrupt has prevented.
        self._last, self.step, self.prepared = made, step, True
        return handle

    def _note_end(self, made: _StepSave, done: Future[Any]) -> None:
        """Learn from a save that has ended. Runs in a thread of the save."""
        try:
            error = Future.exception(done)  # `SaveFuture.exception` would note a retrieved failure
            self.repeat = self._may_pass(error, second=made.second)
            if isinstance(error, StateChangedError) and self.options.staging == "auto":
                self._staging.block(str(error))
            if isinstance(error, StorageFullError):
                self.keeper.make_room()
            if error is not None:
                if not made.since_full:
                    self.since_full = self.options.full_every or 0  # so the next one is
                return
            seconds, self.committed = time.monotonic() - made.begun, made.step
            self.longest = max(self.longest, seconds)
            for rule in self.cadence.rules:
                if isinstance(rule, Interval):
                    rule.learn(made.stall + Future.result(done).fence_seconds, seconds)
            self.keeper.follow_commit(made.step, made.handle.viewed)
        finally:
            made.ended.set()

    def _may_pass(self, error: BaseException | None, *, second: bool) -> bool:
        """Return whether the next save may succeed where one failed, perhaps a `second` one on a full storage."""
        if isinstance(error, StorageFullError):
            return not second
        return isinstance(error, StateChangedError) and self.options.staging == "auto"

    @property
    def next_since_full(self) -> int:
        """Value of `since_full` behind the next save."""
        count, every = self.since_full + 1, self.options.full_every
        return count if self.options.incremental and (every is None or count < every) else 0

    def await_commit(self, step: int) -> None:
        """Wait for the commit of a step, if its save is in flight. Any rank may call it by itself."""
        if self._last is not None and self._last.step == step:
            wait_for_any([self._last.handle.committed], settings().timeout)

    def begin_at(self, step: int) -> None:
        """Count a loaded step as saved."""
        self.step = self.committed = step
        self._began = time.monotonic()

    def prepare(self) -> None:
        """Plan the first save and touch its memory in the background. Optimizers have their state by now."""
        if not self.prepared and self.options.async_checkpoint:
            self.prepared = True
            options = self.options
            prepare(
                self.states, framework=options.framework, include=options.include, exclude=options.exclude,
                names=options.names, incremental=options.incremental, view=options.view, process_group=self._group,
            )  # fmt: skip

    def wait(self, timeout: float | None = None, *, final: bool = True) -> None:
        """Wait for the commit of the save in flight.

        Args:
            timeout: seconds to wait; None for all.
            final: False if another save follows where this one failed for a reason that may pass.

        Raises:
            CheckpointError: the save failed, and its failure was not raised before.
        """
        if self._last is not None and self._last.wait(timeout):
            self.raise_failure(final=final)

    def raise_failure(self, *, final: bool = False) -> None:
        """Report the failure of the last save, once; with `final`, also one that the next save may not meet."""
        last = self._last
        if last is not None and last.handle.done() and not last.handle.failure_retrieved:
            try:
                last.handle.result()
            except CheckpointError as error:
                self._report(error, last.step, final=final)

    def _report(self, error: CheckpointError, step: int, *, final: bool = False) -> None:
        """Raise the failure of a step, or log it."""
        if not final and self._may_pass(error, second=self._last is not None and self._last.second):
            _log.warning("step %d is not saved, the next one is: %s", step, error)
            return
        found = self.keeper.resolve_conflict(error)
        if found is not None and found is not error:
            raise found from error
        if found is not None and self.options.on_error == "raise":
            raise error
        _log.warning("the save of step %d failed: %s", step, error)
