"""Save the last step with the surviving ranks after a rank is lost ("Just-In-Time Checkpointing", EuroSys 2024).

Where parameters are replicated (DDP, HSDP), the survivors hold everything between them: the step before the loss is in
their memory until the optimizer changes it. Buffers, random numbers and other small states, which a forward pass changes,
are copied at every step boundary. The streams of a data loader are lost with their rank. So the loader is loaded from the
newest checkpoint, and feeds again the batches that were fed since.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from bytecheckpoint.collectives import Collective, use
from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.errors import CheckpointError, PeerLostError, StorageFullError, UsageError, listed
from bytecheckpoint.frameworks.base import SupportsStreams
from bytecheckpoint.manager.last_boundary import LastBoundary, SupportsReplay, all_of, has_state
from bytecheckpoint.manager.run_folder import step_folder
from bytecheckpoint.manager.saves import RunSaves
from bytecheckpoint.manager.survivors import Survivors
from bytecheckpoint.saving import save
from bytecheckpoint.settings import settings
from bytecheckpoint.threads import start

__all__ = ["JustInTime", "SupportsReplay"]

_log = logging.getLogger("bytecheckpoint")
_POLL_SECONDS = 0.1
#: Seconds that the save in flight has to end after the loss of a rank.
_RESCUE_SECONDS = 10.0
#: Seconds at one place of the program after which a training counts as waiting for the lost rank.
_STANDS_STILL = 2.0


class JustInTime:
    """Notes the state of each step boundary, and saves it when a rank is lost. Use it as a context manager.

    Args:
        run: saves of the run.
        collective: all ranks of the job.
        tag: name of the survivors' conversation, never used twice in one world.
        handles_sigterm: True if this object may handle SIGTERM.

    Raises:
        UsageError: the last boundary of a state cannot be known.
    """

    def __init__(self, run: RunSaves, collective: Collective, tag: str, *, handles_sigterm: bool) -> None:
        for state, value in run.states.items():
            _check(state, value)
        self._run, self._collective = run, collective
        self._survivors = Survivors(collective, tag, handles_sigterm=handles_sigterm)
        self._boundary = LastBoundary(run)
        self._steps = _OptimizerSteps(self._survivors, self._boundary.look)
        self._stack = ExitStack()
        self._training_thread = threading.get_ident()
        self._stopped, self._over, self._ended = threading.Event(), threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._survivors)
        for optimizer in all_of(self._run.states, torch.optim.Optimizer):
            self._stack.callback(optimizer.register_step_pre_hook(self._steps.begin).remove)
            self._stack.callback(optimizer.register_step_post_hook(self._steps.end).remove)
        start(threading.Thread(target=self._watch, name="bytecheckpoint-just-in-time", daemon=True))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Watch no more: from now on the other ranks may end."""
        self._over.set()
        self._stack.close()

    def note(self, step: int, metadata: Callable[[], Mapping[str, Any]]) -> None:
        """Note everything that the next step may change before its end.

        Args:
            step: number of steps that are done.
            metadata: function that returns facts for the checkpoint.
        """
        self._steps.note()
        self._boundary.note(step, metadata)

    def wait(self, error: Exception) -> None:
        """Wait for the save after a loss, or behind an exception of the program on all ranks.

        Args:
            error: exception that ends the training. A failure of this package is the reason of a loss, or not to save.
        """
        own = isinstance(error, CheckpointError)
        if self._survivors.wait_for_loss() or (not own and self._survivors.wait_for_all()):
            self._stopped.set()
            self._ended.wait(settings().timeout)

    def _watch(self) -> None:
        """Wait for a loss and until the training stands still, and save. Runs on a thread of its own.

        The training's thread may never get an exception, because it waits for a rank that survives and waits here.
        """
        while not self._survivors.lost and not self._stopped.is_set():
            if self._over.wait(_POLL_SECONDS):
                return
        place, since = _place_of(self._training_thread), time.monotonic()
        while not self._stopped.wait(_POLL_SECONDS) and time.monotonic() < since + _STANDS_STILL:
            if self._over.is_set():
                return
            now = _place_of(self._training_thread)
            if now != place:
                place, since = now, time.monotonic()
        try:
            self._rescue()
        except Exception as error:  # noqa: BLE001  the exception of the training is on its way
            _log.error("rank %d: no step was saved just in time: %s", self._collective.rank, error)
        finally:
            self._ended.set()

    def _rescue(self) -> None:
        """Save the last boundary with the surviving ranks."""
        begun = time.monotonic()
        rank, lost = self._collective.rank, self._survivors.lost
        reason = f"{names_of_ranks(lost)}: {next(iter(lost.values()))}" if lost else "an exception ends the training"
        _log.warning("rank %d: %s", rank, reason)
        step = self._boundary.step
        intact = self._steps.stop()
        if not intact:
            _log.warning("rank %d has changed its parameters since step %d: others must save it", rank, step)
        elif changed := self._boundary.changed():
            intact = False
            _log.warning(
                "rank %d: %s changed since step %d, and not by a step of an optimizer: others must save it",
                rank, listed(changed), step,
            )  # fmt: skip
        with suppress(CheckpointError):  # the save in flight fails soon after the loss of a rank
            self._run.wait(_RESCUE_SECONDS if lost else settings().timeout)
        committed = self._run.committed
        # A rank that holds a step reports its number, a rank that holds none the negative number of the committed step.
        held = self._survivors.agree(step if intact and step > committed else -committed)
        newest = -min(0, *held.values())
        failure = ""
        for candidate in sorted({value for value in held.values() if value > newest}, reverse=True):
            members = sorted(other for other, value in held.items() if value == candidate)
            if rank in members:
                failure = self._save(candidate, members)
                if rank == members[0]:
                    self._survivors.publish(f"outcome of {candidate}", failure)
                    if not failure:
                        self._run.keeper.call_functions(candidate)
            else:
                failure = self._survivors.receive(f"outcome of {candidate}", settings().timeout)
            if not failure:
                seconds = time.monotonic() - begun
                _log.warning("%s saved step %d in %.1f s, just in time", names_of_ranks(members), candidate, seconds)
                return
        if failure:
            raise CheckpointError(failure)

    def _save(self, step: int, members: list[int]) -> str:
        """Save a step with some ranks; return why that failed, or ""."""
        try:
            if self._collective.rank == members[0]:
                self._run.keeper.claim(step)
            self._boundary.restore()
            with use(self._survivors.connect(members, f"world of {step}", settings().timeout)) as collective:
                states = self._boundary.states(step, collective)
                metadata = dict(self._boundary.metadata())
                options = replace(self._run.options, async_checkpoint=False, staging="blocking", metadata=metadata)
                folder = self._run.keeper.folder
                for again in (False, True):
                    try:
                        handle = save(step_folder(folder.url, step), states, step=step, **options.arguments())
                        handle.result()  # of a tier: also in the durable storage
                        handle.viewed.exception()  # its ranks do not meet again
                        break
                    except StorageFullError:  # on all of these ranks
                        if again:
                            raise
                        if self._collective.rank == members[0]:
                            folder.free_room()
        except Exception as error:  # noqa: BLE001  an older boundary may do
            return str(error) or repr(error)
        return ""


class _OptimizerSteps:
    """Counts the steps of optimizers, to know whether parameters have changed since the last boundary.

    Args:
        survivors: ranks that are left, for the error of a step during the save.
        before: function to call before the first step behind a boundary.
    """

    def __init__(self, survivors: Survivors, before: Callable[[], object]) -> None:
        self._survivors, self._before = survivors, before
        self._begun = self._done = self._done_at_boundary = 0
        self._stopped = False

    def begin(self, *_: Any) -> None:
        """Count a step that begins. Hook of optimizers.

        Raises:
            PeerLostError: the parameters are being saved.
        """
        if self._stopped:
            lost = names_of_ranks(self._survivors.lost)
            raise PeerLostError(f"{lost} is lost, and the step before is being saved")
        if self._begun == self._done_at_boundary:
            self._before()
        self._begun += 1

    def end(self, *_: Any) -> None:
        """Count a step that is done. Hook of optimizers."""
        self._done += 1

    def note(self) -> None:
        """Note a step boundary."""
        self._done_at_boundary = self._done

    def stop(self) -> bool:
        """Refuse further steps; return whether the parameters are those of the last boundary."""
        self._stopped = True
        return self._begun == self._done == self._done_at_boundary


def _place_of(thread: int) -> object:
    """Return the place of a thread in the program."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else (id(frame), frame.f_lasti)


def _feeds_data(state: str, value: Any) -> bool:
    """Return whether a state is a data loader, whose state is a part of the data of all ranks."""
    iterates = has_state(value) and hasattr(value, "__iter__") and not isinstance(value, nn.Module | Mapping)
    return state == "dataloader" or isinstance(value, SupportsStreams) or iterates


def _check(state: str, value: Any) -> None:
    if state == "optimizer":
        for each in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(each, torch.optim.Optimizer):
                raise UsageError(
                    f"just_in_time=True: states[{state!r}] is a {type(each).__name__}, and only optimizers of torch "
                    "report when they change the parameters"
                )
    elif _feeds_data(state, value) and not hasattr(value, "for_ranks"):
        raise UsageError(
            f"just_in_time=True: states[{state!r}] is a {type(value).__name__}, which cannot feed again the batches of "
            "a lost rank: it needs the method for_ranks, as TokenBufferLoader has"
        )
