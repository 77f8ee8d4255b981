"""Loading: the public call, and its steps (docs/architecture.md, "A load")."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from ..collectives import Collective, current
from ..frameworks.registry import resolve as resolve_framework
from ..handles import LoadReport
from ..saving import prepare
from ..saving.arguments import check_flags, check_states, limited
from ..saving.saver import saver_of
from ..storage import Storage
from ..storage import resolve as resolve_storage
from ..storage.tier import TierStorage
from ..tiers.restoring import meet
from .session import LoadSession

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["load"]

_numbers: weakref.WeakKeyDictionary[Collective, itertools.count[int]] = weakref.WeakKeyDictionary()


def load(
    path: str | os.PathLike[str] | Storage,
    states: MutableMapping[str, Any],
    *,
    framework: str = "auto",
    overlap_loading: bool = True,
    strict: bool = True,
    cast: bool = False,
    names: Mapping[Any, Any] | None = None,
    process_group: ProcessGroup | None = None,
    timeout: float | None = None,
    prepare_save: bool | None = None,
) -> LoadReport:
    """Load a checkpoint into live objects, in place, whatever layout it was saved from (ByteCheckpoint, section 3.1).

    Every rank of the process group calls it.

    Args:
        path: folder or URL of the checkpoint, or its storage.
        states: as for `save`; kinds that are not named here are not read.
        framework: as for `save`.
        overlap_loading: bytes that several ranks want are read from storage once and exchanged between them (section
            4.1). False: each rank reads for itself, which is quicker for two or three ranks of one host whose
            checkpoint is in the page cache.
        strict: what the program wants and the checkpoint lacks is an error, and so is what the checkpoint holds and
            no rank wants. False: both are reported.
        cast: convert dtypes; otherwise a difference is an error.
        names: as for `save`.
        process_group: the ranks that load together; by default all.
        timeout: seconds that one step may wait for the other ranks; default `settings().timeout`.
        prepare_save: afterwards prepare, in the background, to save the same states (see `prepare`), which takes
            memory of the state's size; by default when an "optimizer" is among them, as in a training that resumes.

    Returns:
        What was read, and what was missing, unexpected or cast.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        CorruptCheckpointError: bytes differ from what was written; destinations may hold some of the new bytes.
        IncompatibleCheckpointError: it does not fit; all destinations are as they were, unless an object refused its
            state in its own load_state_dict.
        UsageError: wrong arguments.
        StorageError, PeerLostError, CheckpointTimeoutError: as for `save`.

    Examples:
        >>> import tempfile, torch, bytecheckpoint
        >>> path = tempfile.mkdtemp() + "/step_1"
        >>> model = torch.nn.Linear(4, 2)
        >>> handle = bytecheckpoint.save(path, {"model": model})
        >>> other = torch.nn.Linear(4, 2)
        >>> report = bytecheckpoint.load(path, {"model": other})
        >>> torch.equal(model.weight, other.weight)
        True
    """
    force, wrong = limited(timeout)
    collective = current(process_group, timeout=force.timeout)
    number = next(_numbers.setdefault(collective, itertools.count(1)))
    session = LoadSession(collective, number, force, overlap=overlap_loading, strict=strict, cast=cast)
    saver = saver_of(collective)

    attempts = itertools.count()

    def find() -> Any:
        storage = resolve_storage(path)
        if isinstance(storage, TierStorage) and collective.world_size > 1:
            # The ranks talk here, so nothing that may fail on one of them alone comes before it.
            storage = meet(storage, collective, f"load/{number}.{next(attempts)}/tier", force, memory)
        if wrong is not None:
            raise wrong
        check_flags(overlap_loading=overlap_loading, strict=strict, cast=cast)
        if prepare_save is not None:
            check_flags(prepare_save=prepare_save)
        check_states(states, names, filled=MutableMapping)
        storage.timeout = force.timeout
        return storage, resolve_framework(framework, states)

    # State that an optimizer gets here must be of use to its next step, which is in no inference mode.
    with torch.inference_mode(False), contextlib.ExitStack() as memory:
        report = session.run(find, states, names, ready=lambda: saver.ready(states))
    wanted = prepare_save if prepare_save is not None else "optimizer" in states
    if wanted and not session.all_ready:
        prepare(states, framework=framework, names=names, process_group=process_group, timeout=timeout)
    return report
