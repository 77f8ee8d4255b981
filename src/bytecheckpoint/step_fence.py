"""The fence between saves that copy in the background and the program that changes its state.

Parameters and optimizer state stand still until an optimizer steps (DataStates-LLM, arXiv 2406.10707, section 4.1). A save
with staging="background" copies them behind the caller's next forward and backward pass; all else that it saves, it copies
in the call. A hook of torch before the step of any optimizer waits until all such copies exist.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bytecheckpoint.calls import running_call
from bytecheckpoint.collectives.current import thread_scope
from bytecheckpoint.engine.device_copies import capturing
from bytecheckpoint.engine.pieces import SharedCopy
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, UsageError
from bytecheckpoint.threads import wait_for_any
from bytecheckpoint.tracing.operation import Operation, in_operation

__all__ = ["PendingCopy", "arm", "fence", "storage_identity", "wait_for_copies", "watch"]

_log = logging.getLogger("bytecheckpoint")
#: Packages whose optimizers change nothing before they have called their closure, which does forward and backward.
_CLOSURE_FIRST = ("torch.optim.", "apex.", "transformer_engine.", "bitsandbytes.", "torchao.")


@dataclass(frozen=True, eq=False, slots=True)
class PendingCopy:
    """The copy of one save, which is still being made.

    Attributes:
        staged: future, done when the copy exists or the save has failed.
        shared: copy in which those who wait for it take part.
        seconds: time for which a step of an optimizer waits, from the end of earlier saves on.
        error_of_change: function that returns an error if the state was changed already.
        give_up: function that fails the save with an error.
        operation: measurements of the save.
        scope: rank of the save, where several are threads of one process.
        guarded: identities of the memory of which Python accesses wait too.
        turn: future, done when the earlier saves have ended.
    """

    staged: Future[None]
    shared: SharedCopy
    seconds: float
    error_of_change: Callable[[], CheckpointError | None]
    give_up: Callable[[CheckpointError], object]
    operation: Operation
    scope: object
    guarded: frozenset[int] = frozenset()
    turn: Future[None] = field(default_factory=Future)

    @property
    def reads(self) -> frozenset[int]:
        """Identities of the memory of which Python accesses wait, as far as it is still read."""
        return self.guarded & self.shared.copied.result() if self.shared.copied.done() else self.guarded

    def spared_by(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Return whether the copy exists, and a step of the optimizer leaves alone what the save still reads."""
        copied = self.shared.copied
        return optimizer is not None and copied.done() and not _may_change(optimizer, copied.result())

    def wait(self, what: str, optimizer: torch.optim.Optimizer | None) -> CheckpointError | None:
        """Take part in the copy and wait for it; return an error if it does not succeed.

        Args:
            what: call that is about to change the states, for messages.
            optimizer: optimizer that is about to step; None if anything may change.
        """
        if (error := self.error_of_change()) is not None:
            return error
        wait_for_any([self.staged, self.turn])  # earlier saves have time limits of their own
        end = time.monotonic() + self.seconds
        copied = self.shared.copied
        if wait_for_any([self.staged, self.shared.begun, copied], self.seconds):
            self.shared.take_part()
            wait_for_any([self.staged, copied], end - time.monotonic())
            if self.spared_by(optimizer) or wait_for_any([self.staged], end - time.monotonic()):
                return None
        return CheckpointTimeoutError(f"its copy in the background took more than {self.seconds:g} s, and {what} ran")


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class _Fence:
    """The copies of this process that are still being made.

    Attributes:
        untraced: function that calls a function with arguments. Inside of a compiled step torch would else compile what
            the fence runs.
    """

    def __init__(self) -> None:
        self.untraced = _call
        self._lock = threading.Lock()
        self._pending: list[PendingCopy] = []
        self._watchers: list[tuple[object, Callable[[], object]]] = []
        self._hooked = False
        self._guards = False

    def watch(self, look: Callable[[], object]) -> None:
        with self._lock:
            self._set_hook()
            self._watchers.append((thread_scope(), look))

    def call_watchers(self) -> None:
        """Call the functions of the calling thread's rank, once."""
        scope = thread_scope()
        with self._lock:
            own = [look for of, look in self._watchers if of is scope]
            self._watchers = [(of, look) for of, look in self._watchers if of is not scope]
        for look in own:
            look()

    def _set_hook(self) -> None:
        if not self._hooked:
            # Registered once and never removed: compiled steps are compiled anew when the hooks change.
            register_optimizer_step_pre_hook(_before_step)
            self._hooked = True
        if self.untraced is _call and "torch._dynamo" in sys.modules:  # as in every program with an optimizer
            self.untraced = torch.compiler.disable(_call)

    def arm(self, copy: PendingCopy) -> None:
        with self._lock:
            self._set_hook()
            if copy.guarded and not self._guards:
                _install_guard()
                self._guards = True
            self._pending = [one for one in self._pending if not one.staged.done()] + [copy]

    @property
    def idle(self) -> bool:
        """True if nothing can be pending, as nearly always."""
        return not self._pending and not self._watchers

    def pending(self) -> list[PendingCopy]:
        """Return the copies of the calling thread's rank that are still being made."""
        scope = thread_scope()
        with self._lock:
            self._pending = [one for one in self._pending if not one.staged.done()]
            return [one for one in self._pending if one.scope is scope]

    def forget(self) -> None:
        """Forget all copies, in a forked child: they are the parent's, and its threads are not here."""
        self._lock = threading.Lock()
        self._pending = []
        self._watchers = []


_fence = _Fence()
os.register_at_fork(after_in_child=_fence.forget)


def arm(copy: PendingCopy) -> None:
    """Let the next step of any optimizer, and every other fence, wait for a copy."""
    _fence.arm(copy)


def watch(look: Callable[[], object]) -> None:
    """Call a function once, in this rank's thread, at the next fence: before a step changes the state."""
    _fence.watch(look)


def fence() -> None:
    """Wait until no save copies this process's state in the background any more.

    Call it before your own code changes what a save with `staging="background"` was given: updates without a
    torch.optim.Optimizer, weight swaps, offloading. The step of an optimizer, `load` and `handle.staged.result()` wait by
    themselves. Without such a save it returns at once. A copy that takes longer than the save's time-out fails that save,
    not this call.

    Raises:
        UsageError: it was called inside another call, by a hook or a done-callback, and a copy is being made.
    """
    if _fence.idle:
        return
    if _fence.pending() and (call := running_call()) is not None:
        raise UsageError(f"fence was called inside of {call}, which the copy may need: call it after that has returned")
    _fence.untraced(wait_for_copies, "fence")


def wait_for_copies(what: str, inside: str | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Wait for the copies of all pending saves. A save whose copy takes too long fails; this never raises.

    Args:
        what: call that is about to change the states, for messages.
        inside: call of this package that this thread runs, and that a copy may wait for; None if there is none.
        optimizer: optimizer that is about to step; None if anything may change.
    """
    _fence.call_watchers()
    for copy in _fence.pending():
        error: CheckpointError | None
        begin = time.perf_counter()
        try:
            if copy.spared_by(optimizer):
                continue
            if inside is None:
                error = copy.wait(what, optimizer)
            else:
                error = UsageError(f"{what} ran inside of {inside}, before the copy in the background was made")
        except Exception as unexpected:  # noqa: BLE001  training continues
            error = CheckpointError(f"{what} could not wait for the copy: {type(unexpected).__name__}: {unexpected}")
        if inside is None:
            copy.operation.add("fence", begin, copy.shared.helped)
        if error is not None:
            _log.error("a save fails: %s", error)
            copy.give_up(error)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Wait before the step of any optimizer; never raise: training continues, and the save fails.

    A step with a closure runs forward and backward in it. Of optimizers that change nothing before that, the wait comes
    after the closure.

    Returns:
        The arguments of the step with a closure that waits; None where they stay.
    """
    return None if _fence.idle else _fence.untraced(_arguments_of_waiting_step, optimizer, args, kwargs)


def _arguments_of_waiting_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Wait, or let the closure of a step wait; see `_before_step`."""
    if capturing():
        return None
    what = f"{type(optimizer).__name__}.step"

    def waiting(closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            loss = closure()
            _fence.untraced(wait_for_copies, what, running_call(), optimizer)
            return loss

        return call

    if f"{type(optimizer).__module__}.".startswith(_CLOSURE_FIRST):
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": waiting(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], waiting(args[1]), *args[2:]), kwargs
    wait_for_copies(what, running_call(), optimizer)
    return None


def _may_change(optimizer: torch.optim.Optimizer, memory: frozenset[int]) -> bool:
    """Return whether a step may change memory: some was frozen in the call, and is trained now."""
    if not memory:
        return False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad or parameter.grad is not None:
                local = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
                if type(local) not in (torch.Tensor, torch.nn.Parameter) or storage_identity(local) in memory:
                    return True
    return False


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that all views of one memory share."""
    return int(_untyped_storage(tensor)._cdata)


_untyped_storage = torch.Tensor.untyped_storage
_TO_MEMORY = ("numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "data_ptr")


def _install_guard() -> None:
    """Let accesses to the memory of a tensor that is being copied wait. It stays: a class that changes often is slow."""
    tensor: Any = torch.Tensor
    data = tensor.data

    def get(self: torch.Tensor) -> Any:
        if not _fence.idle:
            _guard(self, "data")
        return data.__get__(self)

    tensor.data = property(get, data.__set__, doc=data.__doc__)
    for name in _TO_MEMORY:
        setattr(tensor, name, _guarded(name, getattr(tensor, name)))


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _fence.idle:
            _guard(self, name)
        return method(self, *args, **kwargs)

    return guarded


def _guard(tensor: torch.Tensor, name: str) -> None:
    """Wait if a tensor is being copied, except in threads and calls of this package, which may be those that copy."""
    if in_operation() or torch.compiler.is_compiling() or type(tensor).__module__.startswith("torch._subclasses"):
        return
    guarded = [copy.reads for copy in _fence.pending()]
    if any(guarded) and storage_identity(tensor) in frozenset().union(*guarded):
        _fence.untraced(wait_for_copies, f"an access to .{name} of a tensor")
