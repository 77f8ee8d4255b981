"""Take over the folder of a run for this job, and delete old steps in the background."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from bytecheckpoint.errors import CheckpointError, StorageConflictError, StorageError
from bytecheckpoint.manager.commits import CommitActions
from bytecheckpoint.manager.rules import Retention, StepInfo
from bytecheckpoint.manager.run_folder import RunFolder
from bytecheckpoint.settings import settings
from bytecheckpoint.threads import start

__all__ = ["FolderKeeper"]

_log = logging.getLogger("bytecheckpoint")


class FolderKeeper:
    """One rank's part in keeping the folder of a run. Rank 0 writes to the folder; the others only read it.

    Args:
        folder: folder of the run.
        retention: steps to keep.
        writes: True on rank 0.
        on_commit: functions to call with each committed step.
        on_usurped: callback, given the reason when another job turns out to manage the folder; runs in the background
            thread.

    Attributes:
        folder: folder of the run.
    """

    def __init__(
        self, folder: RunFolder, retention: Retention, *, writes: bool, on_commit: Sequence[Callable[[StepInfo], object]],
        on_usurped: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._actions = CommitActions(on_commit)
        self.folder, self._retention, self._writes, self._on_usurped = folder, retention, writes, on_usurped
        self._owns = False
        self._restored: int | None = None  # the step that was loaded, until a save follows
        self._restored_any = False
        self._saving = 0  # the step that is being saved, or was saved last
        self._looked, self._next_look = False, math.inf  # for what earlier jobs have left, by `time.monotonic`
        self._unnamed = set(retention.metrics)  # metrics of rules that no step has had yet
        self._room_made = threading.Event()
        self._room_made.set()
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bytecheckpoint-retention", daemon=True)
        start(self._thread)

    # --- saves ----------------------------------------------------------------------------------------------------

    def note_restore(self, step: int) -> None:
        """Note that the run continues from a step. The next save marks the steps behind it as superseded."""
        self._restored, self._restored_any = step, True

    def begin_save(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Claim the folder for a step that is about to be saved, on rank 0.

        Args:
            step: step number.
            metrics: numbers for the rules.
        """
        if not self._writes:
            self._restored = None
            return
        self._room_made.wait(settings().timeout / 2)  # the other ranks wait as long as the time-out
        for name in sorted(self._unnamed - metrics.keys()):
            _log.warning(
                "step %d is saved without the metric %r, by which keep=Best(%r) chooses (it has %s): only other rules keep "
                "such a step", step, name, name, ", ".join(sorted(map(str, metrics))) or "none",
            )  # fmt: skip
        self._unnamed.clear()
        self.claim(step)

    def claim(self, step: int) -> None:
        """Take over the folder, and note from which step the run continues.

        Args:
            step: step that is about to be saved.
        """
        self._saving = step
        try:
            if self._restored is not None:
                self.folder.continue_from(min(self._restored, step))
                self._restored = None
            if not self._owns:
                self._take_over(step)
        except StorageError as error:  # the save will fail alike, on all ranks
            _log.warning("%s", error)
        self.folder.note_own(step)

    def _take_over(self, step: int) -> None:
        if not self._restored_any and (beyond := self.folder.leave_alone(step)):
            _log.warning(
                "%s holds steps up to %d, and a run that began from none of them saves step %d: they stay, and the next "
                "restore_latest() takes them for newer; restore one of them first, or use another folder",
                self.folder.url, beyond[-1], step,
            )  # fmt: skip
        self.folder.take_over()
        self._owns = True

    def resolve_conflict(self, error: CheckpointError) -> CheckpointError | None:
        """Return the error to raise for a failed save, or None if the competing job has to stop instead.

        Two jobs that save a step at the same time hinder each other, and one of them commits it. The job that took over the
        folder last continues, no matter which one committed.
        """
        conflict = isinstance(error, StorageConflictError)
        concerned = self._owns if self._writes else conflict
        if not concerned:
            return error
        try:
            self.folder.check_owner()
        except StorageConflictError as usurped:
            return usurped
        except StorageError:
            return error
        return None if conflict else error

    # --- retention ------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Remove in the background what earlier jobs have left, at the first step of a training."""
        if self._writes and not self._looked:
            # A second look comes when what is there now is old enough.
            self._looked, self._saving, self._next_look = True, step, time.monotonic() + self._leftover_age
            self._work.put(self._collect_leftovers)

    @property
    def _leftover_age(self) -> float:
        """Seconds after which files are no save in flight of an earlier job: none lasts longer without an answer."""
        return max(self._retention.grace, settings().timeout)

    def _collect_leftovers(self) -> None:
        self.folder.collect_leftovers(self._leftover_age, but=lambda: self._saving)

    def follow_commit(self, step: int, viewed: Future[None]) -> None:
        """Call the program's functions with a committed step and its view, and delete old steps, in the background."""
        if self._writes:
            self.call_functions(step, self.clean_up, viewed)
        self.clean_up()

    def call_functions(
        self, step: int, done: Callable[[], object] = lambda: None, viewed: Future[None] | None = None
    ) -> None:
        """Call the program's functions with a committed step in the background, and `done` behind them."""
        self._actions.begin(step, lambda: self.folder.find(step), done, viewed)

    def clean_up(self) -> None:
        """Delete in the background the steps that no rule keeps. Return at once."""
        if self._writes:
            self._work.put(self._retain)

    def _retain(self) -> None:
        rules, grace, most = self._retention.rules, self._retention.grace, self._retention.most_retired
        if rules is None:
            self.folder.check_owner()
            self.folder.finish_removals(grace, most)
        else:
            self.folder.clean(rules, grace, most, self._actions.held)
        if time.monotonic() > self._next_look:
            self._next_look = math.inf
            self._collect_leftovers()

    @property
    def lacks_room(self) -> bool:
        """True on rank 0 if it is known that a step may not fit."""
        if lack := self.folder.lacking_room() if self._writes else "":
            _log.info("%s: another step may not fit, because %s: retired steps go now", self.folder.url, lack)
        return bool(lack)

    def make_room(self) -> None:
        """End all deletions that have begun, in the background. The next save waits for that."""
        if self._writes and self._thread.is_alive():
            self._room_made.clear()
            self._work.put(self._free_room)

    def _free_room(self) -> None:
        try:
            if self._owns:
                self.folder.check_owner()
            self.folder.free_room()
        finally:
            self._room_made.set()

    def close(self, timeout: float) -> None:
        """End the background threads after their work.

        Args:
            timeout: seconds to wait for each.
        """
        self._actions.close(timeout)
        self._work.put(None)
        self._thread.join(timeout)
        self._room_made.set()  # nobody frees any after this

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except StorageConflictError as error:
                self._on_usurped(str(error))
            except (Exception, SystemExit) as error:  # noqa: BLE001  training continues, and the next commit tries again
                _log.warning("old steps of %s were not deleted: %s", self.folder.url, error)
