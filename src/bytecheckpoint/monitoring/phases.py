"""The time that each phase of one save or load takes."""

from __future__ import annotations

import time

from bytecheckpoint.liveness import note_activity

__all__ = ["Phases"]


class Phases:
    """A stopwatch that adds up seconds by phase. Used by one thread at a time.

    Attributes:
        seconds: by phase.
        current: what is being done, for failure messages.
    """

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.current = "call"

    def mark(self, name: str) -> None:
        """Add the time since the last mark to phase `name`."""
        note_activity()
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        """Return the seconds since construction."""
        return time.perf_counter() - self._begin
