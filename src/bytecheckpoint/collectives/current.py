"""The collective of a call: the override of a `with use(...)` block, or the one of a process group."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.single import SingleProcess
from bytecheckpoint.collectives.transport import loop
from bytecheckpoint.errors import CheckpointTimeoutError, UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["current", "thread_scope", "use"]

_override: ContextVar[Collective | None] = ContextVar("bytecheckpoint_collective", default=None)


class _GroupCollective:
    """The collective of one process group, once its ranks are connected.

    Attributes:
        lock: lock that the thread of the first call holds until all ranks are connected. No other group waits for it.
        collective: the collective, None before that.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.collective: Collective | None = None


class _State:
    """The collectives of this process. A forked child starts with a new state.

    Args:
        inherited: in a forked child, the default process group of its parent, which the child cannot use.
    """

    def __init__(self, inherited: object = None) -> None:
        self.lock = threading.Lock()  # held for a moment only, never while ranks are waited for
        self._single: SingleProcess | None = None
        # Weak keys: the collective of a group that is gone goes too, unless a background commit still refers to it.
        self.by_group: weakref.WeakKeyDictionary[Any, _GroupCollective] = weakref.WeakKeyDictionary()
        self.inherited = inherited

    @property
    def single(self) -> SingleProcess:
        """The collective of this process alone."""
        # Not before it is asked for: it asks for the machine's name, which may change after an import.
        with self.lock:
            if self._single is None:
                self._single = SingleProcess()
            return self._single


_state = _State()


def _default_group() -> Any:
    """Return the default process group, or None, without importing torch."""
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


def _after_fork_in_child() -> None:
    global _state  # noqa: PLW0603 (one process-wide value, replaced whole)
    loop.release_inherited()
    _state = _State(_default_group())


@contextmanager
def use(collective: Collective) -> Iterator[Collective]:
    """Let `current` return `collective` in this thread inside the `with` block."""
    token = _override.set(collective)
    try:
        yield collective
    finally:
        _override.reset(token)


def thread_scope() -> object:
    """Return the identity of this thread's rank, where ranks are threads of one process; None in other threads."""
    return _override.get()


def current(process_group: ProcessGroup | None = None, *, timeout: float = 300.0) -> Collective:
    """Return the collective of this call.

    Args:
        process_group: the ranks that take part; None: all ranks of the default group. The first call for a group is a
            collective operation: all its ranks must make it, each in its foreground thread.
        timeout: seconds that this first call may wait for the other ranks.

    Returns:
        The collective that `use` has set in this thread. Else, without torch.distributed or in a group of one rank, a
        `SingleProcess`. Else the collective of the group, created by the first call.

    Raises:
        UsageError: this rank is not in the group, or this is a forked child of a rank.
        PeerLostError, CheckpointTimeoutError: not all ranks of the group could be reached.
    """
    override = _override.get()
    if override is not None:
        return override
    state = _state
    default = _default_group()
    if default is None and process_group is not None:
        raise UsageError("a process group was given, but torch.distributed is not initialized (any more)")
    group = process_group if process_group is not None else default
    if group is None:
        return state.single
    import torch.distributed as dist

    if default is state.inherited:
        if dist.get_world_size() == 1:
            return state.single
        raise UsageError(
            f"this is a forked child (pid {os.getpid()}) of a rank of a distributed job: it cannot save or load "
            "with the job's ranks; do so in the parent, or start the child with the 'spawn' method"
        )
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"process_group= is of type {type(group).__name__}: give a torch.distributed process group")
    if outside or dist.get_rank(group) < 0:
        raise UsageError(f"rank {dist.get_rank()} is not in the process group that was given")
    if dist.get_world_size(group) == 1:
        return state.single
    with state.lock:
        if group not in state.by_group:
            _drop_destroyed(state)
            state.by_group[group] = _GroupCollective()
        found = state.by_group[group]
    with _locked(found.lock, timeout):
        if found.collective is None:
            from bytecheckpoint.collectives.store_collective import collective_of_group

            found.collective = collective_of_group(group, timeout=timeout)
        return found.collective


@contextmanager
def _locked(lock: threading.Lock, timeout: float) -> Iterator[None]:
    """Hold the lock of a group, which another thread's first call holds until all its ranks are connected."""
    if not lock.acquire(timeout=timeout):
        raise CheckpointTimeoutError(
            f"another thread has not connected the ranks of this process group in {timeout:g} s"
        )
    try:
        yield
    finally:
        lock.release()


def _drop_destroyed(state: _State) -> None:
    """Forget the collectives of destroyed groups that something still refers to, as torch's caches of DTensors do."""
    import torch.distributed as dist

    for group in list(state.by_group):
        try:
            dist.get_process_group_ranks(group)
        except KeyError:
            del state.by_group[group]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
# Before this hook runs, executors and ordinary threads have finished, and so have the hooks of modules that import this
# one. The hook delivers the messages that they sent last.
atexit.register(loop.leave_all)
