"""Notice that a job is about to be stopped: by a signal, a file, or a function."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from bytecheckpoint.errors import UsageError

__all__ = ["Preemption"]


@dataclass(frozen=True)
class Preemption:
    """Notices that the job is about to be stopped. A notice on one rank is enough.

    Attributes:
        signals: signals of the scheduler, such as (signal.SIGTERM, signal.SIGUSR1). The first signal also reaches the
            handler that the program has set before; the second one has its usual effect.
        file: path of a file whose existence means that the job is to stop.
        check: function that returns True when the job is to stop; called once a second in a thread of its own.
        grace: seconds between the notice and the end of the job. A save that would take longer than the rest of them is
            not begun, and the newest committed step stays the last one.
    """

    signals: Sequence[int] = (signal.SIGTERM,)
    file: str | os.PathLike[str] | None = None
    check: Callable[[], bool] | None = None
    grace: float = 30.0

    def __post_init__(self) -> None:
        if not self.grace > 0:
            raise UsageError(f"Preemption(grace={self.grace!r}): give a number of seconds above 0")

    @property
    def polls(self) -> bool:
        """True if `poll` must be called."""
        return self.file is not None or self.check is not None

    def poll(self) -> bool:
        """Return whether the file exists or the function returns True."""
        return (self.file is not None and os.path.exists(self.file)) or (self.check is not None and bool(self.check()))

    @contextlib.contextmanager
    def watching(self, notify: Callable[[], None]) -> Iterator[None]:
        """Handle the signals in a `with` block.

        Args:
            notify: function to call in the signal handler.

        Raises:
            UsageError: this is not the main thread, which alone may set signal handlers.
        """
        if self.signals and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals are handled in the main thread only: make the manager there, or pass "
                "preemption=Preemption(signals=(), check=...)"
            )
        before: dict[int, Any] = {}
        watcher = os.getpid()

        def handle(number: int, frame: FrameType | None) -> None:
            earlier = before[number]
            signal.signal(number, earlier)
            # A forked child has the handler too, and a program that has kept it may set it again after the end.
            if os.getpid() != watcher:
                signal.raise_signal(number)
                return
            notify()
            if callable(earlier) and earlier is not signal.default_int_handler:  # which would end the training now
                earlier(number, frame)

        for number in self.signals:
            before[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, handle)
        try:
            yield
        finally:
            watcher = 0
            for number, earlier in before.items():
                if signal.getsignal(number) is handle:
                    signal.signal(number, earlier)
