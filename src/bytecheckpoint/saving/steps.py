"""The training step that a rank's states belong to: ranks of different steps must not share a checkpoint."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bytecheckpoint.collectives.base import names_of_ranks
from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.planning.local_table import LocalTable, all_rows, row_count
from bytecheckpoint.planning.replicas import differing_rows, group_equal
from bytecheckpoint.representation.names import unescape
from bytecheckpoint.representation.shards import LiveShard, TensorKey, each_box

__all__ = ["check_optimizer_steps", "check_step", "check_steps", "steps_of_objects", "steps_of_shards"]

#: Names under which programs keep their step among plain values.
_NAMES = ("step", "global_step", "iteration", "last_epoch")
#: The name among these under which learning rate schedulers and their states do.
_OF_SCHEDULERS = ("last_epoch",)
#: The slot in which optimizers keep the step of a parameter.
_SLOT = "step"


def check_step(step: object) -> int:
    """Return the argument `step` as an int.

    Raises:
        UsageError: it is no integer, negative, or too large for a catalog.
    """
    if not isinstance(step, bool | np.bool_ | float):
        try:
            number = operator.index(step)  # type: ignore[arg-type]  # an object without an index raises
        except TypeError:
            number = -1
        if 0 <= number < 1 << 63:
            return number
    raise UsageError(f"step={step!r}: give an integer that is at least 0 and less than 2**63")


def steps_of_objects(states: Mapping[str, object]) -> dict[str, int]:
    """Find the steps that the caller's objects show: plain values with a usual name, and learning rate schedulers.

    A dataloader counts its own rank's samples, and so may other parts that are one level down, so these show nothing.

    Returns:
        Steps by a name for messages: {"extra_states/step": 30}.
    """
    return {
        f"{path}/{name}": number
        for state_name, state in states.items()
        if state_name != "dataloader"
        for path, holder, names in ((state_name, state, _NAMES), *_nested(state_name, state))
        for name in names
        if (number := _integer(_values_of(holder).get(name))) is not None
    }


def _nested(state_name: str, state: object) -> Iterator[tuple[str, object, tuple[str, ...]]]:
    if isinstance(state, Mapping):
        for name, inner in state.items():
            # A tensor has no step, and would make a `__dict__` when asked for it.
            if not isinstance(inner, torch.Tensor) and isinstance(name, str):
                yield f"{state_name}/{name}", inner, _OF_SCHEDULERS


def _values_of(holder: object) -> Mapping[str, object]:
    """Return the values of a mapping, or what a scheduler holds; no code of the caller runs, such as a property."""
    if isinstance(holder, Mapping):
        return holder
    attributes = getattr(holder, "__dict__", {})
    return {name: attributes[name] for name in _OF_SCHEDULERS if name in attributes}


def _integer(value: object) -> int | None:
    """Return an integer of Python, numpy or torch that a message can hold; None for any other value."""
    if type(value) is torch.Tensor and value.is_cpu and value.numel() == 1 and not value.is_floating_point():
        value = value.item()
    number = int(value) if type(value) is int or isinstance(value, np.integer) else None
    return number if number is not None and abs(number) < 1 << 63 else None


def steps_of_shards(shards: Iterable[LiveShard]) -> NDArray[np.float64]:
    """Read the steps that optimizers keep for each parameter, in the order of the shards; one number if all are equal."""
    of_slot = [shard for shard in shards if shard.key.slot == _SLOT]
    if any(shard.fragments for shard in of_slot):
        of_slot = list(each_box(of_slot))
    steps = [shard.data for shard in of_slot if shard.data.numel() == 1]
    steps = [step.real if step.is_complex() else step for step in steps]
    # The caller of a save waits for this: 2.6 ms for 10,000 tensors of the host by `item`, twice that by `stack`.
    values = np.array([step.item() if step.is_cpu else np.nan for step in steps], np.float64)
    by_device: dict[torch.device, list[int]] = {}
    for number in np.flatnonzero(np.isnan(values)).tolist():
        by_device.setdefault(steps[number].device, []).append(number)
    for numbers in by_device.values():
        values[numbers] = torch.stack([steps[number].reshape(()).double() for number in numbers]).tolist()
    return values[:1] if (values == values[:1]).all() else values


def check_steps(steps: Mapping[int, Mapping[str, float]]) -> None:
    """Refuse a save to which ranks bring different steps.

    Args:
        steps: by rank, then by name.

    Raises:
        IncompatibleCheckpointError: the steps of one name differ.
    """
    for name in sorted({name for by_name in steps.values() for name in by_name}):
        ranks: dict[float, list[int]] = {}
        for rank in sorted(steps):
            if name in steps[rank]:
                ranks.setdefault(steps[rank][name], []).append(rank)
        if len(ranks) > 1:
            raise IncompatibleCheckpointError(
                f"ranks save different steps: {name} is "
                + " and ".join(f"{step:.16g} on {names_of_ranks(found)}" for step, found in list(ranks.items())[:3])
                + "; let all ranks save at the same step, or give step= if these numbers may differ",
                calls_differ=True,
            )


def check_optimizer_steps(steps: Mapping[int, NDArray[np.float64]], tables: Sequence[LocalTable]) -> bool:
    """Refuse a save to which ranks bring different steps of one parameter, as their optimizers count them.

    Parameters may differ among each other: an expert without tokens lags behind, a layer was frozen for a while.

    Args:
        steps: by rank, of `steps_of_shards`.
        tables: the shards of each rank.

    Returns:
        Whether the optimizers show that all ranks are at one step: each rank shares parameters with others.

    Raises:
        IncompatibleCheckpointError: the step of a parameter differs.
    """
    if len(np.unique(np.concatenate(list(steps.values())))) <= 1:
        return all(len(of_rank) for of_rank in steps.values())
    tensors, boxes = all_rows(tables)
    is_step = np.array([tensor.slot == _SLOT for tensor in tensors], bool)[boxes.tensor] & (boxes.volumes() == 1)
    counts = [row_count(table) for table in tables]
    rank = np.repeat(np.arange(len(tables)), counts)
    value = np.full(len(rank), np.nan)
    for number, of_rank in steps.items():
        rows = np.flatnonzero(is_step & (rank == number))
        if len(of_rank) in (1, len(rows)):
            value[rows] = of_rank
    known = np.flatnonzero(~np.isnan(value))
    group = group_equal(boxes)[known]
    differing = differing_rows(group, value[known])
    if len(differing):
        of_group = known[group == group[differing[0]]]
        tensor = tensors[int(boxes.tensor[of_group[0]])]
        name = str(TensorKey(*map(unescape, (tensor.state, tensor.fqn, tensor.slot))))
        check_steps({int(rank[row]): {name: value[row]} for row in of_group})
    return _connected(rank[known], group, len(tables))


def _connected(rank: NDArray[np.int64], group: NDArray[np.int64], ranks: int) -> bool:
    """Return whether rows that belong to ranks and to groups connect all ranks."""
    lowest = np.arange(ranks)  # the lowest rank that each rank is known to be connected to
    while True:
        of_group = np.full(int(group.max(initial=-1)) + 1, ranks)
        np.minimum.at(of_group, group, lowest[rank])
        before = lowest.copy()
        np.minimum.at(lowest, rank, of_group[group])
        if np.array_equal(before, lowest):
            return not lowest.any()
