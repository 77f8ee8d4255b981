"""Report the progress of work on the bytes of a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Counted", "Progress"]

#: Function of (bytes done, bytes in all).
Progress = Callable[[int, int], None]


class Counted:
    """A sum of bytes, for a function of progress.

    Args:
        total: bytes in all.
        progress: function of (bytes done, bytes in all), called by one thread at a time.

    Attributes:
        done: bytes done.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def expect(self, nbytes: int) -> None:
        """Add to the bytes in all."""
        self._total += nbytes

    def add(self, nbytes: int) -> None:
        """Count more bytes, and report them."""
        with self._lock:
            self.done = min(self.done + nbytes, self._total)  # an upload that is repeated counts twice
            if self._progress is not None:
                self._progress(self.done, self._total)
