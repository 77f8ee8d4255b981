"""Load a checkpoint: the public call. docs/architecture.md, "A load", describes its steps."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bytecheckpoint.arguments import (
    check_flags,
    check_layout,
    check_rename,
    check_selection,
    check_states,
    check_strict,
    checked,
    settings_with_timeout,
    value_of,
)
from bytecheckpoint.calls import one_at_a_time
from bytecheckpoint.collectives import Collective, current
from bytecheckpoint.errors import CheckpointError, CheckpointReplacedError, IncompatibleCheckpointError
from bytecheckpoint.frameworks.registry import resolve as resolve_framework
from bytecheckpoint.frameworks.wrappers import unwrap_states
from bytecheckpoint.handles import LoadReport
from bytecheckpoint.layouts import LayoutArgument
from bytecheckpoint.loading.request import LoadRequest, Matching
from bytecheckpoint.loading.steps import FilledStates, Load
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.saving import prepare_next
from bytecheckpoint.settings import Settings
from bytecheckpoint.step_fence import wait_for_copies
from bytecheckpoint.storage import Storage
from bytecheckpoint.storage import resolve as resolve_storage
from bytecheckpoint.tiers.restore import choose_copy
from bytecheckpoint.tiers.storage import tier_of
from bytecheckpoint.tracing.operation import Operation, pause
from bytecheckpoint.world import world_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["load", "load_by"]

_log = logging.getLogger("bytecheckpoint")
#: Seconds to wait after each attempt: where ranks see different checkpoints, caches of a network file system may need a
#: moment.
_PAUSES = (0.0, 1.0, 0.0)


@one_at_a_time
def load(
    path: str | os.PathLike[str] | Storage,
    states: MutableMapping[str, Any],
    *,
    framework: str = "auto",
    overlap_loading: bool = True,
    strict: bool | Mapping[str, bool] = True,
    cast: bool = False,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    names: Mapping[Any, Any] | None = None,
    layout: LayoutArgument | None = None,
    process_group: ProcessGroup | None = None,
    timeout: float | None = None,
    prepare_save: bool | None = None,
) -> LoadReport:
    """Load a checkpoint of any layout into live objects, in place (ByteCheckpoint, section 3.1).

    Every rank of the process group calls it.

    Args:
        path: folder or URL of the checkpoint, or its storage.
        states: live objects, as for `save`. Other states of the checkpoint are not read.
        framework: adapter, as for `save`.
        overlap_loading: read bytes that several ranks want once, and exchange them between the ranks (section 4.1).
            Bytes that a tmpfs or the page cache has are not exchanged. False: each rank reads for itself.
        strict: refuse a checkpoint that lacks something the program wants, or holds something no rank wants or state of
            other objects than the program's (another optimizer or learning rate schedule, several tensors where the
            program has one tied weight). False: report the differences. A mapping gives the choice for each state, and
            stands for True for the others: {"scheduler": False} also loads a checkpoint without a scheduler.
        cast: convert dtypes; otherwise a difference is an error.
        include: patterns, as for `save`, over the names of the live objects. Everything else stays unchanged, and is
            neither missing nor unexpected.
        exclude: patterns, as for `save`. A pattern may also match a name that only the checkpoint has, which is then not
            unexpected.
        rename: names of live objects -> names in the checkpoint, both "state/FQN". A mapping replaces prefixes, the
            longest first: {"model/base_model.model.": "model/"}. A function gets a whole name and returns one of the same
            state. A parameter's optimizer state is renamed with the parameter, unless the optimizer's own name is. Plain
            values keep their names.
        names: parameter names, as for `save`.
        layout: layout by which the names of the checkpoint and those of the live objects belong together (docs/layouts.md):
            a name of one that is built in, a file, a `Layout`, or "auto" for the one that is built in for the model, if
            the names differ; or several, of which each leads on from the names to which the one before led. A live name
            that `rename` gives is what the layout sees.
        process_group: ranks that load together; by default all.
        timeout: seconds that one step may wait for the other ranks; default `settings().timeout`.
        prepare_save: prepare the next save of the same states in the background (see `prepare`), which takes memory of
            the state's size. By default, True if an "optimizer" is among them, as in a training that resumes. All ranks
            prepare if one of them wants to.

    Returns:
        A report with the bytes that were read, and the names that were missing, unexpected or cast.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        CorruptCheckpointError: bytes differ from what was written; destinations may hold some of the new bytes.
        IncompatibleCheckpointError: it does not fit. All destinations are unchanged, unless an object refused its state
            in its own load_state_dict, or tensors that are one tied weight here have different bytes.
        UsageError: wrong arguments.
        StorageError: the storage refused a read.
        PeerLostError, CheckpointTimeoutError: another rank is gone or hangs.

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
    options = LoadOptions(
        framework=framework, overlap_loading=overlap_loading, strict=strict, cast=cast, include=include, exclude=exclude,
        rename=rename, names=names, prepare_save=prepare_save,
    )  # fmt: skip
    return load_by(Load, path, states, options, layout, process_group, timeout)


def load_by(
    kind: Callable[..., Load],
    path: str | os.PathLike[str] | Storage,
    states: MutableMapping[str, Any],
    options: LoadOptions,
    layout: LayoutArgument | None,
    process_group: ProcessGroup | None,
    timeout: float | None,
) -> LoadReport:
    """Load as `load` does, by a kind of `Load`, with the arguments of `Load`."""
    wait_for_copies("load")
    settings, wrong = settings_with_timeout(timeout)
    operation = Operation("load", "")  # until it is known where `path` leads
    with operation.running():
        collective = current(process_group, timeout=settings.timeout)
    world = world_of(collective)
    storage = checked(lambda: resolve_storage(path))
    address = "" if isinstance(storage, Exception) else storage.url
    operation.path = address
    number = operation.number = world.calls.begin("load", address, settings.timeout)
    collective.begin_call(f"load/{number}", address)
    # An optimizer's next step runs outside of inference mode and must be able to use the state that it gets here.
    with operation.running(), torch.inference_mode(False):
        world.collector.begin(operation)

        def check() -> LoadRequest:
            value_of(wrong)
            check_flags(overlap_loading=options.overlap_loading, cast=options.cast)
            if options.prepare_save is not None:
                check_flags(prepare_save=options.prepare_save)
            check_states(states, options.names, mutable=True)
            bare = unwrap_states(states)
            world.note_layout(bare)
            selection, new_names = check_selection(options.include, options.exclude), check_rename(options.rename)
            strict, seen = check_strict(options.strict), check_layout(layout)
            matching = Matching(strict, options.cast, selection, new_names, options.names, seen)
            wants_prepare = bool("optimizer" in states if options.prepare_save is None else options.prepare_save)
            wants_prepare = wants_prepare and not world.is_prepared(bare)
            adapter = resolve_framework(options.framework, bare)
            return LoadRequest(adapter, bare, matching, options.overlap_loading, wants_prepare)

        try:
            filled = _fill_states(kind, collective, number, storage, checked(check), settings, operation)
            world.resources.earlier.pieces = {}  # providers go on from other pieces, and may count their tokens anew
            try:
                report = filled.install(operation)
                world.resources.earlier.note_loaded(address, filled.file_names)
            finally:
                # Also if objects of this rank refuse their values: a preparation takes the number of a save on every rank.
                if filled.prepare_save:
                    _prepare_save(states, options.framework, options.names, process_group, timeout)
        except BaseException as error:
            world.calls.note_failure("load", number, address, error)
            world.collector.report(operation, error)
            raise
        finally:
            operation.end()
        world.collector.report(operation, report)
        return report


def _fill_states(
    kind: Callable[..., Load],
    collective: Collective,
    number: int,
    storage: Storage | Exception,
    request: LoadRequest | Exception,
    settings: Settings,
    operation: Operation,
) -> FilledStates:
    """Open a checkpoint, fit it to the live objects and read it. Start again if another save replaces it meanwhile.

    Args:
        kind: kind of the load.
        collective: ranks of the load; all of them call this.
        number: number of the load, equal on all ranks.
        storage: storage of the checkpoint, or the error of its path.
        request: checked arguments, or the error of a wrong one, which all ranks then raise.
        settings: settings in force at the call.
        operation: measurements of this load.
    """
    for attempt, seconds in enumerate(_PAUSES):
        tag = f"load/{number}.{attempt}"
        operation.attempt = attempt + 1
        try:
            with contextlib.ExitStack() as stack:  # open until all ranks are done, since they read this rank's memory
                copy_to_read = _choose_copy(storage, collective, tag, settings, stack)
                load = kind(collective, tag, settings, operation, stack)
                opened = load.open(copy_to_read, request, last=attempt + 1 == len(_PAUSES))
                return load.read(*load.fit(opened))
        except CheckpointReplacedError:
            pause(seconds)
    raise IncompatibleCheckpointError(
        f"the checkpoint was replaced {len(_PAUSES)} times while it was being loaded; load one that is not being saved"
    )


def _choose_copy(
    storage: Storage | Exception, collective: Collective, tag: str, settings: Settings, stack: contextlib.ExitStack
) -> Storage | Exception:
    """Return the copy of a tier that all ranks read; a failure is returned, so that `open` reports it to all ranks."""
    if isinstance(storage, Exception):
        return storage
    # Ranks agree on the copy of a tier first, so they would wait in vain for those that load from something else.
    collective.describe_call("tier" if tier_of(storage) is not None else "storage", storage.url)
    chosen = checked(lambda: choose_copy(storage, collective, f"{tag}/tier", settings, stack))
    if not isinstance(chosen, Exception):
        chosen.timeout = settings.timeout
    return chosen


def _prepare_save(
    states: Mapping[str, object],
    framework: str,
    names: Mapping[Any, Any] | None,
    process_group: ProcessGroup | None,
    timeout: float | None,
) -> None:
    try:
        prepare_next(states, framework, names, process_group, timeout)
    except CheckpointError as error:  # the bytes are loaded; the first save will plan for itself
        _log.warning("the next save could not be prepared: %s", error)
