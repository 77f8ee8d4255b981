"""Save and prepare: the public calls. docs/architecture.md, "A save", describes the steps that follow."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from bytecheckpoint.arguments import check_flags, check_metadata, checked, settings_with_timeout, value_of
from bytecheckpoint.calls import one_at_a_time
from bytecheckpoint.collectives import current
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.saving.request import (
    CheckReplicas,
    RequestedStates,
    SaveMode,
    SaveRequest,
    check_extent,
    check_mode,
    check_target,
)
from bytecheckpoint.saving.runner import follow_with_view, run_prepare, run_save
from bytecheckpoint.saving.step_view import StepView
from bytecheckpoint.saving.steps import check_step, steps_of_objects
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage.deltas.writing import is_published
from bytecheckpoint.tracing.operation import Operation
from bytecheckpoint.world import world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["prepare", "prepare_next", "save"]

_log = logging.getLogger("bytecheckpoint")


@one_at_a_time
def save(
    path: str | os.PathLike[str] | Storage,
    states: Mapping[str, object],
    *,
    framework: str = "auto",
    async_checkpoint: bool = False,
    staging: str = "blocking",
    check_replicas: CheckReplicas | bool = "sampled",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    names: Mapping[Any, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    step: int | None = None,
    incremental: bool | Literal["full"] = False,
    view: StepView | None = None,
    process_group: ProcessGroup | None = None,
    timeout: float | None = None,
) -> SaveHandle:
    """Save `states` as one checkpoint. Every rank of the process group calls it (ByteCheckpoint, section 3.1).

    Args:
        path: folder or URL of the checkpoint, or its storage. An older checkpoint there is replaced atomically.
        states: live objects by name: module, optimizer, list of them, any object with state_dict/load_state_dict, or nested
            dict/list/tuple of tensors and plain values. "model", "optimizer", "dataloader" and "extra_states" have
            their usual meaning; any other name may be added. Gradients are in no state_dict and are not saved: save
            after an optimizer step, not while gradients are being accumulated.
        framework: "auto", or one of the names that an unknown name's error lists.
        async_checkpoint: True to return when the state is copied ("staged"), and write in the background.
        staging: point at which an asynchronous save returns: "blocking" when all is staged, "background" when it holds
            what may change at any time. Parameters and optimizer state are then staged in the background, and the next step
            of any optimizer waits for that; before other changes of them, call `fence`.
        check_replicas: extent to which copies of replicated tensors are compared between ranks before the commit.
            "sampled": a few elements of each parameter, and of its optimizer state, in the first save of a layout; one of
            copies that drifted apart by rounding is saved. "full", or True: the whole content of all tensors in this save,
            without any difference. "off", or False: nothing. Copies on one rank (in several modules of a list, say) are
            always compared.
        include: patterns of names to save, such as ["model/*lora*", "optimizer/*"]; by default everything. Names are
            spelled as `open` spells them, and the wildcards are those of `fnmatch`. A parameter's optimizer state is
            selected as a whole, by "optimizer/FQN" or "optimizer/state/FQN/*", and its hyperparameters with it. A state
            that is neither a module nor an optimizer is selected as a whole, by its name. All ranks give the same
            patterns, and a pattern that matches nothing on any rank is an error.
        exclude: patterns of names to leave out of the selected ones.
        names: parameter -> FQN (or FQN -> parameter), when an optimizer's module is not among `states`.
        metadata: facts of the caller (plain JSON), stored in the catalog.
        step: training step of the states. A save to which ranks bring different steps fails. By default the steps of the
            optimizers are compared. If these do not decide it for all ranks, so are schedulers, and "step" and similar
            names among the plain values of a state other than "dataloader".
        incremental: True to keep frozen parameters (`requires_grad=False`) in files of their own. Such a file of the last
            save, or of the loaded checkpoint, gets a second name (a hard link) in this one if the parameters still have
            its bytes. Otherwise it is written. A checkpoint never needs another one. "full" writes all these files, for
            later saves to share, and shares nothing with earlier ones. All ranks give the same.
        view: files by which another program reads the step as it is: `HuggingFaceView()` for `from_pretrained`. All ranks
            give the same.
        process_group: ranks that save together; by default all.
        timeout: seconds that one step may wait for the other ranks; default `settings().timeout`.

    Returns:
        A handle. After a synchronous save it is done. After one to a `tier+...` path, `handle.restorable` is done, and the
        copy to the durable storage continues in the background.

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
    target = checked(lambda: check_target(path, settings))
    if isinstance(target, Storage) and is_published(target):
        settings = replace(settings, fingerprint=True)  # by which followers prove what they changed

    def check() -> SaveRequest:
        storage = value_of(target)
        value_of(wrong)
        check_metadata(metadata)
        check_flags(incremental=incremental == "full" or incremental)
        requested = RequestedStates.of(states, framework, names, include, exclude, view)
        mode, extent = check_mode(async_checkpoint, staging), check_extent(check_replicas)
        reason = requested.reason_to_block() if mode is SaveMode.BACKGROUND else ""
        if reason:
            mode = SaveMode.BLOCKING
            _log.warning("the save to %s copies in the call, not in the background: %s", storage.url, reason)
        # Now: in a background save the caller's counters continue.
        steps = steps_of_objects(requested.objects) if step is None else {"step=": check_step(step)}
        facts = copy.deepcopy(dict(metadata or {}))
        return SaveRequest(storage, requested, settings, mode, extent, facts, steps, incremental, why_blocking=reason)

    request = checked(check)
    operation = Operation("save", "" if isinstance(target, Exception) else target.url)
    handle = SaveHandle(operation.path)
    handle.committed.add_done_callback(lambda _: operation.end())
    # Memory that is kept for later saves must not belong to the inference mode.
    with operation.running(), torch.inference_mode(False):
        world = world_of(current(process_group, timeout=settings.timeout))
        world.collector.begin(operation)
        handle.committed.add_done_callback(world.collector.observer(operation))
        handle.committed.add_done_callback(follow_with_view(world, request, operation, handle.viewed))
        run_save(world, request, settings, operation, handle)
    return handle


@one_at_a_time
def prepare(
    states: Mapping[str, object],
    *,
    framework: str = "auto",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    names: Mapping[Any, Any] | None = None,
    incremental: bool = False,
    view: StepView | None = None,
    process_group: ProcessGroup | None = None,
    timeout: float | None = None,
) -> Future[None]:
    """Plan the saves of `states` and touch the staging pool, in the background, before the first save.

    Every rank of the process group calls it. A save that follows waits for it.

    Args:
        states: live objects, as for `save`.
        framework: name of the framework, as for `save`.
        include: patterns of names, as for `save`.
        exclude: patterns of names, as for `save`.
        names: parameter -> FQN, as for `save`.
        incremental: use of earlier files, as for `save`.
        view: files for another program, as for `save`.
        process_group: ranks that prepare together, as for `save`.
        timeout: seconds, as for `save`.

    Returns:
        A future, done when everything is ready. A failure is also logged, and the first save then plans for itself.
    """
    return prepare_next(states, framework, names, process_group, timeout, include, exclude, incremental, view)


def prepare_next(
    states: Mapping[str, object],
    framework: str,
    names: Mapping[Any, Any] | None,
    process_group: ProcessGroup | None,
    timeout: float | None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    incremental: bool = False,
    view: StepView | None = None,
) -> Future[None]:
    """Prepare the next save, as `prepare`, from inside another public call."""
    settings, wrong = settings_with_timeout(timeout)

    def check() -> SaveRequest:
        value_of(wrong)
        check_flags(incremental=incremental)
        # Nothing is written: the path must only be equal on all ranks, in any working directory.
        target = check_target("/", settings)
        requested = RequestedStates.of(states, framework, names, include, exclude, view)
        return SaveRequest(target, requested, settings, incremental=incremental)

    with torch.inference_mode(False):
        world = world_of(current(process_group, timeout=settings.timeout))
        return run_prepare(world, checked(check), settings, Operation("prepare", "/"))
