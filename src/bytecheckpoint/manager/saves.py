"""The saves of a run, of which one is in flight at a time: their failures, and what they take."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from typing import Any

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.saving import prepare, save

__all__ = ["RunSaves"]

_log = logging.getLogger("bytecheckpoint")
#: Arguments of `save` that `prepare` takes too.
_OF_PREPARE = {"framework", "include", "exclude", "names", "timeout", "process_group"}


class RunSaves:
    """Saves one step after the other.

    Args:
        states: as for `save`.
        options: further arguments of `save`.
        on_error: "raise" the failure of a save, once, or "warn".
        judge: returns a failure as it is, another error that ends the run whatever `on_error` says, or None: the run
            goes on without this step.
        committed: called after each commit, in a thread of the save, with the seconds for which the save stalled the
            training, and those until the commit.

    Attributes:
        options: of `save`.
        step: that was saved last, or loaded.
        committed: the newest step that is known to be committed.
        at: when that was, by `time.monotonic`.
        longest: seconds of the longest save so far.
        prepared: a save or a load has planned the next save.
    """

    def __init__(
        self,
        states: MutableMapping[str, Any],
        options: Mapping[str, Any],
        on_error: str,
        judge: Callable[[CheckpointError], CheckpointError | None],
        committed: Callable[[float, float], object],
    ) -> None:
        self._states, self.options, self._on_error = states, dict(options), on_error
        self._judge, self._after = judge, committed
        self._handle: SaveHandle | None = None
        self._noted = threading.Event()  # what follows the last save has been begun
        self.step, self.at, self.committed = 0, time.monotonic(), 0
        self.longest = 0.0
        self.prepared = False

    @property
    def busy(self) -> bool:
        """Whether a save is in flight, as far as this rank knows."""
        return self._handle is not None and not self._handle.restorable.done()

    def start(self, path: str, step: int, facts: Mapping[str, Any]) -> SaveHandle | None:
        """Save after the save in flight; return None after a failure that is only a warning.

        Args:
            path: of the checkpoint.
            step: that is saved.
            facts: for the metadata, beside those of the options.

        Raises:
            CheckpointError: the save failed, or the one before.
        """
        if self._on_error == "warn" and self._handle is not None:
            Future.exception(self._handle.restorable)  # a save in the background would fail in place of this one
            self.raise_failure()
        begun = self.at = time.monotonic()
        options = {**self.options, "step": step, "metadata": {**self.options.get("metadata", {}), **facts}}
        handle = None
        while handle is None:
            try:
                handle = save(path, self._states, **options)
            except CheckpointError as error:
                self._tell(error, self.step if error.repeats else step)
                if not error.repeats:
                    return None
        stall, noted = time.monotonic() - begun, threading.Event()

        def note(done: Future[Any]) -> None:
            try:
                if Future.exception(done) is None:  # not `SaveFuture`'s, which notes a retrieved failure
                    seconds, self.committed = time.monotonic() - begun, step
                    self.longest = max(self.longest, seconds)
                    self._after(stall, seconds)
            finally:
                noted.set()

        handle.committed.add_done_callback(note)
        # Only now: `wait` must not wait for a callback that an interrupt has prevented.
        self._noted = noted
        self._handle, self.step, self.prepared = handle, step, True
        return handle

    def begin_at(self, step: int) -> None:
        """Count as saved what was loaded."""
        self.step, self.at, self.committed = step, time.monotonic(), step

    def prepare(self) -> None:
        """Have the first save planned and its memory touched while training goes on: optimizers have their state now."""
        if not self.prepared and self.options["async_checkpoint"]:
            self.prepared = True
            prepare(self._states, **{name: self.options[name] for name in _OF_PREPARE & self.options.keys()})

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the commit of the save in flight.

        Raises:
            TimeoutError: it takes longer.
            CheckpointError: it failed, and nobody has been told.
        """
        if self._handle is not None:
            Future.exception(self._handle.committed, timeout)
            self._noted.wait(timeout)  # the thread that ends the save wakes this one first
            self.raise_failure()

    def raise_failure(self) -> None:
        """Tell of the failure of the last save, once."""
        handle = self._handle
        if handle is None or not handle.done() or handle.failure_retrieved:
            return
        try:
            handle.result()
        except CheckpointError as error:
            self._tell(error, self.step)

    def _tell(self, error: CheckpointError, step: int) -> None:
        """Raise the failure of a step, or log it."""
        found = self._judge(error)
        if found is not None and found is not error:
            raise found from error
        if found is not None and self._on_error == "raise":
            raise error
        _log.warning("the save of step %d failed: %s", step, error)
