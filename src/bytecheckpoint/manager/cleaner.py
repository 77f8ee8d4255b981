"""A thread for what a manager does to its folder while training goes on."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from bytecheckpoint.errors import StorageConflictError
from bytecheckpoint.threads import start

__all__ = ["Cleaner"]

_log = logging.getLogger("bytecheckpoint")


class Cleaner:
    """Runs one piece of work after the other, in the background.

    Args:
        root: address of the folder, for messages.
        on_conflict: called when somebody else turns out to manage the folder, with the reason.
    """

    def __init__(self, root: str, on_conflict: Callable[[StorageConflictError], object]) -> None:
        self._root, self._on_conflict = root, on_conflict
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="bytecheckpoint-retention", daemon=True)
        start(self._thread)

    def do(self, work: Callable[[], None]) -> None:
        """Run `work` after what was given before. A failure is logged: the next piece tries again."""
        self._work.put(work)

    def close(self, timeout: float) -> None:
        """End the thread when all work is done, and wait for that at most `timeout` seconds."""
        self._work.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except StorageConflictError as error:
                self._on_conflict(error)
            except Exception as error:  # noqa: BLE001  training goes on
                _log.warning("old steps of %s were not deleted: %s", self._root, error)
