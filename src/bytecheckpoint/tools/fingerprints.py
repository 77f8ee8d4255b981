"""Fingerprints of models: equal for equal tensors, at any layout, in any files and programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bytecheckpoint.arguments import check_layout
from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.engine.tensor_bytes import dense_bytes, flat_bytes
from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, UsageError, listed
from bytecheckpoint.frameworks.selection import select_states
from bytecheckpoint.layouts import LayoutArgument
from bytecheckpoint.opening import open as open_checkpoint
from bytecheckpoint.opening.checkpoint import Checkpoint
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.planning.coverage import not_tiled
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.fingerprints import BoxSums, Fingerprint, Sums, shared_tensors, stored_fingerprint
from bytecheckpoint.representation.names import escape, unescape
from bytecheckpoint.representation.shards import LiveShard, TensorKey, each_box
from bytecheckpoint.saving.request import RequestedStates
from bytecheckpoint.tools.ranks import tool_ranks
from bytecheckpoint.tools.subject import Subject, opened

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Fingerprint", "fingerprint", "prove_loaded"]

_PIECE = 32 << 20


def fingerprint(
    subject: Subject | Mapping[str, object],
    *,
    layout: LayoutArgument | None = None,
    recompute: bool = False,
    names: Mapping[Any, Any] | None = None,
    process_group: ProcessGroup | None = None,
) -> Fingerprint:
    """Return the fingerprint of a checkpoint, of a folder of another program, or of live states.

    It depends on names, dtypes, shapes and bits of the tensors alone. So it is equal for a training, its checkpoints, a
    load at another layout, an export and an adopted folder. It shows any change of a single element, and any other change
    with a chance of 1 - 2**-26 at least (docs/format.md, section 3.6); it is no protection against an attacker. Plain
    values are in no fingerprint.

    Args:
        subject: path, storage or open checkpoint; or states by name, as for `save`, of which each rank holds its part.
        layout: layout through which a checkpoint is seen, as for `open`.
        recompute: True to read the tensors of a checkpoint whose catalog has fingerprints, too.
        names: parameter -> FQN, as for `save`.
        process_group: ranks that hold the states, all of which call this; by default all ranks.

    Raises:
        IncompatibleCheckpointError: copies of a tensor differ between ranks; the message names the tensor and the ranks.
        CorruptCheckpointError: a block of the checkpoint is damaged.
        UsageError: the ranks do not hold whole tensors together.

    Examples:
        >>> import torch
        >>> from bytecheckpoint.tools import fingerprint
        >>> model = torch.nn.Linear(4, 2)
        >>> before = fingerprint({"model": model})
        >>> before == fingerprint({"model": model})
        True
    """
    if isinstance(subject, Mapping) and not isinstance(subject, Checkpoint):
        if layout is not None or recompute:
            raise UsageError("layout= and recompute= are for checkpoints: states are seen as they are")
        return _of_states(subject, names, process_group)
    if check_layout(layout) is not None:
        if isinstance(subject, Checkpoint):
            raise UsageError("layout= is for a path: open the checkpoint with the layout")
        with open_checkpoint(subject, layout=layout) as checkpoint:
            return _of_checkpoint(checkpoint, recompute)
    with opened(subject) as checkpoint:
        return _of_checkpoint(checkpoint, recompute)


def _of_checkpoint(checkpoint: Checkpoint, recompute: bool) -> Fingerprint:
    view = CheckpointView.of(checkpoint)
    catalog = view.catalog
    if not recompute and (stored := stored_fingerprint(catalog)) is not None:
        return stored
    sums = _read_sums(view, shared_tensors(catalog))
    return Fingerprint.of((catalog.key(n), catalog.dtype[n], catalog.shape(n), found) for n, found in sums.items())


def _read_sums(view: CheckpointView, tensors: Sequence[int]) -> dict[int, list[int]]:
    """Read tensors of a checkpoint, and return the sums of each by its number."""
    catalog = view.catalog
    numbers = {str(catalog.key(n)): n for n in tensors}
    sums: dict[str, Sums] = {key: np.zeros(2, np.uint64) for key in numbers}
    begins = dict.fromkeys(numbers, 0)
    for key, _, data in view.stream(numbers, _PIECE):
        shape, size = catalog.shape(numbers[key]), itemsize(catalog.dtype[numbers[key]])
        sums[key] += BoxSums(shape, size, (0,) * len(shape), shape).of(begins[key], flat_bytes(data).numpy())
        begins[key] += data.nbytes
    return {n: sums[key].tolist() for key, n in numbers.items()}


# --- live states ------------------------------------------------------------------------------------------------------


def prove_loaded(
    path: str,
    states: Mapping[str, object],
    options: LoadOptions,
    process_group: ProcessGroup | None,
    layout: LayoutArgument | None = None,
) -> int:
    """Compare live states with the fingerprints in a checkpoint's catalog. All ranks call this after a load.

    Through a layout, the fingerprints are those of the checkpoint's tensors as the layout shows them, which all ranks
    read for that, each its share.

    Args:
        path: address of the checkpoint.
        states: the states that were loaded.
        options: options of the load; what they left out is not compared.
        process_group: ranks that loaded.
        layout: layout through which the states see the checkpoint.

    Returns:
        The number of tensors that are proven; 0 if the save made no fingerprints.

    Raises:
        CorruptCheckpointError: tensors hold other elements than were saved; the message names them.
    """

    def own() -> tuple[list[Any], list[Any]]:
        given = (options.framework, options.names, options.include, options.exclude)
        return _own_sums(RequestedStates.of(states, *given)), _shown() if layout is not None else []

    def _shown() -> list[Any]:
        with open_checkpoint(path, layout=layout) as checkpoint:
            view = CheckpointView.of(checkpoint)
            catalog = view.catalog
            numbers = [n for n in shared_tensors(catalog) if catalog.key(n).state in states]
            share = ranks.share([math.prod(catalog.shape(n)) * itemsize(catalog.dtype[n]) for n in numbers])
            return _facts(catalog, _read_sums(view, [numbers[place] for place in share]))

    def compare(found: list[tuple[list[Any], list[Any]]]) -> int:
        saved = [fact for _, shown in found for fact in shown]
        if layout is None:
            with open_checkpoint(path) as checkpoint:
                catalog = CheckpointView.of(checkpoint).catalog
            if catalog.fingerprints is not None:
                saved = _facts(catalog, {n: catalog.fingerprints[n].tolist() for n in shared_tensors(catalog)})
        known = {tuple(key): (dtype, list(shape), sums) for key, dtype, shape, sums in saved}
        proven, others = 0, []
        for key, dtype, shape, sums in _joined([own for own, _ in found]) if known else []:
            *form, wanted = known.get(tuple(key), ("", [], []))
            if form != [dtype, list(shape)]:
                continue  # it is new here, or was converted
            proven += 1
            if wanted != sums:
                others.append(_name(key))
        if others:
            raise CorruptCheckpointError(f"{path}: after the load {listed(others)} hold other elements than were saved")
        return proven

    with torch.no_grad(), tool_ranks("prove", process_group, alone=False) as ranks:
        return ranks.agree("sums", own, compare)


def _facts(catalog: Catalog, sums: Mapping[int, list[int]]) -> list[Any]:
    """Return escaped key, dtype, shape and sums of tensors of a checkpoint, as `_joined` returns those of live states."""
    return [
        [[escape(part) for part in catalog.key(n)], catalog.dtype[n], list(catalog.shape(n)), found]
        for n, found in sums.items()
    ]


def _of_states(
    states: Mapping[str, object], names: Mapping[Any, Any] | None, process_group: ProcessGroup | None
) -> Fingerprint:
    with torch.no_grad(), tool_ranks("fingerprint", process_group, alone=False) as ranks:
        found = ranks.agree("sums", lambda: _own_sums(RequestedStates.of(states, "auto", names, None, None)), _joined)
    tensors = ((TensorKey(*map(unescape, key)), dtype, tuple(shape), sums) for key, dtype, shape, sums in found)
    return Fingerprint.of(tensors)


def _own_sums(requested: RequestedStates) -> list[Any]:
    """Return a description and the sums of each box of this rank."""
    live = select_states(requested.framework.capture(requested.objects, names=requested.names), requested.selection)
    shards = each_box([shard for state in live for shard in state.shards if not shard.by_content])
    return [[*_described(shard), _sums_of(shard).tolist()] for shard in shards]


def _described(shard: LiveShard) -> list[Any]:
    key = [escape(part) for part in shard.key]
    return [key, shard.dtype, shard.global_shape, shard.offsets, shard.lengths, shard.from_lowest]


def _sums_of(shard: LiveShard) -> Sums:
    box = BoxSums(shard.global_shape, itemsize(shard.dtype), shard.offsets, shard.lengths)
    data = shard.data.resolve_conj().resolve_neg()  # as a save writes it
    total, nbytes = np.zeros(2, np.uint64), data.numel() * data.element_size()
    for start in range(0, nbytes, _PIECE):
        total += box.of(start, dense_bytes(data, start, min(start + _PIECE, nbytes)).cpu().numpy())
    return total


def _joined(ranks: list[list[Any]]) -> list[Any]:
    """Add the sums of the boxes of all ranks; of copies one counts.

    Raises:
        IncompatibleCheckpointError: copies differ.
        UsageError: the boxes do not tile the tensors.
    """
    tensors: dict[tuple[str, ...], tuple[str, list[int]]] = {}
    boxes: dict[tuple[Any, ...], tuple[int, list[int]]] = {}
    differing: dict[str, list[int]] = {}
    for rank, found in enumerate(ranks):
        for key, dtype, shape, offsets, lengths, from_lowest, sums in found:
            known = tensors.setdefault(tuple(key), (dtype, list(shape)))
            if known != (dtype, list(shape)):
                raise IncompatibleCheckpointError(
                    f"{_name(key)} is {known[0]}{known[1]} on some ranks, {dtype}{list(shape)} on rank {rank}"
                )
            first, other = boxes.setdefault((tuple(key), tuple(offsets), tuple(lengths)), (rank, sums))
            if other != sums and not from_lowest:
                differing.setdefault(_name(key), [first]).append(rank)
    if differing:
        name, which = next(iter(differing.items()))
        more = f" ({listed([*differing][1:])} too)" if len(differing) > 1 else ""
        raise IncompatibleCheckpointError(
            f"the copies of {name} on {names_of_ranks(which[1:])} differ from that on rank {which[0]}{more}"
        )
    numbers = {key: number for number, key in enumerate(tensors)}
    total = np.zeros((len(tensors), 2), np.uint64)
    for (key, _, _), (_, sums) in boxes.items():
        total[numbers[key]] += np.array(sums, np.uint64)
    table = BoxTable.build([numbers[key] for key, _, _ in boxes], [o for _, o, _ in boxes], [n for _, _, n in boxes])
    shapes = [shape for _, shape in tensors.values()]
    whole = BoxTable.build(range(len(shapes)), [(0,) * len(shape) for shape in shapes], shapes)
    width = max(table.ndim, whole.ndim)
    if len(short := not_tiled(whole.widened(width).lengths, table.widened(width))):
        name = _name([*tensors][short[0]])
        raise UsageError(
            f"the ranks do not hold each element of {name} once: give the process group of all that hold it"
        )
    return [[key, dtype, shape, total[numbers[key]].tolist()] for key, (dtype, shape) in tensors.items()]


def _name(key: Sequence[str]) -> str:
    return str(TensorKey(*map(unescape, key)))
