"""Where the time of one save or load goes."""

from __future__ import annotations

import time

__all__ = ["Phases"]


class Phases:
    """Adds up seconds by phase. Used by one thread at a time."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """What passed since the last mark belongs to phase `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds since the object was made."""
        return time.perf_counter() - self._begin
