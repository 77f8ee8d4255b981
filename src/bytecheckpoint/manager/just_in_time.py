"""Just-in-time saves: after a rank is lost, the others save the step before ("Just-In-Time Checkpointing", EuroSys 2024).

Where parameters are replicated (DDP, HSDP), the ranks that are left hold everything between them: the step before the loss
is in their memory until the optimizer changes it. What a forward pass changes (buffers, random numbers, other states) is
copied at every step boundary, which is little. The position of a data loader, whose streams are lost with their rank, is
found again from the newest checkpoint: the loader is loaded from it, and feeds again what was fed since.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import nn

from bytecheckpoint.collectives import Collective, use
from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.errors import CheckpointError, PeerLostError, UsageError
from bytecheckpoint.frameworks.base import SupportsStreams
from bytecheckpoint.loading import load
from bytecheckpoint.manager.run_folder import RunFolder, by_age, step_folder
from bytecheckpoint.manager.survivors import Survivors
from bytecheckpoint.saving import save
from bytecheckpoint.settings import settings
from bytecheckpoint.threads import start

__all__ = ["JustInTime", "SupportsReplay"]

_log = logging.getLogger("bytecheckpoint")
_POLL_SECONDS = 0.1
#: A training that has been at one place of its program for so many seconds waits for the lost rank, or for one that does.
_STANDS_STILL = 2.0


@runtime_checkable
class SupportsReplay(Protocol):
    """A data loader (`SupportsStreams`) that can feed again what was fed.

    Attributes:
        batches: global batches that were taken so far.
    """

    batches: int

    def for_ranks(self, rank: int, ranks: int) -> Self:
        """Return a loader of the same data at its beginning, for one of other ranks."""

    def __next__(self) -> Any:
        """Feed the next batch."""


class _HeldBuffer:
    """A buffer of a module, and a copy of what it was.

    Args:
        buffers: of the module.
        name: of the buffer.
    """

    def __init__(self, buffers: MutableMapping[str, Any], name: str) -> None:
        self._buffers, self._name = buffers, name
        self._tensor: torch.Tensor = buffers[name]
        self._copy = self._tensor.detach().clone()

    def update(self) -> None:
        """Take a new copy. Always: kernels such as batch norm's change buffers without counting their version up."""
        tensor = self._buffers[self._name]
        if tensor is self._tensor:
            self._copy.copy_(tensor)
        else:
            self._tensor, self._copy = tensor, tensor.detach().clone()

    def restore(self) -> None:
        """Put the copy in the place of what is there."""
        self._buffers[self._name] = self._copy.clone()


class JustInTime:
    """Notes what a step boundary leaves behind, and saves it when a rank is lost. Use as a context manager.

    Args:
        states: of the manager.
        collective: all ranks of the job.
        tag: as for `Survivors`.
        folder: of the run.
        options: of `save`, without those that say when it returns.
        committed: waits for the save in flight, and returns the newest step that this rank knows to be committed.
        claim: called with a step on the rank that is the first of those that save it.
        handles_sigterm: as for `Survivors`.

    Raises:
        UsageError: there is a state whose last boundary cannot be known.
    """

    def __init__(
        self,
        states: MutableMapping[str, Any],
        collective: Collective,
        tag: str,
        folder: RunFolder,
        options: Mapping[str, Any],
        committed: Callable[[], int],
        claim: Callable[[int], None],
        *,
        handles_sigterm: bool,
    ) -> None:
        self._states, self._collective, self._folder, self._options = states, collective, folder, dict(options)
        self._committed, self._claim = committed, claim
        self._survivors = Survivors(collective, tag, handles_sigterm=handles_sigterm)
        self._stack = ExitStack()
        self._thread = threading.get_ident()  # of the training
        self._stopped, self._over, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._saving = False
        self._step = 0
        self._metadata: Callable[[], Mapping[str, Any]] = dict
        self._begun = self._done = self._done_at_boundary = 0  # steps of optimizers
        self._held: dict[str, Any] = {}  # by state
        self._buffers: list[_HeldBuffer] | None = None
        self._batches: dict[str, int] = {}  # by state
        for state, value in states.items():
            _check(state, value)

    def __enter__(self) -> Self:
        self._stack.enter_context(self._survivors)
        for optimizer in self._all(torch.optim.Optimizer):
            self._stack.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            self._stack.callback(optimizer.register_step_post_hook(self._after_step).remove)
        start(threading.Thread(target=self._run, name="bytecheckpoint-just-in-time", daemon=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Watch no more: from now on the other ranks may end."""
        self._over.set()
        self._stack.close()

    def _before_step(self, *_: Any) -> None:
        if self._saving:
            raise PeerLostError(f"{names_of_ranks(self._survivors.lost)} is lost, and the step before is being saved")
        self._begun += 1

    def _after_step(self, *_: Any) -> None:
        self._done += 1

    def _all(self, kind: type[Any]) -> list[Any]:
        values = (value if isinstance(value, list | tuple) else [value] for value in self._states.values())
        return [value for several in values for value in several if isinstance(value, kind)]

    # --- at every boundary ----------------------------------------------------------------------------------------

    def note(self, step: int, metadata: Callable[[], Mapping[str, Any]]) -> None:
        """Note what the next step may change before its end.

        Args:
            step: number of steps that are done.
            metadata: returns facts for the checkpoint.
        """
        self._step, self._metadata, self._done_at_boundary = step, metadata, self._done
        for state, value in self._states.items():
            if isinstance(value, SupportsReplay):
                self._batches[state] = value.batches
            elif _is_small(value):
                self._held[state] = copy.deepcopy(value.state_dict() if _has_state(value) else value)
        if self._buffers is None:
            self._buffers = [held for module in self._all(nn.Module) for held in _buffers_of(module)]
        with torch.no_grad():
            for held in self._buffers:
                held.update()

    # --- after a loss ---------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for the save after a loss, if there is one. Called when an exception ends the training."""
        if self._survivors.wait_for_loss():
            self._stopped.set()
            self._ended.wait(settings().timeout)

    def _run(self) -> None:
        """Wait for a loss and until the training stands still, and save. Runs on a thread of its own.

        Perhaps the training's thread never gets an exception: it may wait for a rank that is left, and waits here.
        """
        while not self._survivors.lost:
            if self._over.wait(_POLL_SECONDS):
                return
        place, since = _place_of(self._thread), time.monotonic()
        while not self._stopped.wait(_POLL_SECONDS) and time.monotonic() < since + _STANDS_STILL:
            if self._over.is_set():
                return
            if (now := _place_of(self._thread)) != place:
                place, since = now, time.monotonic()
        try:
            self._rescue()
        except Exception as error:  # noqa: BLE001  the exception of the training is on its way
            _log.error("rank %d: no step was saved just in time: %s", self._collective.rank, error)
        finally:
            self._ended.set()

    def _rescue(self) -> None:
        """Save the last boundary with the ranks that are left."""
        begun = time.monotonic()
        rank, lost = self._collective.rank, self._survivors.lost
        _log.warning("rank %d: %s: %s", rank, names_of_ranks(lost), next(iter(lost.values())))
        self._saving = True
        intact = self._begun == self._done == self._done_at_boundary
        if not intact:
            _log.warning("rank %d has changed its parameters since step %d: others must save it", rank, self._step)
        committed = self._committed()
        # Below 1: nothing newer than this.
        met = self._survivors.meet(self._step if intact and self._step > committed else -committed)
        newest = -min(0, *met.values())
        why = ""
        for step in sorted({fact for fact in met.values() if fact > newest}, reverse=True):
            members = sorted(other for other, fact in met.items() if fact == step)
            if rank not in members:
                why = self._survivors.hear(f"outcome of {step}", settings().timeout)
            else:
                why = self._save(step, members)
                if rank == members[0]:
                    self._survivors.tell(f"outcome of {step}", why)
            if not why:
                seconds = time.monotonic() - begun
                _log.warning("%s saved step %d in %.1f s, just in time", names_of_ranks(members), step, seconds)
                return
        if why:
            raise CheckpointError(why)

    def _save(self, step: int, members: list[int]) -> str:
        """Save a step with some ranks; return why that failed, or ""."""
        try:
            if self._collective.rank == members[0]:
                self._claim(step)
            self._go_back()
            with use(self._survivors.connect(members, f"world of {step}", settings().timeout)) as collective:
                states = {
                    state: self._at_boundary(state, value, step, collective) for state, value in self._states.items()
                }
                metadata = {**self._options.get("metadata", {}), **self._metadata()}
                options = {**self._options, "metadata": metadata, "step": step}
                save(
                    step_folder(self._folder.url, step), states, **options
                ).result()  # of a tier: also in the durable one
        except Exception as error:  # noqa: BLE001  an older boundary may do
            return str(error) or repr(error)
        return ""

    def _go_back(self) -> None:
        """Set what the training has changed since the boundary back."""
        for state, held in self._held.items():
            if _has_state(self._states[state]):
                self._states[state].load_state_dict(held)
            else:
                self._states[state] = held
        for buffer in self._buffers or ():
            buffer.restore()

    def _at_boundary(self, state: str, value: Any, step: int, collective: Collective) -> Any:
        """Return a state as the ranks that are left save it: they hold all its streams between them."""
        if not hasattr(value, "for_ranks"):
            return value
        again = value.for_ranks(collective.rank, collective.world_size)
        if state not in self._batches:
            return again
        older = [info.step for info in by_age(self._folder.steps()) if info.step <= step]
        told = json.dumps(older[-1:]).encode() if collective.rank == 0 else None
        for number in json.loads(collective.broadcast(f"just in time/{state}", told, timeout=settings().timeout)):
            load(step_folder(self._folder.url, number), {state: again})
        if again.batches > self._batches[state]:
            raise UsageError(
                f"the loader had taken {self._batches[state]} batches, and {again.batches} at the save before"
            )
        while again.batches < self._batches[state]:
            next(again)
        return again


def _buffers_of(module: nn.Module) -> Iterator[_HeldBuffer]:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield _HeldBuffer(part._buffers, name)


def _place_of(thread: int) -> object:
    """Return where a thread is in the program."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else (id(frame), frame.f_lasti)


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _is_small(value: Any) -> bool:
    """Whether a state is none of modules and optimizers, whose tensors stay until an optimizer steps."""
    several = value if isinstance(value, list | tuple) and value else [value]
    return not all(isinstance(each, nn.Module | torch.optim.Optimizer) for each in several)


def _feeds_data(state: str, value: Any) -> bool:
    """Whether a state is a data loader, whose state is a part of the data of all ranks."""
    iterates = _has_state(value) and hasattr(value, "__iter__") and not isinstance(value, nn.Module | Mapping)
    return state == "dataloader" or isinstance(value, SupportsStreams) or iterates


def _check(state: str, value: Any) -> None:
    if state == "optimizer":
        for each in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(each, torch.optim.Optimizer):
                raise UsageError(
                    f"just_in_time=True: states[{state!r}] is a {type(each).__name__}, and only optimizers of torch tell "
                    "when they change the parameters"
                )
    elif _feeds_data(state, value) and not hasattr(value, "for_ranks"):
        raise UsageError(
            f"just_in_time=True: states[{state!r}] is a {type(value).__name__}, which cannot feed again what a lost rank "
            "has taken: it needs the method for_ranks, as TokenBufferLoader has"
        )
