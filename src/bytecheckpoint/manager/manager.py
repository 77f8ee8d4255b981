"""Save a training run when a save is due, keep the steps that the rules want, and restore the newest one."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

from bytecheckpoint.collectives import Collective, current
from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointTimeoutError,
    PeerLostError,
    StorageConflictError,
    UsageError,
)
from bytecheckpoint.handles import LoadReport, SaveHandle
from bytecheckpoint.layouts import LayoutArgument
from bytecheckpoint.manager.boundary import Boundaries, SaveDue, StopJob, Usurped
from bytecheckpoint.manager.cadence import Cadence, When
from bytecheckpoint.manager.folder_keeper import FolderKeeper
from bytecheckpoint.manager.preemption import Preemption, PreemptionWatch
from bytecheckpoint.manager.restores import (
    Conversations,
    Origin,
    Progress,
    Reached,
    Restored,
    Restores,
    check_facts,
)
from bytecheckpoint.manager.rules import Best, Keep, Retention, StepInfo
from bytecheckpoint.manager.run_folder import RunFolder, step_folder, step_metadata, step_number
from bytecheckpoint.manager.saves import ReplicaChecks, RunSaves
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.saving.steps import check_step
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import resolve
from bytecheckpoint.world import world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from bytecheckpoint.manager.just_in_time import JustInTime

__all__ = ["CheckpointManager"]

_log = logging.getLogger("bytecheckpoint")
_T = TypeVar("_T")

_STEPS = 2**44  # more than a run has


class CheckpointManager:
    """Saves a training run when a save is due, deletes old steps, and restores the newest one.

    All ranks make it with the same arguments and call its methods together. Steps lie in `root/step_00000100`. One rank
    makes the decisions that clocks, signals or storages could make differently on each rank.

    Args:
        root: folder or URL of the run, on any storage, tiers included. Other content of the folder stays as it is.
        states: live objects, as for `save` and `load`.
        every: times of the saves: a `Cadence`, or its first argument, such as a number of steps, a `timedelta` or a rule.
            None: only when `save` is called.
        keep: steps to keep: a `Retention`, or its first argument, such as a number of the newest steps, or rules. None:
            all.
        preemption: notice that the job is about to stop. All ranks then save at the same step, and `preempted` is set.
        just_in_time: True to let the other ranks save the last boundary after the loss of a rank, if they hold everything
            between them, as with DDP and HSDP (docs/how-to/elastic.md), and all ranks if an exception of the program ends
            the block on all of them. The exception is raised afterwards.
        save_options: options of all saves.
        load_options: options of all loads.
        start_from: path of a checkpoint, also of another program, from whose weights the run begins while it has no step of
            its own. Nothing there is changed or deleted.
        layout: layout through which `start_from` is seen, as for `load`.
        check_replicas: steps between two comparisons of the copies that ranks hold of tensors (DDP, HSDP, replicated ones),
            which `maybe_save` makes before a save; None: there are none. Each takes 0.3 to 0.5 s of a core for each GiB of
            a rank.
        process_group: ranks of the run; by default all.

    Raises:
        UsageError: an argument is out of its range, or keeps nothing.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        states: MutableMapping[str, Any],
        *,
        every: Cadence | When = None,
        keep: Retention | Keep = None,
        preemption: Preemption | None = None,
        just_in_time: bool = False,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        start_from: str | os.PathLike[str] | None = None,
        layout: LayoutArgument | None = None,
        check_replicas: int | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        cadence = every if isinstance(every, Cadence) else Cadence(every)
        retention = keep if isinstance(keep, Retention) else Retention(keep)
        save_options, load_options = save_options or SaveOptions(), load_options or LoadOptions()
        _check_options(save_options, load_options)
        origin = Origin.of(start_from, layout, states)
        collective = current(process_group, timeout=settings().timeout)
        number = world_of(collective).calls.begin("manager", str(root), settings().timeout)
        tag = f"manager/{number}"
        folder = RunFolder(root, f"{collective.world_id}/{number}")
        self._conversations = Conversations(collective, tag)
        self._progress = Progress()
        self._keeper = FolderKeeper(
            folder, retention, writes=collective.rank == 0, on_commit=save_options.commit_functions,
            on_usurped=lambda reason: self._boundaries.request(Usurped(reason)),
        )  # fmt: skip
        replicas = ReplicaChecks(check_replicas, states, save_options, process_group)
        self._saves = RunSaves(states, save_options, cadence, process_group, self._keeper, replicas)
        self._restores = Restores(states, load_options, process_group, folder, self._conversations, origin)
        self._just_in_time: JustInTime | None = None
        with contextlib.ExitStack() as stack:
            self._boundaries = stack.enter_context(Boundaries(collective, f"{tag}/boundaries", settings().timeout))
            if preemption is not None:
                watch = PreemptionWatch(preemption, lambda: self._boundaries.request(StopJob()))
                self._preemption = stack.enter_context(watch)
            if just_in_time:
                from bytecheckpoint.manager.just_in_time import JustInTime

                if process_group is not None:
                    raise UsageError("just_in_time=True needs all ranks of the job: leave process_group away")
                own = preemption is None or signal.SIGTERM not in preemption.signals
                survivors = JustInTime(self._saves, collective, f"{tag}/survivors", handles_sigterm=own)
                self._just_in_time = stack.enter_context(survivors)
            self._stack = stack.pop_all()

    # --- steps of the run -----------------------------------------------------------------------------------------

    @property
    def root(self) -> str:
        """Address of the run's folder."""
        return self._keeper.folder.url

    @property
    def step(self) -> int:
        """Number of steps that are done: the last one that was restored or reached, or 0 in a new run."""
        return self._progress.step

    @property
    def preempted(self) -> bool:
        """True once the job is to stop: leave the training loop. Set on all ranks at the same step."""
        return self._progress.preempted

    @property
    def restored(self) -> Restored | None:
        """Result of the last restore; None if nothing was restored."""
        return self._restores.last

    def steps(self) -> list[StepInfo]:
        """Return the committed steps, ascending. Any rank may call it by itself."""
        return self._keeper.folder.steps()

    def latest(self) -> StepInfo | None:
        """Return the newest committed step, or None. Any rank may call it by itself."""
        return self._keeper.folder.newest()

    def best(self, metric: str, mode: str = "min") -> StepInfo | None:
        """Return the committed step with the best value of a metric, or None. Any rank may call it by itself."""
        return next(iter(Best(metric, mode=mode).ranked(self._keeper.folder.steps())), None)

    def pin(self, step: int) -> None:
        """Keep a step in spite of all rules, in this job and later ones. One rank calls it.

        If the save of the step is in flight, this waits for its commit.

        Raises:
            CheckpointNotFoundError: the step is not committed.
        """
        number = check_step(step)
        self._saves.await_commit(number)
        self._keeper.folder.pin(number, pinned=True)

    def unpin(self, step: int) -> None:
        """Let the rules delete a step again. One rank calls it."""
        self._keeper.folder.pin(check_step(step), pinned=False)

    # --- restore --------------------------------------------------------------------------------------------------

    def restore_latest(self) -> Restored | None:
        """Load the newest step whose every byte verifies; return None if there is no step and the run begins.

        A damaged step is skipped, with a warning. A run that begins gets the weights of `start_from`.

        Raises:
            CorruptCheckpointError: there are steps, and none can be loaded. The states are undefined then.
            IncompatibleCheckpointError: the newest sound step does not fit the states.
            StorageError: the storage fails; an older step would not be better.
        """
        self._await_saves()
        return self._begin(self._restores.load_latest())

    def restore(self, step: int) -> Restored:
        """Load a step.

        Raises:
            CheckpointNotFoundError: the step is not committed.
            CheckpointError: the load failed, as for `load`.
        """
        number = check_step(step)
        self._await_saves()
        restored = self._restores.load_step(number)
        self._begin(restored)
        return restored

    def restore_from(
        self, path: str | os.PathLike[str], only: Collection[str] | None = None, **arguments: Any
    ) -> LoadReport:
        """Load a step of this run by its path and continue from it, or load any other checkpoint or a part of one.

        Args:
            path: address of any checkpoint.
            only: names of states. The run does not go back to a step of which a part is loaded.
            **arguments: arguments of `load`, in place of the manager's load options.

        Raises:
            CheckpointError: the load failed, as for `load`.
        """
        url = resolve(path).url
        if only is None and (step := step_number(url, self.root)) is not None:
            return self.restore(step).report
        self._await_saves()
        return self._restores.load(url, only, **arguments)

    def go_back(self, step: int) -> None:
        """Continue from an older step whose state the program has set itself, without a restore. All ranks call it.

        The steps behind it count as superseded from the next save on.

        Args:
            step: number of steps that are done now.

        Raises:
            UsageError: the run has not come so far.
        """
        number = check_step(step)
        if number > self.step:
            raise UsageError(f"go_back({number}): the run is at step {self.step}")
        self._await_saves()
        self._restores.count += 1
        self._keeper.note_restore(number)
        self._progress.begin_at(number)
        self._saves.begin_at(number)

    def _await_saves(self) -> None:
        """Wait for the save in flight, also one of an earlier manager, so that its step is found."""
        world_of(self._collective).saves.drain()

    def _begin(self, restored: Restored | None) -> Restored | None:
        """Continue from a step, or begin."""
        self._progress.begin_at(0 if restored is None else restored.step)
        self._saves.begin_at(self.step)
        if restored is not None:
            self._saves.prepared = True  # by the load
            self._keeper.note_restore(restored.step)
            if self._saves.options.view is not None:
                self._saves.complete_view(restored.path, self._conversations.begin())
            if self._saves.options.incremental:
                steps = self._keeper.folder.steps
                found = self.ask_rank_0(lambda: [info.since_full for info in steps() if info.step == restored.step])
                self._saves.since_full = sum(found)
        return restored

    @property
    def _collective(self) -> Collective:
        return self._conversations.collective

    def ask_rank_0(self, look: Callable[[], _T], kind: Any = Any, timeout: float | None = None) -> _T:
        """Return on all ranks the result of a function on rank 0, for example of a look into a storage.

        Args:
            look: function to call on rank 0. Its error is raised on all ranks.
            kind: type of its result, which msgspec must be able to encode.
            timeout: seconds to wait; by default as in the settings.
        """
        return self._conversations.ask_rank_0(look, kind, timeout)

    def ask_ranks(self, look: Callable[[], Any]) -> list[Any]:
        """Return on all ranks what a function returns on each. The error of a rank is raised on all."""
        return self._conversations.begin().agree("ranks", look, lambda answers: answers)

    def before_loads(self, prepare: Callable[[str], None]) -> None:
        """Call a function with the address of each checkpoint before the whole of it is loaded, on all ranks alike."""
        self._restores.prepare = prepare

    # --- save -----------------------------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Return whether `maybe_save` would save at this step. Call it on all ranks, before `maybe_save` at the same step.

        It is for what is worth while before a save only, such as an evaluation whose result becomes a metric. What is due
        and not saved stays due.

        Args:
            step: number of steps that are done, ascending over the whole run.

        Raises:
            UsageError, StorageConflictError: as `maybe_save`.
        """
        self._saves.check_cadence(self._collective.rank)
        self._progress.asked = self._reach(step, None, None)
        return self._progress.asked.due or (StopJob() in self._progress.asked.acts and not self._boundaries.left)

    def maybe_save(
        self, step: int, metrics: Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> SaveHandle | None:
        """Save if a save is due. Call it on all ranks at every step, or at every n-th.

        Args:
            step: number of steps that are done, ascending over the whole run.
            metrics: numbers for `Best` and for readers of the step. Those of rank 0 count.
            metadata: facts about the step, plain values that JSON can hold. Those of rank 0 count.

        Returns:
            The handle of the save, or None.

        Raises:
            UsageError: the step is behind the last one; call `restore` or `go_back` first.
            StorageConflictError: another manager has taken over the folder.
            IncompatibleCheckpointError: copies of a tensor differ between ranks (`check_replicas`). Nothing is saved.
            CheckpointError: this save failed, or the one before.
        """
        self._saves.check_cadence(self._collective.rank)
        reached = self._reach(step, metrics, metadata)
        if not self._boundaries.left:
            self._saves.replicas.check(self.step)
        if StopJob() in reached.acts:
            return self._save_before_the_end() if not self._boundaries.left else None
        if reached.due:
            return self._save(self._saves.cadence.overlap)
        self._saves.raise_failure()
        self._saves.prepare()
        return None

    def save(
        self, step: int, metrics: Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> SaveHandle | None:
        """Save now, due or not. All ranks call it.

        Args:
            step: number of steps that are done, ascending.
            metrics: numbers for `Best` and for readers of the step. Those of rank 0 count.
            metadata: facts about the step, plain values that JSON can hold. Those of rank 0 count.

        Returns:
            The handle, or None after a failure that is only a warning.

        Raises:
            UsageError: the step is behind the last one; call `restore` or `go_back` first.
            CheckpointError: this save failed, or the one before.
        """
        self._reach(step, metrics, metadata)
        return self._save()

    def wait(self) -> None:
        """Wait until the save in flight is committed.

        Raises:
            CheckpointError: the save failed, and its failure was not raised before.
        """
        self._saves.wait()

    def _reach(self, step: int, metrics: object, metadata: object) -> Reached:
        """Reach a boundary, and return what the ranks agree on there; at the same step as `should_save`, what they did."""
        before = self.step
        step = self._progress.advance(step, metrics, metadata)
        asked, self._progress.asked = self._progress.asked, None
        self._keeper.begin_step(step)
        if self._just_in_time is not None:
            shared = self._saves.since_full + 1 if self._saves.options.incremental else 0
            self._just_in_time.note(step, functools.partial(step_metadata, step, *self._facts, shared))
        if asked is not None and asked.step == step:
            return asked
        if self._collective.rank == 0 and self._saves.asks_by_clock():
            self._boundaries.request(SaveDue())
        acts = self._boundaries.reach(self._restores.count * _STEPS + step)
        for act in acts:
            if isinstance(act, Usurped):
                raise StorageConflictError(act.reason)
        if SaveDue() in acts:  # also if the save is skipped now
            self._saves.restart_clock()
        if acts and (left := self._boundaries.left):
            if self._just_in_time is not None:
                return Reached(step)  # it saves after a loss; and the end of this block would end it
            _log.warning(
                "rank %d: %s left this run or is lost, so step %d cannot be saved",
                self._collective.rank, names_of_ranks(left), step,
            )  # fmt: skip
            acts.discard(SaveDue())
        if StopJob() in acts:
            self._progress.preempted = True
        due = SaveDue() in acts or self._saves.cadence.due(step, before)
        if asked is not None:  # of an earlier step, and no save followed
            acts, due = acts | asked.acts, due or asked.due
        return Reached(step, acts, due)

    def _save(self, overlap: str = "wait") -> SaveHandle | None:
        """Save the step that this rank has reached."""
        step = self.step
        if self._progress.closed:
            _log.warning(
                "the manager of %s was closed: it saves step %d, and deletes and notices nothing", self.root, step
            )
        if overlap != "wait" and self.ask_rank_0(lambda: self._saves.busy):
            if overlap == "fail":
                raise UsageError(f"the save of step {self._saves.step} is still being written at step {step}")
            _log.warning("step %d is not saved: that of step %d is still being written", step, self._saves.step)
            return None
        return self._saves.start(step_folder(self.root, step), step, *self._facts)

    @property
    def _facts(self) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """The metrics and the metadata of the step that this rank has reached, as they are now."""
        metadata = {**(self._saves.options.metadata or {}), **self._progress.metadata}
        with contextlib.suppress(Exception):  # of values that the save refuses, on all ranks
            metadata = copy.deepcopy(metadata)
        return dict(self._progress.metrics), metadata

    # --- the end of a job -----------------------------------------------------------------------------------------

    def _save_before_the_end(self) -> SaveHandle | None:
        """Save within the grace period, if that is long enough."""
        step, deadline = self.step, self._preemption.deadline()
        _log.warning("rank %d: the job is to stop; step %d is the last one", self._collective.rank, step)
        seconds = min(max(deadline - time.monotonic(), 1.0), settings().timeout)
        try:
            late = self.ask_rank_0(lambda: time.monotonic() + self._saves.longest > deadline, timeout=seconds)
        except (CheckpointTimeoutError, PeerLostError) as error:  # rank 0 has left meanwhile
            _log.warning("rank %d: no save is begun: %s", self._collective.rank, error)
            return None
        if late:
            _log.warning("a save takes %.0f s, too long for the grace period: none is begun", self._saves.longest)
            return None
        handle = self._save_and_wait(deadline)
        if handle is not None and not handle.done():
            _log.warning("step %d was not committed within the grace period: the step before stays the newest", step)
        return handle

    def _save_and_wait(self, deadline: float | None = None) -> SaveHandle | None:
        """Save and wait until a time of `time.monotonic`; save once more after a failure that may pass."""
        for final in (False, True):
            handle = self._save()
            if handle is not None:
                self._saves.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0), final=final)
            if not self._saves.repeat:
                break
        return handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        if self._just_in_time is not None and isinstance(error, Exception):
            self._just_in_time.wait(error)
        with contextlib.suppress(CheckpointError):  # the exception that ends the block says more
            self._close(save_last=False)

    def close(self) -> None:
        """Save the last step if the cadence wants it, wait for the save in flight and for deletions, and end.

        Raises:
            CheckpointError: a save failed, and its failure was not raised before.
        """
        self._close(save_last=self._saves.cadence.at_end)

    def _close(self, *, save_last: bool) -> None:
        if self._just_in_time is not None:
            self._just_in_time.close()  # from now on the other ranks may end
        try:
            if save_last and not self.preempted and self.step > self._saves.step:
                self._save_and_wait()
            self.wait()
        finally:
            self._progress.closed = True
            self._stack.close()
            self._keeper.close(settings().timeout)


def _check_options(save_options: SaveOptions, load_options: LoadOptions) -> None:
    for name, value, kind in (("save", save_options, SaveOptions), ("load", load_options, LoadOptions)):
        if not isinstance(value, kind):
            raise UsageError(f"{name}_options={value!r}: give {kind.__name__}(...)")
    check_facts(save_options.metadata)
