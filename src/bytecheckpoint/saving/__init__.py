"""Saving: the public calls. docs/architecture.md, "A save", describes the steps that follow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bytecheckpoint.arguments import (
    check_flags,
    check_metadata,
    check_selection,
    check_states,
    settings_with_timeout,
)
from bytecheckpoint.calls import one_at_a_time
from bytecheckpoint.collectives import current
from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.registry import resolve as resolve_framework
from bytecheckpoint.frameworks.selection import Selection
from bytecheckpoint.frameworks.wrappers import unwrap_states
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.saving.call import SaveCall
from bytecheckpoint.saving.saver import Saver
from bytecheckpoint.saving.steps import check_step
from bytecheckpoint.settings import Settings
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage import resolve as resolve_storage
from bytecheckpoint.tiers.storage import hot_part, tier_of
from bytecheckpoint.tracing.operation import Operation
from bytecheckpoint.world import world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["prepare", "prepare_next", "save"]


@one_at_a_time
def save(
    path: str | os.PathLike[str] | Storage,
    states: Mapping[str, object],
    *,
    framework: str = "auto",
    async_checkpoint: bool = False,
    staging: str = "blocking",
    check_replicas: bool | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    names: Mapping[Any, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    step: int | None = None,
    process_group: ProcessGroup | None = None,
    timeout: float | None = None,
) -> SaveHandle:
    """Save `states` as one checkpoint. Every rank of the process group calls it (ByteCheckpoint, section 3.1).

    Args:
        path: folder or URL of the checkpoint, or its storage. An older checkpoint there is replaced atomically.
        states: name -> module, optimizer, list of them, anything with state_dict/load_state_dict, or nested
            dict/list/tuple of tensors and plain values. "model", "optimizer", "dataloader" and "extra_states" have
            their usual meaning; any other name may be added. Gradients are in no state_dict and are not saved: save
            after an optimizer step, not while gradients are being accumulated.
        framework: "auto", or one of the names that an unknown name's error lists.
        async_checkpoint: return when the state is copied ("staged"), and write in the background.
        staging: with async_checkpoint, "blocking" returns when staged, "background" at once: the caller then waits
            for `handle.staged` before it changes its state.
        check_replicas: which copies of replicated tensors are compared between ranks, before the commit. By default, a
            few elements of each parameter, and of its optimizer state, in the first save of a layout; True: the whole
            content of all tensors in this save; False: nothing. Copies on one rank (in several modules of a list, say) are
            always compared.
        include: patterns of what to save, such as ["model/*lora*", "optimizer/*"]; by default everything. Names are
            spelled as `open` spells them, and the wildcards are those of `fnmatch`. A parameter's optimizer state is
            selected as a whole, by "optimizer/FQN" or "optimizer/state/FQN/*", and its hyperparameters with it. A state
            that is neither a module nor an optimizer is selected as a whole, by its name. All ranks give the same
            patterns, and a pattern that matches nothing on any rank is an error.
        exclude: patterns of what not to save, of what `include` selects.
        names: parameter -> FQN (or FQN -> parameter), when an optimizer's module is not among `states`.
        metadata: the caller's own facts (plain JSON), stored in the catalog.
        step: the training step of the states. A save to which ranks bring different steps fails. By default the steps
            of the optimizers are compared; where these do not tell for all ranks, also schedulers, and "step" and the
            like among the plain values of a state, of a "dataloader" excepted.
        process_group: the ranks that save together; by default all.
        timeout: seconds that one step may wait for the other ranks; default `settings().timeout`.

    Returns:
        A handle. After a synchronous save it is done. To a `tier+...` path, `handle.restorable` is done, and the copy to
        the durable storage goes on in the background.

    Raises:
        UsageError: wrong arguments, or an object that cannot be represented, by name. Nothing was written.
        IncompatibleCheckpointError: copies of a tensor differ, or ranks disagree about a tensor, by name.
        StorageError: the storage refused (`StorageFullError`, `StorageUnavailableError`).
        PeerLostError, CheckpointTimeoutError: another rank is gone or hangs.
        CheckpointError: one of these on another rank, or in an earlier asynchronous save.

    Examples:
        >>> import tempfile, torch, bytecheckpoint
        >>> model = torch.nn.Linear(4, 2)
        >>> handle = bytecheckpoint.save(tempfile.mkdtemp() + "/step_1", {"model": model})
        >>> handle.result().bytes_written > 40
        True
    """
    settings, wrong = settings_with_timeout(timeout)
    storage = _resolved(path)

    def make_call() -> SaveCall:
        if wrong is not None:
            raise wrong
        check_flags(async_checkpoint=async_checkpoint)
        if check_replicas is not None:
            check_flags(check_replicas=check_replicas)
        compared = None if check_replicas is None else bool(check_replicas)
        if not isinstance(staging, str) or staging not in ("blocking", "background"):
            raise UsageError(f"staging={staging!r}: use 'blocking' or 'background'")
        if staging == "background" and not async_checkpoint:
            raise UsageError("staging='background' needs async_checkpoint=True")
        selected = check_selection(include, exclude)
        return _checked_call(storage, states, framework, names, selected, compared, settings, metadata, step)

    # `make_call` refuses other types than bool, after every rank has taken this call's number.
    asynchronous = isinstance(async_checkpoint, bool | np.bool_) and bool(async_checkpoint)
    background = asynchronous and isinstance(staging, str) and staging == "background"
    operation = Operation("save", "" if isinstance(storage, Exception) else storage.url)
    handle = SaveHandle(operation.path)
    handle.committed.add_done_callback(lambda _: operation.end())
    # Memory that is kept for later saves must not belong to the inference mode.
    with operation.running(), torch.inference_mode(False):
        world = world_of(current(process_group, timeout=settings.timeout))
        world.collector.begin(operation)
        handle.committed.add_done_callback(world.collector.observer(operation))
        tier = None if isinstance(storage, Exception) else tier_of(storage)
        saver = Saver(world, make_call, settings, operation)
        saver.save(handle, tier=tier, asynchronous=asynchronous, background=background)
    return handle


@one_at_a_time
def prepare(
    states: Mapping[str, object],
    *,
    framework: str = "auto",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    names: Mapping[Any, Any] | None = None,
    process_group: ProcessGroup | None = None,
    timeout: float | None = None,
) -> Future[None]:
    """Plan the saves of `states` and touch the staging pool, in the background, before the first save.

    Every rank of the process group calls it. A save that follows waits for it.

    Args:
        states: as for `save`.
        framework: as for `save`.
        include: as for `save`.
        exclude: as for `save`.
        names: as for `save`.
        process_group: as for `save`.
        timeout: as for `save`.

    Returns:
        A future, done when everything is ready. A failure is also logged, and the first save then plans for itself.
    """
    return prepare_next(states, framework, names, process_group, timeout, include, exclude)


def prepare_next(
    states: Mapping[str, object],
    framework: str,
    names: Mapping[Any, Any] | None,
    process_group: ProcessGroup | None,
    timeout: float | None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> Future[None]:
    """Prepare the next save, as `prepare`, from inside another public call."""
    settings, wrong = settings_with_timeout(timeout)

    def make_call() -> SaveCall:
        if wrong is not None:
            raise wrong
        # Nothing is written: the path must only be equal on all ranks, whatever their working directories.
        selected = check_selection(include, exclude)
        return _checked_call(_resolved("/"), states, framework, names, selected, None, settings, None)

    with torch.inference_mode(False):
        world = world_of(current(process_group, timeout=settings.timeout))
        return Saver(world, make_call, settings, Operation("prepare", "/")).prepare()


def _resolved(path: str | os.PathLike[str] | Storage) -> Storage | Exception:
    """Resolve a path. An error is returned, to be raised where all ranks can be told."""
    try:
        return resolve_storage(path)
    except Exception as error:  # noqa: BLE001  raised by `_checked_call`
        return error


def _checked_call(
    storage: Storage | Exception,
    states: Mapping[str, object],
    framework: str,
    names: Mapping[Any, Any] | None,
    selection: Selection,
    check_replicas: bool | None,
    settings: Settings,
    metadata: Mapping[str, Any] | None,
    step: object = None,
) -> SaveCall:
    """Check the arguments, and find the adapter and the storage to write to."""
    check_states(states, names)
    check_metadata(metadata)
    number = check_step(step)
    if isinstance(storage, Exception):
        raise storage
    storage = hot_part(storage)
    storage.timeout = settings.timeout
    states = unwrap_states(states)
    adapter = resolve_framework(framework, states)
    facts = dict(metadata or {})
    return SaveCall(storage, adapter, dict(states), names, selection, check_replicas, settings, facts, number)
