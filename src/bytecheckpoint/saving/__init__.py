"""Saving: the public calls. What happens then is told in docs/architecture.md, "A save"."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..collectives import current
from ..errors import UsageError
from ..frameworks.registry import resolve as resolve_framework
from ..handles import SaveHandle
from ..settings import Settings
from ..storage import Storage
from ..storage import resolve as resolve_storage
from .arguments import check_flags, check_metadata, check_states, limited
from .saver import SaveCall, saver_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["prepare", "save"]


def save(
    path: str | os.PathLike[str] | Storage,
    states: Mapping[str, object],
    *,
    framework: str = "auto",
    async_checkpoint: bool = False,
    staging: str = "blocking",
    check_replicas: bool = False,
    names: Mapping[Any, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    process_group: ProcessGroup | None = None,
    timeout: float | None = None,
) -> SaveHandle:
    """Save `states` as one checkpoint. Every rank of the process group calls it (ByteCheckpoint, section 3.1).

    Args:
        path: folder or URL of the checkpoint, or its storage. A checkpoint that is there is replaced atomically.
        states: name -> module, optimizer, list of them, anything with state_dict/load_state_dict, or nested
            dict/list/tuple of tensors and plain values. "model", "optimizer", "dataloader" and "extra_states" have
            their usual meaning; any other name may be added.
        framework: "auto", or one of the names that an unknown name's error lists.
        async_checkpoint: return when the state is copied ("staged"), and write in the background.
        staging: with async_checkpoint, "blocking" returns when staged, "background" at once: the caller then waits
            for `handle.staged` before it changes its state.
        check_replicas: compare the content of all copies of replicated tensors; differences are in the report.
        names: parameter -> FQN (or FQN -> parameter), when an optimizer's module is not among `states`.
        metadata: the caller's own facts (plain JSON), kept in the catalog.
        process_group: the ranks that save together; by default all.
        timeout: seconds that one step may wait for the other ranks; default `settings().timeout`.

    Returns:
        A handle; after a synchronous save it is done (to a `tier+...` path: `handle.restorable` is, and the copy to the
        durable storage goes on in the background).

    Raises:
        UsageError: wrong arguments, or something that cannot be represented, by name; nothing was written.
        StorageError: the storage refused (`StorageFullError`, `StorageUnavailableError`).
        PeerLostError, CheckpointTimeoutError: another rank is gone or hangs.
        CheckpointError: any of these from another rank, or from an earlier asynchronous save.

    Examples:
        >>> import tempfile, torch, bytecheckpoint
        >>> model = torch.nn.Linear(4, 2)
        >>> handle = bytecheckpoint.save(tempfile.mkdtemp() + "/step_1", {"model": model})
        >>> handle.result().bytes_written > 40
        True
    """
    force, wrong = limited(timeout)

    def check() -> SaveCall:
        if wrong is not None:
            raise wrong
        check_flags(async_checkpoint=async_checkpoint, check_replicas=check_replicas)
        if not isinstance(staging, str) or staging not in ("blocking", "background"):
            raise UsageError(f"staging={staging!r}: use 'blocking' or 'background'")
        if staging == "background" and not async_checkpoint:
            raise UsageError("staging='background' needs async_checkpoint=True")
        return _call(path, states, framework, names, check_replicas, force, metadata)

    # What is no bool at all is refused by `check`, after every rank has taken this call's number.
    asynchronous = isinstance(async_checkpoint, bool | np.bool_) and bool(async_checkpoint)
    with torch.inference_mode(False):  # memory that is kept for later saves must not belong to that mode
        return saver_of(current(process_group, timeout=force.timeout)).save(
            check,
            force,
            path=str(path),
            asynchronous=asynchronous,
            background=asynchronous and isinstance(staging, str) and staging == "background",
        )


def prepare(
    states: Mapping[str, object],
    *,
    framework: str = "auto",
    names: Mapping[Any, Any] | None = None,
    process_group: ProcessGroup | None = None,
    timeout: float | None = None,
) -> Future[None]:
    """Plan the saves of `states` and touch the staging pool, in the background, before the first save.

    Every rank of the process group calls it. A save that follows waits for it.

    Args:
        states: as for `save`.
        framework: as for `save`.
        names: as for `save`.
        process_group: as for `save`.
        timeout: as for `save`.

    Returns:
        Done when everything is ready; a failure is also logged, and the first save then plans for itself.
    """
    force, wrong = limited(timeout)

    def check() -> SaveCall:
        if wrong is not None:
            raise wrong
        return _call(".", states, framework, names, False, force, None)

    with torch.inference_mode(False):
        return saver_of(current(process_group, timeout=force.timeout)).prepare(check, force)


def _call(
    path: str | os.PathLike[str] | Storage,
    states: Mapping[str, object],
    framework: str,
    names: Mapping[Any, Any] | None,
    check_replicas: bool,
    force: Settings,
    metadata: Mapping[str, Any] | None,
) -> SaveCall:
    check_states(states, names)
    check_metadata(metadata)
    storage = resolve_storage(path).nearby()
    storage.timeout = force.timeout
    adapter = resolve_framework(framework, states)
    return SaveCall(storage, adapter, dict(states), names, check_replicas, force, dict(metadata or {}))
