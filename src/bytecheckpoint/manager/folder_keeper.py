"""Take over the folder of a run for this job, and delete old steps in the background."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from bytecheckpoint.errors import CheckpointError, StorageConflictError, StorageError
from bytecheckpoint.manager.rules import Retention
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
        on_usurped: callback, given the reason when another job turns out to manage the folder; runs in the background
            thread.

    Attributes:
        folder: folder of the run.
    """

    def __init__(
        self, folder: RunFolder, retention: Retention, *, writes: bool, on_usurped: Callable[[str], object]
    ) -> None:
        self.folder, self._retention, self._writes, self._on_usurped = folder, retention, writes, on_usurped
        self._owns = False
        self._restored: int | None = None  # the step that was loaded, until a save follows
        self._restored_any = False
        self._unnamed = set(retention.metrics)  # metrics of rules that no step has had yet
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
        # Younger files may be of a save that the job before has in flight: none lasts longer without an answer.
        age = max(self._retention.grace, settings().timeout)
        self._work.put(lambda: self.folder.collect_leftovers(age, but=step))

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

    def clean_up(self) -> None:
        """Delete in the background the steps that no rule keeps. Return at once."""
        if self._writes:
            self._work.put(self._retain)

    def _retain(self) -> None:
        if self._retention.rules is None:
            self.folder.check_owner()
        else:
            self.folder.clean(self._retention.rules, self._retention.grace)

    def close(self, timeout: float) -> None:
        """End the background thread after its work.

        Args:
            timeout: seconds to wait for the thread.
        """
        self._work.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except StorageConflictError as error:
                self._on_usurped(str(error))
            except Exception as error:  # noqa: BLE001  training continues, and the next commit tries again
                _log.warning("old steps of %s were not deleted: %s", self.folder.url, error)
