"""`CheckpointManager`: when to save, where, what to keep, and from where to go on."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

from bytecheckpoint.collectives import current
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointTimeoutError,
    CorruptCheckpointError,
    PeerLostError,
    StorageConflictError,
    StorageError,
    UsageError,
)
from bytecheckpoint.handles import LoadReport, SaveHandle
from bytecheckpoint.loading import load
from bytecheckpoint.manager.boundary import Boundaries
from bytecheckpoint.manager.cleaner import Cleaner
from bytecheckpoint.manager.interval import Interval
from bytecheckpoint.manager.preemption import Preemption
from bytecheckpoint.manager.restored import Restored
from bytecheckpoint.manager.rules import Best, EverySeconds, StepInfo, finite_metrics, keep_rules, save_rules
from bytecheckpoint.manager.run_folder import METADATA, RunFolder, by_age, step_folder, step_number
from bytecheckpoint.manager.saves import RunSaves
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

#: Acts that all ranks agree on (`Boundaries`).
_SAVE, _PREEMPT, _USURPED = "save", "preempt", "usurped: "
_STEPS = 2**44  # more than a run has
_OVERLAPS = ("wait", "skip", "fail")
#: Arguments of `save` that say for what it waits, and for whom.
_WHEN = ("async_checkpoint", "staging", "process_group")
#: Seconds that the save in flight has to end after the loss of a rank.
_RESCUE_SECONDS = 10.0


class CheckpointManager:
    """Saves a training run when it is due, deletes what need not stay, and finds where to go on.

    All ranks make it with the same arguments and call its methods together. Steps lie in `root/step_00000100`. Decisions
    that clocks, signals or storages could make differently on each rank are made by one rank.

    Args:
        root: folder or URL of the run, of any storage, tiers included. What else is there stays as it is.
        states: as for `save` and `load`.
        every: when to save: a number of steps, a `timedelta`, a rule (`EverySteps`, `EverySeconds`, `AtSteps`, or
            `Interval`, which finds the interval itself), a function of the number of steps that answers alike on all
            ranks, or a list of these. None: when `save` is called.
        keep: which steps to keep: a number of the newest, or rules (`Latest`, `Best`, `Every`, `Younger`), of which one
            that wants a step is enough. None: all. The newest committed step and pinned ones always stay.
        preemption: what tells that the job is to stop. All ranks then save at the same step, and `preempted` is set.
        just_in_time: after the loss of a rank, let the others save the last boundary if they hold everything between them,
            as with DDP and HSDP; see docs/how-to/elastic.md. The exception that the loss has caused goes on then.
        at_end: save at the end of the `with` block the last step that was reached, unless an exception ends it.
        overlap: what to do when a save is due while the one before is being written: "wait" for it, "skip" the save, or
            "fail".
        on_error: "raise" the failure of a save, once, at the next call; or "warn": log it and go on.
        grace: seconds between the two phases of a deletion, for jobs that are reading.
        async_checkpoint: as for `save`.
        save_options: further arguments of `save` (framework, staging, include, names, ...).
        load_options: further arguments of `load`.
        process_group: the ranks; by default all.

    Attributes:
        preempted: the job is to stop: leave the training loop. Set on all ranks at the same step.
        restored: what the last restore did.

    Raises:
        UsageError: an argument is out of its range, or keeps nothing.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        states: MutableMapping[str, Any],
        *,
        every: Any = None,
        keep: Any = None,
        preemption: Preemption | None = None,
        just_in_time: bool = False,
        at_end: bool = False,
        overlap: str = "wait",
        on_error: str = "raise",
        grace: float = 600.0,
        async_checkpoint: bool = True,
        save_options: Mapping[str, Any] | None = None,
        load_options: Mapping[str, Any] | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if overlap not in _OVERLAPS:
            raise UsageError(f"overlap={overlap!r}: use one of {', '.join(_OVERLAPS)}")
        if on_error not in ("raise", "warn"):
            raise UsageError(f"on_error={on_error!r}: use 'raise' or 'warn'")
        if grace < 0:
            raise UsageError(f"grace={grace!r}: give a number of seconds, at least 0")
        self._states = states
        self._save_rules, self._keep_rules = save_rules(every), keep_rules(keep)
        self._preemption, self._at_end, self._overlap = preemption, at_end, overlap
        options = {"async_checkpoint": async_checkpoint, **(save_options or {}), "process_group": process_group}
        self._saves = RunSaves(states, options, on_error, self._judge, self._after)
        self._load_options = dict(load_options or {})
        self._group, self._grace = process_group, grace
        self._collective = current(process_group, timeout=settings().timeout)
        number = world_of(self._collective).next_manager_number()
        self._tag, self._conversations = f"manager/{number}", 0
        self._folder = RunFolder(root, f"{self._collective.world_id}/{number}")
        self.preempted = False
        self.restored: Restored | None = None
        self._step = 0  # the last boundary
        self._loads = 0  # after each the steps begin at a lower number, perhaps
        self._metrics: Mapping[str, Any] = {}
        self._asked_by_clock = False
        self._noticed_at = 0.0
        self._owner = False
        self._went_to: int | None = None  # the step that was loaded, until a save follows
        self._closed = False
        with contextlib.ExitStack() as stack:
            self._boundaries = stack.enter_context(
                Boundaries(self._collective, f"{self._tag}/boundaries", settings().timeout, self._poll())
            )
            if preemption is not None:
                stack.enter_context(preemption.watching(self._notice))
            self._just_in_time = stack.enter_context(self._watch_ranks()) if just_in_time else None
            self._stack = stack.pop_all()
        self._cleaner = Cleaner(self.root, lambda why: self._boundaries.request(f"{_USURPED}{why}"))

    # --- where the run is -----------------------------------------------------------------------------------------

    @property
    def root(self) -> str:
        """Address of the run's folder."""
        return self._folder.url

    def steps(self) -> list[StepInfo]:
        """Return the committed steps, ascending. Any rank may call it by itself."""
        return self._folder.steps()

    def latest(self) -> StepInfo | None:
        """Return the newest committed step, or None. Any rank may call it by itself."""
        return next(reversed(by_age(self._folder.steps())), None)

    def best(self, metric: str, mode: str = "min") -> StepInfo | None:
        """Return the committed step with the best value of a metric, or None. Any rank may call it by itself."""
        return next(iter(Best(metric, mode=mode).ranked(self._folder.steps())), None)

    def pin(self, step: int) -> None:
        """Keep a step whatever the rules say, in this job and later ones. One rank calls it."""
        self._folder.pin(step, pinned=True)

    def unpin(self, step: int) -> None:
        """Leave a step to the rules again. One rank calls it."""
        self._folder.pin(step, pinned=False)

    # --- restore --------------------------------------------------------------------------------------------------

    def restore_latest(self) -> int:
        """Load the newest step whose every byte verifies; return its number, 0 when there is none and the run begins.

        A step that is damaged or was never committed is passed over, with a warning; `restored.skipped` says why.

        Raises:
            CorruptCheckpointError: there are steps, and none can be loaded. The states are undefined then.
            IncompatibleCheckpointError: the newest sound step does not fit the states.
            StorageError: the storage fails; an older step would not be better.
        """
        self._await_saves()
        skipped: dict[int, str] = {}
        # Another job may commit and delete steps meanwhile: look them up again after each that is passed over.
        while (step := next((s for s in reversed(self._agree_on_steps()) if s not in skipped), None)) is not None:
            try:
                report = self._load(step)
            except (CorruptCheckpointError, CheckpointNotFoundError) as error:
                skipped[step] = str(error)
                if self._collective.rank == 0:
                    _log.warning("step %d cannot be loaded, trying an older one: %s", step, error)
                continue
            self.restored = Restored(step, report, skipped)
            return step
        if skipped:
            raise CorruptCheckpointError(
                f"none of the {len(skipped)} steps in {self.root} can be loaded: "
                + "; ".join(f"step {step}: {why}" for step, why in skipped.items())
            )
        if self._collective.rank == 0:
            _log.info("%s holds no committed step: the run begins", self.root)
        self.restored = Restored(None)
        self._begin_at(0)
        return 0

    def restore(self, step: int) -> int:
        """Load a step; return its number.

        Raises:
            CheckpointNotFoundError: it is not committed.
            CheckpointError: as `load`.
        """
        self._await_saves()
        self.restored = Restored(step, self._load(step))
        return step

    def restore_from(
        self, path: str | os.PathLike[str], only: Collection[str] | None = None, **options: Any
    ) -> LoadReport:
        """Load a step of this run by its path, to go on from there. Or load another checkpoint, or only a part.

        Args:
            path: of any checkpoint.
            only: names of states. The run does not go back to a step of which a part is loaded.
            **options: of `load`, in place of those of the manager.

        Raises:
            CheckpointError: as `load`.
        """
        url = resolve(path).url
        if only is None and (step := step_number(url, self.root)) is not None:
            self.restore(step)
            assert self.restored is not None and self.restored.report is not None
            return self.restored.report
        self._await_saves()
        return self._load_from(url, only, **options)

    def _await_saves(self) -> None:
        """Wait for the save in flight, also one of a manager before this one: its step is to be found."""
        world_of(self._collective).saves.drain()

    def _load(self, step: int) -> LoadReport:
        report = self._load_from(step_folder(self.root, step))
        self._begin_at(step)
        self._saves.prepared = True  # by the load
        self._went_to = step
        self._loads += 1
        return report

    def _load_from(self, path: str, only: Collection[str] | None = None, **options: Any) -> LoadReport:
        states = self._states if only is None else {name: self._states[name] for name in only}
        report = load(path, states, **{"process_group": self._group, **self._load_options, **options})
        for note in report.notes if self._collective.rank == 0 else ():
            _log.warning("%s: %s", path, note)
        return report

    def _begin_at(self, step: int) -> None:
        self._step = step
        self._saves.begin_at(step)

    def _agree_on_steps(self) -> list[int]:
        """Return the committed steps that any rank sees, by age: each machine has a hot tier of its own."""
        machine_only = self._folder.machine_only

        def look() -> list[tuple[bool, int]]:
            if self._collective.rank and not machine_only:
                return []
            return self._folder.committed()

        def join(seen: list[list[tuple[bool, int]]]) -> list[int]:
            current = {step for steps in seen for is_current, step in steps if is_current}
            return sorted({step for steps in seen for _, step in steps}, key=lambda step: (step in current, step))

        return self._conversation().agree("steps", look, join, reports=list[tuple[bool, int]], decisions=list[int])

    def ask_rank_0(self, look: Callable[[], _T], kind: Any = Any, timeout: float | None = None) -> _T:
        """Return on all ranks what rank 0 finds, for example in a storage. All ranks call it.

        Args:
            look: called on rank 0. What it raises is raised on all ranks.
            kind: type of what it returns, which msgspec must be able to encode.
            timeout: seconds; by default as the settings say.
        """

        def find() -> Any:
            return look() if self._collective.rank == 0 else None

        found: _T = self._conversation(timeout).agree("rank 0", find, lambda answers: answers[0], decisions=kind)
        return found

    def _conversation(self, timeout: float | None = None) -> Agreement:
        self._conversations += 1
        tag = f"{self._tag}/{self._conversations}"
        return Agreement(self._collective, tag, settings().timeout if timeout is None else timeout)

    # --- save -----------------------------------------------------------------------------------------------------

    def maybe_save(self, step: int, metrics: Mapping[str, Any] | None = None) -> SaveHandle | None:
        """Save if a save is due after `step` steps. Call it at every step, or at every n-th, on all ranks.

        Args:
            step: number of steps that are done; ascends.
            metrics: numbers for `Best`, and for whoever looks at the step later. Those of rank 0 count.

        Returns:
            The handle of the save, or None.

        Raises:
            StorageConflictError: another manager has taken over the folder.
            CheckpointError: a save failed, this one or the one before.
        """
        step, before = self._checked(step), self._step
        acts = self._reach(step, metrics)
        if _PREEMPT in acts:
            return self._save_before_the_end(step) if not self._boundaries.left else None
        if _SAVE in acts or any(rule.due(step, before) for rule in self._save_rules):
            return self._save(step, self._metrics, overlap=self._overlap)
        self._saves.raise_failure()
        self._saves.prepare()
        return None

    def save(self, step: int, metrics: Mapping[str, Any] | None = None) -> SaveHandle | None:
        """Save now, due or not. All ranks call it.

        Args:
            step: as for `maybe_save`.
            metrics: as for `maybe_save`.

        Returns:
            The handle, or None after a failure that `on_error` makes a warning.

        Raises:
            CheckpointError: as `maybe_save`.
        """
        self._reach(self._checked(step), metrics)
        return self._save(self._step, self._metrics, overlap="wait")

    def wait(self) -> None:
        """Wait until the save in flight is committed.

        Raises:
            CheckpointError: it failed, and nobody has been told.
        """
        self._saves.wait()

    def _reach(self, step: int, metrics: Mapping[str, Any] | None) -> set[str]:
        """Be at a boundary; return what all ranks do there.

        Raises:
            StorageConflictError: another manager has taken over the folder.
        """
        self._step, self._metrics = step, metrics or {}
        if self._just_in_time is not None:
            self._just_in_time.note(step, functools.partial(self._facts, step, self._metrics))
        self._look_at_clock()
        acts = self._boundaries.reach(self._loads * _STEPS + step)
        for act in acts:
            if act.startswith(_USURPED):
                raise StorageConflictError(act.removeprefix(_USURPED))
        if _SAVE in acts:  # also if the save is skipped now
            self._asked_by_clock, self._saves.at = False, time.monotonic()
        if acts and (left := self._boundaries.left):
            if self._just_in_time is not None:
                return set()  # it saves after a loss; and the end of this block would end it
            _log.warning(
                "rank %d: %s left this run or is lost, so step %d cannot be saved",
                self._collective.rank, names_of_ranks(left), step,
            )  # fmt: skip
            acts.discard(_SAVE)
        if _PREEMPT in acts:
            self.preempted = True
        return acts

    def _checked(self, step: object) -> int:
        number = check_step(step)
        if number is None:
            raise UsageError("step=None: give the number of steps that are done")
        return number

    def _look_at_clock(self) -> None:
        """Ask for a save of all ranks when rank 0's clock says that one is due."""
        seconds = [rule.seconds for rule in self._save_rules if isinstance(rule, EverySeconds | Interval)]
        if self._collective.rank or not seconds or self._asked_by_clock:
            return
        if time.monotonic() - self._saves.at >= min(seconds):
            self._asked_by_clock = True
            self._boundaries.request(_SAVE)

    def _save(self, step: int, metrics: Mapping[str, Any], *, overlap: str) -> SaveHandle | None:
        if self._closed:
            _log.warning(
                "the manager of %s was closed: it saves step %d, and deletes and notices nothing", self.root, step
            )
        if overlap != "wait" and self.ask_rank_0(lambda: self._saves.busy):
            if overlap == "fail":
                raise UsageError(f"the save of step {self._saves.step} is still being written at step {step}")
            _log.warning("step %d is not saved: that of step %d is still being written", step, self._saves.step)
            return None
        if self._collective.rank == 0:
            self._claim(step)
        else:
            self._went_to = None
        self._asked_by_clock = False
        return self._saves.start(step_folder(self.root, step), step, self._facts(step, metrics))

    @staticmethod
    def _facts(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {METADATA: {"step": step, "metrics": finite_metrics(metrics, step)}}

    def _claim(self, step: int) -> None:
        """Be the manager of the folder, and note where the run goes on. Runs on rank 0."""
        try:
            if self._went_to is not None:
                self._folder.go_on_from(min(self._went_to, step))
                self._went_to = None
            if not self._owner:
                self._own_folder(step)
        except StorageError as error:  # the save will fail alike, on all ranks
            _log.warning("%s", error)
        self._folder.saves(step)

    def _own_folder(self, step: int) -> None:
        """Take the folder over, and have the cleaner remove what killed jobs have left."""
        if self.restored is None and (beyond := self._folder.leave_alone(step)):
            _log.warning(
                "%s holds steps up to %d, and a run that began from none of them saves step %d: they stay, and the next "
                "restore_latest() takes them for newer; restore one of them first, or use another folder",
                self.root, beyond[-1], step,
            )  # fmt: skip
        self._folder.take_over()
        self._owner = True
        # What is younger may be of a save that the job before has in flight: none lasts longer without an answer.
        age = max(self._grace, settings().timeout)
        self._cleaner.do(lambda: self._folder.collect_leftovers(age, but=step))

    def _judge(self, error: CheckpointError) -> CheckpointError | None:
        """Return what to tell of the failure of a save; None if the run goes on, because it is the other job that must end.

        Two jobs that save a step at the same time hinder each other: one of them commits it. The one that took the folder
        over last goes on, whichever that was.
        """
        conflict = isinstance(error, StorageConflictError)
        if not (self._owner if self._collective.rank == 0 else conflict):
            return error
        try:
            self._folder.check_owner()
        except StorageConflictError as usurped:
            return usurped
        except StorageError:
            return error
        return None if conflict else error

    def _after(self, stall: float, seconds: float) -> None:
        """Tell the rules what a save took, and have the cleaner look at the folder."""
        for rule in self._save_rules:
            if isinstance(rule, Interval):
                rule.learn(stall, seconds)
        self._cleaner.do(self._retain)

    def _retain(self) -> None:
        """Delete what no rule keeps. Runs on rank 0, in the cleaner."""
        if self._collective.rank:
            return
        if self._keep_rules is None:
            self._folder.check_owner()
        else:
            self._folder.clean(self._keep_rules, self._grace)

    # --- the end of a job -----------------------------------------------------------------------------------------

    def _notice(self) -> None:
        """Take note of a signal. Runs in its handler."""
        self._noticed_at = time.monotonic()
        self._boundaries.request(_PREEMPT)

    def _poll(self) -> Callable[[], str] | None:
        """Return a function that says what to ask for because a file or a function tells of a preemption."""
        told = self._preemption
        # One process of each machine looks.
        if told is None or not told.polls or os.environ.get("LOCAL_RANK", "0") != "0":
            return None
        return lambda: _PREEMPT if told.poll() else ""

    def _save_before_the_end(self, step: int) -> SaveHandle | None:
        """Save within the grace period, if that is long enough."""
        assert self._preemption is not None
        deadline = (self._noticed_at or time.monotonic()) + self._preemption.grace
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
        handle = self._save(step, self._metrics, overlap="wait")
        if handle is not None:
            try:
                self._saves.wait(max(deadline - time.monotonic(), 0.0))
            except TimeoutError as error:
                if isinstance(error, CheckpointError):  # of the save itself
                    raise
                _log.warning("step %d was not committed within the grace period: the step before stands", step)
        return handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        if self._just_in_time is not None and isinstance(error, Exception):
            self._just_in_time.wait()
        with contextlib.suppress(CheckpointError):  # the exception that ends the block says more
            self._close(save_last=False)

    def _watch_ranks(self) -> JustInTime:
        """Return what saves after the loss of a rank."""
        from bytecheckpoint.manager.just_in_time import JustInTime

        if self._group is not None:
            raise UsageError("just_in_time=True needs all ranks of the job: leave process_group away")
        own = self._preemption is not None and signal.SIGTERM in self._preemption.signals
        options = {name: value for name, value in self._saves.options.items() if name not in _WHEN}
        return JustInTime(
            self._states,
            self._collective,
            f"{self._tag}/survivors",
            self._folder,
            options,
            self._wait_for_committed,
            self._claim,
            handles_sigterm=not own,
        )

    def _wait_for_committed(self) -> int:
        """Wait for the save in flight, which fails soon after the loss of a rank; return the newest committed step."""
        with contextlib.suppress(CheckpointError, TimeoutError):
            self._saves.wait(_RESCUE_SECONDS)
        return self._saves.committed

    def close(self) -> None:
        """Save the last step if that was asked for, wait for the save in flight and for deletions, and end.

        Raises:
            CheckpointError: a save failed, and nobody has been told.
        """
        self._close(save_last=self._at_end)

    def _close(self, *, save_last: bool) -> None:
        if self._just_in_time is not None:
            self._just_in_time.close()  # from now on the other ranks may end
        try:
            if save_last and not self.preempted and self._step > self._saves.step:
                self._save(self._step, self._metrics, overlap="wait")
            self.wait()
        finally:
            self._closed = True
            self._stack.close()
            self._cleaner.close(settings().timeout)
