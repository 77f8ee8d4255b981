"""The rule by which tests let chosen calls fail: in storages, in proxies before servers, and in file systems.

Imports nothing but the standard library: a FUSE program loads this module without the package, which would import torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FaultRule"]


@dataclass
class FaultRule:
    """Choose calls, and let them fail.

    Attributes:
        call: the operation, "*" for all operations, or a predicate of the call.
        error: error that a hit call raises; None if it only waits.
        name: part of the file's name; "" matches all.
        rank: rank of the caller; None for any.
        skip: number of matching calls that pass first.
        times: number of calls that are hit after those; -1 for all.
        delay: seconds that a hit call waits.
        hold: an event that a hit call waits for.
        before: function to call before a hit call does anything.
        partial: True if a hit "write" puts some bytes into the file before the error.
        lose: True if a hit call takes effect, and its answer is lost: the error, or a broken connection, comes instead.
        hits: number of calls that were hit.
    """

    call: str | Callable[[Any], bool]
    error: BaseException | None = None
    name: str = ""
    rank: int | None = None
    skip: int = 0
    times: int = 1
    delay: float = 0.0
    hold: threading.Event | None = None
    before: Callable[[], object] | None = None
    partial: bool = False
    lose: bool = False
    hits: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def hit(self, call: Any, name: str = "", rank: int | None = None) -> bool:
        """Count a call if it matches; return whether it is hit."""
        if not self.times:  # first, because a predicate may have an effect
            return False
        matches = self.call(call) if callable(self.call) else self.call in (call, "*")
        if not matches or self.name not in name or self.rank not in (None, rank):
            return False
        with self._lock:
            if self.skip > 0:
                self.skip -= 1
                return False
            if not self.times:
                return False
            self.times -= 1
            self.hits += 1
            return True

    def wait(self) -> None:
        """Do what a hit call does first: call `before`, wait for `hold`, sleep.

        Raises:
            TimeoutError: nobody has set `hold` within a minute.
        """
        if self.before is not None:
            self.before()
        if self.hold is not None and not self.hold.wait(60):
            raise TimeoutError(f"nobody released the held call {self.call}")
        time.sleep(self.delay)

    def release(self) -> None:
        """Let the calls that wait for `hold`, and all later ones, continue."""
        assert self.hold is not None
        self.hold.set()
