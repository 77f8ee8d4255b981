"""Run the saves of a manager one after the other, and report their failures once."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.manager.folder_keeper import FolderKeeper
from bytecheckpoint.manager.interval import Interval
from bytecheckpoint.manager.rules import Cadence, EverySeconds
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.saving import prepare, save

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RunSaves"]

_log = logging.getLogger("bytecheckpoint")
#: Seconds that the save in flight has to end after the loss of a rank.
_RESCUE_SECONDS = 10.0


class RunSaves:
    """Saves one step after the other.

    Args:
        states: live objects, as for `save`.
        options: options of the saves.
        cadence: times of the saves.
        group: ranks that save together.
        keeper: object that claims the folder before a save, and deletes old steps after it.

    Attributes:
        states, options, cadence, keeper: arguments.
        step: step that was saved or loaded last.
        committed: newest step that is known to be committed.
        longest: seconds of the longest save so far.
        prepared: True once a save or a load has planned the next save.
    """

    def __init__(
        self,
        states: MutableMapping[str, Any],
        options: SaveOptions,
        cadence: Cadence,
        group: ProcessGroup | None,
        keeper: FolderKeeper,
    ) -> None:
        self.states, self.options, self.cadence, self._group, self.keeper = states, options, cadence, group, keeper
        self._handle: SaveHandle | None = None
        self._after_commit = threading.Event()  # set when all work after the last commit is done
        self._began, self._clock_asked = time.monotonic(), False
        self.step = self.committed = 0
        self.longest = 0.0
        self.prepared = False

    def asks_by_clock(self) -> bool:
        """Return True once when enough seconds have passed since the last save. Rank 0 calls it."""
        seconds = [rule.seconds for rule in self.cadence.rules if isinstance(rule, EverySeconds | Interval)]
        if not seconds or self._clock_asked or time.monotonic() - self._began < min(seconds):
            return False
        self._clock_asked = True
        return True

    def restart_clock(self) -> None:
        """Count the seconds until the next save from now on, also after a save that is skipped."""
        self._began, self._clock_asked = time.monotonic(), False

    @property
    def busy(self) -> bool:
        """True while a save is in flight, as far as this rank knows."""
        return self._handle is not None and not self._handle.restorable.done()

    def start(self, path: str, step: int, facts: Mapping[str, Any]) -> SaveHandle | None:
        """Save after the save in flight; return None after a failure that is only a warning.

        Args:
            path: address of the checkpoint.
            step: step number.
            facts: facts for the catalog, beside the metadata of the options.

        Raises:
            CheckpointError: this save failed, or the one before.
        """
        if self.options.on_error == "warn" and self._handle is not None:
            Future.exception(self._handle.restorable)  # a save in the background would fail in place of this one
            self.raise_failure()
        self.keeper.begin_save(step)
        self.restart_clock()
        begun = time.monotonic()
        arguments = self.options.arguments()
        arguments["metadata"] = {**(self.options.metadata or {}), **facts}
        handle = None
        while handle is None:
            try:
                handle = save(path, self.states, step=step, process_group=self._group, **arguments)
            except CheckpointError as error:
                self._report(error, self.step if error.repeats else step)
                if not error.repeats:
                    return None
        stall, after_commit = time.monotonic() - begun, threading.Event()

        def note_commit(done: Future[Any]) -> None:
            try:
                if Future.exception(done) is None:  # `SaveFuture.exception` would note a retrieved failure
                    seconds, self.committed = time.monotonic() - begun, step
                    self.longest = max(self.longest, seconds)
                    for rule in self.cadence.rules:
                        if isinstance(rule, Interval):
                            rule.learn(stall, seconds)
                    self.keeper.clean_up()
            finally:
                after_commit.set()

        handle.committed.add_done_callback(note_commit)
        # Only now: `wait` must not wait for a callback that an interrupt has prevented.
        self._after_commit = after_commit
        self._handle, self.step, self.prepared = handle, step, True
        return handle

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
                names=options.names, incremental=options.incremental, process_group=self._group,
            )  # fmt: skip

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the commit of the save in flight; return False if it takes longer than `timeout` seconds.

        Raises:
            CheckpointError: the save failed, and its failure was not raised before.
        """
        if self._handle is not None:
            try:
                Future.exception(self._handle.committed, timeout)
            except TimeoutError:
                return False
            self._after_commit.wait(timeout)  # the thread that ends the save wakes this one first
            self.raise_failure()
        return True

    def wait_after_loss(self) -> int:
        """Wait for the save in flight, which fails soon after the loss of a rank; return the newest committed step."""
        with contextlib.suppress(CheckpointError):
            self.wait(_RESCUE_SECONDS)
        return self.committed

    def raise_failure(self) -> None:
        """Report the failure of the last save, once."""
        handle = self._handle
        if handle is None or not handle.done() or handle.failure_retrieved:
            return
        try:
            handle.result()
        except CheckpointError as error:
            self._report(error, self.step)

    def _report(self, error: CheckpointError, step: int) -> None:
        """Raise the failure of a step, or log it."""
        found = self.keeper.resolve_conflict(error)
        if found is not None and found is not error:
            raise found from error
        if found is not None and self.options.on_error == "raise":
            raise error
        _log.warning("the save of step %d failed: %s", step, error)
