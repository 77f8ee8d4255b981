"""The fence between saves that copy in the background and the program that changes its state.

Parameters and optimizer state stand still until an optimizer steps (DataStates-LLM, arXiv 2406.10707, section 4.1). A save
with staging="background" copies them behind the caller's next forward and backward pass; all else that it saves, it copies
in the call. A hook of torch before the step of any optimizer waits until all such copies exist.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bytecheckpoint.calls import running_call
from bytecheckpoint.collectives.current import thread_scope
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, UsageError
from bytecheckpoint.threads import wait_for_any

__all__ = ["PendingCopy", "arm", "fence", "wait_for_copies"]

_log = logging.getLogger("bytecheckpoint")


@dataclass(frozen=True, eq=False, slots=True)
class PendingCopy:
    """The copy of one save, which is still being made.

    Attributes:
        staged: future, done when the copy exists or the save has failed.
        seconds: time for which a step of an optimizer waits for it.
        give_up: fails the save with an error.
        scope: the rank of the save, where several are threads of one process.
    """

    staged: Future[None]
    seconds: float
    give_up: Callable[[CheckpointError], object]
    scope: object


class _Fence:
    """The copies of this process that are still being made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[PendingCopy] = []
        self._hooked = False

    def arm(self, copy: PendingCopy) -> None:
        with self._lock:
            if not self._hooked:
                # Registered once and never removed: compiled steps are compiled anew when the hooks change.
                register_optimizer_step_pre_hook(_before_step)
                self._hooked = True
            self._pending = [one for one in self._pending if not one.staged.done()] + [copy]

    def pending(self) -> list[PendingCopy]:
        """Return the copies of the calling thread's rank that are still being made."""
        if not self._pending:  # as nearly always, without the lock
            return []
        scope = thread_scope()
        with self._lock:
            self._pending = [one for one in self._pending if not one.staged.done()]
            return [one for one in self._pending if one.scope is scope]

    def forget(self) -> None:
        """Forget all copies, in a forked child: they are the parent's, and its threads are not here."""
        self._lock = threading.Lock()
        self._pending = []


_fence = _Fence()
os.register_at_fork(after_in_child=_fence.forget)


def arm(copy: PendingCopy) -> None:
    """Let the next step of any optimizer, and every other fence, wait for a copy."""
    _fence.arm(copy)


def fence() -> None:
    """Wait until no save copies this process's state in the background any more.

    Call it before your own code changes what a save with `staging="background"` was given: updates without a
    torch.optim.Optimizer, weight swaps, offloading. The step of an optimizer, `load` and `handle.staged.result()` wait by
    themselves. Without such a save it returns at once. A copy that takes longer than the save's time-out fails that save,
    not this call.

    Raises:
        UsageError: it was called inside another call, by a hook or a done-callback, and a copy is being made.
    """
    if _fence.pending() and (call := running_call()) is not None:
        raise UsageError(f"fence was called inside of {call}, which the copy may need: call it after that has returned")
    wait_for_copies("fence")


def wait_for_copies(what: str, inside: str | None = None) -> None:
    """Wait for the copies of all pending saves. A save whose copy takes too long fails; this never raises.

    Args:
        what: call that is about to change the states, for messages.
        inside: call of this package that this thread runs, and that a copy may wait for; None if there is none.
    """
    for copy in _fence.pending():
        if inside is None and wait_for_any([copy.staged], copy.seconds):
            continue
        error: CheckpointError
        if inside is None:
            error = CheckpointTimeoutError(
                f"its copy in the background took more than {copy.seconds:g} s, and {what} ran"
            )
        else:
            error = UsageError(f"{what} ran inside of {inside}, before the copy in the background was made")
        _log.error("a save fails: %s", error)
        copy.give_up(error)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Wait before the step of any optimizer; never raise: training continues, and the save fails."""
    if _fence.pending():
        wait_for_copies(f"{type(optimizer).__name__}.step", running_call())
