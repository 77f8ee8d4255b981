"""Notice that a job is about to be stopped: by a signal, a file, or a function."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager.rules import is_real
from bytecheckpoint.threads import start

__all__ = ["Preemption", "PreemptionWatch"]

_log = logging.getLogger("bytecheckpoint")
#: Seconds between two looks for the file or calls of the function.
_POLL_SECONDS = 1.0
#: Signals of one number that are one notice. Slurm and Kubernetes send SIGTERM to all processes of a job, and torchrun
#: passes its own on to the ranks, which have it already.
_ONE_NOTICE = 2


@dataclass(frozen=True)
class Preemption:
    """Notices that the job is about to be stopped. A notice on one rank is enough.

    Attributes:
        signals: signals of the scheduler, such as (signal.SIGTERM, signal.SIGUSR1). The first signal also reaches the
            handler that the program has set before. A second one within `grace` is the same notice, because launchers pass
            on what their ranks get too; a third one, or one after `grace`, has its usual effect.
        file: path of a file whose existence means that the job is to stop. It stops each later job too, until a person
            removes it.
        check: function that returns True when the job is to stop; called once a second in a thread of its own.
        grace: seconds between the notice and the end of the job. A save that would take longer than the rest of them is
            not begun, and the newest committed step stays the last one.
    """

    signals: Collection[int] = (signal.SIGTERM,)
    file: str | os.PathLike[str] | None = None
    check: Callable[[], bool] | None = None
    grace: float = 30.0

    def __post_init__(self) -> None:
        if not is_real(self.grace) or not self.grace > 0:
            raise UsageError(f"Preemption(grace={self.grace!r}): give a number of seconds above 0")
        if not isinstance(self.signals, Collection) or not all(isinstance(one, int) for one in self.signals):
            raise UsageError(f"Preemption({self.signals!r}): give a list of signals, such as [signal.SIGTERM]")
        if self.check is not None and not callable(self.check):
            raise UsageError(f"Preemption(check={self.check!r}): give a function without arguments")


class PreemptionWatch:
    """Calls a function at each notice that the job is about to be stopped. Use it as a context manager.

    Args:
        preemption: sources of the notices.
        notify: function to call, in a signal handler or in a thread.

    Raises:
        UsageError: this is not the main thread, which alone may set signal handlers.
    """

    def __init__(self, preemption: Preemption, notify: Callable[[], None]) -> None:
        if preemption.signals and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals are handled in the main thread only: make the manager there, or pass "
                "preemption=Preemption(signals=(), check=...)"
            )
        self._preemption, self._notify_manager = preemption, notify
        self._before: dict[int, Any] = {}  # handlers by signal
        self._heard: dict[int, list[float]] = {}  # times of the signals, by `time.monotonic`
        self._process = os.getpid()
        self._noticed = 0.0  # by `time.monotonic`
        self._ended = threading.Event()

    def deadline(self) -> float:
        """Return the end of the grace period after the last notice on this rank, or else from now, by `time.monotonic`."""
        return (self._noticed or time.monotonic()) + self._preemption.grace

    def __enter__(self) -> Self:
        for number in self._preemption.signals:
            self._before[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, self._on_signal)
        polls = self._preemption.file is not None or self._preemption.check is not None
        if polls and os.environ.get("LOCAL_RANK", "0") == "0":  # one process of each machine
            # In a thread of its own: a function that hangs must not keep this rank from answering others.
            start(threading.Thread(target=self._poll, name="bytecheckpoint-poll", daemon=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._process = 0
        for number, before in self._before.items():
            # Equal, not identical: each access makes a new bound method.
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)

    def _notify(self) -> None:
        self._noticed = time.monotonic()
        self._notify_manager()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before, heard = self._before[number], self._heard.setdefault(number, [])
        heard.append(time.monotonic())
        late = len(heard) > _ONE_NOTICE or heard[-1] > heard[0] + self._preemption.grace
        # A forked child has the handler too, and a program that has kept it may set it again after the end.
        if late or os.getpid() != self._process:
            signal.signal(number, before)
            signal.raise_signal(number)
        elif len(heard) == 1:
            self._notify()
            if callable(before) and before is not signal.default_int_handler:  # which would end the training now
                before(number, frame)

    def _poll(self) -> None:
        file, check, before = self._preemption.file, self._preemption.check, False
        while not self._ended.wait(_POLL_SECONDS):
            try:
                found = file is not None and os.path.exists(file)
                now = found or (check is not None and bool(check()))
            except (Exception, SystemExit) as error:  # noqa: BLE001  of the caller's function
                _log.warning("the function that reports a preemption failed: %r", error)
                continue
            if now and not before:
                if found:
                    _log.warning("%s exists, so the job is to stop: remove it, or each later job stops too", file)
                self._notify()
            before = now
