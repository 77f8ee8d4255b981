"""Capture and load the modules of an engine; a load fills weights and master weights together, so that they match.

A parameter that neither ZeRO nor AutoTP splits is an ordinary one. Stage 3 leaves its parameters empty: the module has
their names, this rank's partitions have their elements. Under AutoTP a parameter is this rank's part of it, and what ZeRO
partitions is that part. Any parameter may have a master weight, of which this rank holds a range.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, ParameterName, SavedStates, SavedTensor
from bytecheckpoint.frameworks.deepspeed.detection import imported
from bytecheckpoint.frameworks.deepspeed.partitions import (
    HeldRange,
    drop_secondary_partition,
    full_shape,
    gathered_weight,
    is_zero3_param,
    master_fragment,
    masters_match_weights,
    weight_range,
)
from bytecheckpoint.frameworks.deepspeed.tensor_parallel import AutoTPShard, find_autotp_shards
from bytecheckpoint.frameworks.modules import (
    ModuleScan,
    capture_modules,
    find_saved_parameter,
    load_modules,
    scan_modules,
)
from bytecheckpoint.frameworks.native import describe_layout
from bytecheckpoint.frameworks.optimizers.master_weights import choose_saved_weight
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name
from bytecheckpoint.frameworks.tensors.flat_ranges import FlatRange, flat_range_shards
from bytecheckpoint.frameworks.wrappers import walk_modules
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey

__all__ = ["ZeroModules", "capture_zero_modules", "load_zero_modules", "scan_zero_modules"]

# Dtypes that float32 represents exactly: a float32 master weight may be made of them.
_EXACT_IN_FLOAT32 = frozenset({"float32", "bfloat16", "float16"})


@dataclass(slots=True)
class _Weight:
    """One parameter, with all of its names, and this rank's part of it under AutoTP."""

    fqn: str
    aliases: tuple[str, ...]
    parameter: torch.Tensor
    part: AutoTPShard | None


@dataclass(slots=True)
class ZeroModules:
    """All modules of one state.

    Attributes:
        whole: tensors and values that are whole on this rank: parameters of stages up to 2, buffers, extra states.
        split: the parameters that stage 3 or AutoTP splits.
        modules: all modules of the state.
        parameters: id of a parameter -> its name.
        parts: id of a parameter -> this rank's part of it, for those that AutoTP splits.
    """

    whole: ModuleScan
    split: list[_Weight]
    modules: Sequence[nn.Module]
    parameters: dict[int, ParameterName]
    parts: dict[int, AutoTPShard]

    def layouts(self) -> Iterator[str]:
        """Describe the layout of each tensor."""
        yield from (describe_layout(tensor.value) for tensor in self.whole.tensors)
        for weight in self.split:
            cuts = [f"AutoTP (dim {weight.part.dim})"] if weight.part is not None else []
            if is_zero3_param(weight.parameter):
                cuts.append("ZeRO-3")
            yield " ".join(cuts)


def scan_zero_modules(state_name: str, modules: Sequence[nn.Module]) -> ZeroModules:
    """Find the names and tensors of `modules`.

    Raises:
        UsageError: two modules use one FQN for different tensors; or AutoTP or AutoEP has split a
            layer in a way that is not known.
    """
    parts = find_autotp_shards(state_name, modules)
    scan = scan_modules(state_name, modules)
    _number_experts(scan)
    whole: list[Any] = []
    split: list[_Weight] = []
    for tensor in scan.tensors:
        part = parts.get(id(tensor.value))
        if part is None and not is_zero3_param(tensor.value):
            whole.append(tensor)
        else:
            split.append(_Weight(tensor.fqn, tensor.aliases, tensor.value, part))
    return ZeroModules(replace(scan, tensors=whole), split, modules, scan.parameters, parts)


def capture_zero_modules(state_name: str, scan: ZeroModules) -> LiveState:
    """Describe the shards and values of a scanned state.

    Raises:
        UsageError: a partition is not in memory; names it.
    """
    state = capture_modules(state_name, scan.whole)
    ranges: list[FlatRange] = []
    parameters: list[LiveShard] = []
    for weight in scan.split:
        key = TensorKey(state_name, weight.fqn)
        if is_zero3_param(weight.parameter):
            ranges += _flat_ranges(key, weight, weight_range(str(key), weight.parameter))
        else:
            parameters += _shards(key, weight, weight.parameter)
    parameters += flat_range_shards(ranges)
    for shard in parameters:
        shard.frozen = not shard.requires_grad
    state.shards += parameters
    return state


def _shards(key: TensorKey, weight: _Weight, data: torch.Tensor) -> list[LiveShard]:
    """Return the shards of `data`, a tensor of the parameter's shape, or of the shape of its part under AutoTP."""
    if weight.part is not None:
        return list(weight.part.shards(key, data, weight.aliases))
    shards: list[LiveShard] = []
    add_shards(shards, key, data, aliases=weight.aliases)
    return shards


def _flat_ranges(key: TensorKey, weight: _Weight, held: HeldRange) -> list[FlatRange]:
    """Return the range as a flat range; none if it is empty and the parameter is not."""
    part = weight.part
    shape = full_shape(weight.parameter) if part is None else part.shape
    if not held.count and 0 not in shape:
        return []
    flat_range = FlatRange(key, shape, held.start, held.data, held.offset, held.count)
    flat_range.aliases, flat_range.requires_grad = weight.aliases, weight.parameter.requires_grad
    if part is not None:
        flat_range.box = part.box
    return [flat_range]


def load_zero_modules(
    state_name: str,
    scan: ZeroModules,
    saved: SavedStates,
    destination: Destination,
    *,
    master_state: str | None,
    masters: Mapping[int, HeldRange],
) -> None:
    """Plan the load of a scanned state, in place.

    Args:
        state_name: name of the state.
        scan: scan of the state's modules.
        saved: the checkpoint.
        destination: receives the plan.
        master_state: name of the state that holds the master weights; None: unknown.
        masters: id of a parameter -> its master weights, from the optimizers in the states. Other parameters are asked
            for theirs.

    Raises:
        UsageError: a partition is not in memory, or the parameter's link to its master weights is wrong; names it.
    """
    without_master: list[Any] = []
    weights: list[tuple[_Weight, HeldRange | None]] = []
    for tensor in scan.whole.tensors:
        weight = _Weight(tensor.fqn, tensor.aliases, tensor.value, None)
        master = _master_of(state_name, weight, masters)
        if master is None:
            without_master.append(tensor)
        else:
            weights.append((weight, master))
    weights += [(weight, _master_of(state_name, weight, masters)) for weight in scan.split]
    load_modules(state_name, replace(scan.whole, tensors=without_master), saved, destination)
    load = _WeightLoad(state_name, saved, destination, master_state)
    for weight, master in weights:
        load.add(weight, master)
    load.finish()


def _master_of(state_name: str, weight: _Weight, masters: Mapping[int, HeldRange]) -> HeldRange | None:
    """Return this rank's master weights of a parameter; None: it has none.

    Raises:
        UsageError: the parameter's link to its master weights is wrong; names it.
    """
    parameter = weight.parameter
    if is_zero3_param(parameter):
        return master_fragment(parameter)
    master = masters.get(id(parameter))
    if master is not None:
        return master
    master = master_fragment(parameter)
    if master is not None and not masters_match_weights(parameter, master):
        raise UsageError(
            f"{state_name}/{weight.fqn}: what this parameter leads to are not its master weights (gradients go round "
            "robin, or the weights were changed by hand): pass the engine instead of its module"
        )
    return master


class _WeightLoad:
    """The load of parameters that ZeRO partitions or that have master weights."""

    def __init__(self, state_name: str, saved: SavedStates, destination: Destination, master_state: str | None) -> None:
        self._state_name = state_name
        self._saved = saved
        self._destination = destination
        self._master_state = master_state
        self._ranges: dict[bool, list[FlatRange]] = {False: [], True: []}  # by whether the load converts the dtype
        self._inexact_masters: list[str] = []

    def add(self, weight: _Weight, master: HeldRange | None) -> None:
        """Request this rank's elements of one parameter, whole or a partition, and its master weights."""
        found = find_saved_parameter(self._state_name, (weight.fqn, weight.aliases), self._saved, self._destination)
        if found is None:
            return
        parameter = weight.parameter
        low = dtype_name(parameter.dtype)
        high = low if master is None else dtype_name(master.data.dtype)
        names = (weight.fqn, *weight.aliases)
        exact = choose_saved_weight(self._saved, found, names, high, self._master_state)
        source = found if found.dtype == low else exact
        # The engine rounds master weights to weights after every step; the load may round in the same way.
        converts = high != low and exact.dtype in _EXACT_IN_FLOAT32 and high == "float32"
        held = None
        if is_zero3_param(parameter):
            held = weight_range(str(found.key), parameter)
            self._want(weight, source, held, converts)
            if (gathered := gathered_weight(parameter)) is not None:
                self._want_whole(weight, source, gathered, converts)
            self._destination.finish.append(partial(drop_secondary_partition, parameter))
        else:
            self._want_whole(weight, source, parameter, converts)
        if master is None or (held is not None and _is_same_memory(held, master)):
            return
        self._want(weight, exact, master, converts)
        if converts and exact.dtype != high:
            self._inexact_masters.append(weight.fqn)

    def _want(self, weight: _Weight, source: SavedTensor, held: HeldRange, converts: bool) -> None:
        if held.data.ndim != 1:
            self._want_whole(weight, source, held.data, converts)
            return
        converts = converts and source.dtype != dtype_name(held.data.dtype)
        self._ranges[converts] += _flat_ranges(source.key, weight, held)

    def _want_whole(self, weight: _Weight, source: SavedTensor, target: torch.Tensor, converts: bool) -> None:
        shards = _shards(source.key, weight, target)
        for shard in shards:
            shard.converts = converts and source.dtype != shard.dtype
        self._destination.wanted += shards

    def finish(self) -> None:
        """Decompose the flat ranges of all parameters, after the last `add`."""
        for converts, ranges in self._ranges.items():
            shards = flat_range_shards(ranges)
            for shard in shards:
                shard.converts = converts
            self._destination.wanted += shards
        if self._inexact_masters:
            self._destination.notes.append(
                f"{self._state_name}: the checkpoint has no master weights of {len(self._inexact_masters)} parameters "
                f"({self._inexact_masters[0]}, ...): they are made of its weights in low precision"
            )


def _is_same_memory(weight: HeldRange, master: HeldRange) -> bool:
    """Return whether the master weights are the weights (stage 3 in full precision)."""
    if weight.data.dtype != master.data.dtype:
        return False
    size = weight.data.element_size()
    return weight.data.data_ptr() + weight.offset * size == master.data.data_ptr() + master.offset * size


_LIST = "deepspeed_experts."
_EXPERT = re.compile(r"deepspeed_experts\.(\d+)")


def _number_experts(scan: ModuleScan) -> None:
    """Rename the parameters of experts in `scan`: local expert numbers become numbers within the layer."""
    offsets = {prefix: offset for chunk in scan.modules for prefix, offset in _expert_offsets(chunk.module) if offset}
    if not offsets:
        return

    def renamed(name: str) -> str:
        return _EXPERT.sub(lambda m: f"{_LIST}{int(m[1]) + offsets.get(name[: m.start(1)], 0)}", name)

    for tensor in scan.tensors:
        tensor.fqn = renamed(tensor.fqn)
        tensor.aliases = tuple(map(renamed, tensor.aliases))
    scan.values = {renamed(name): value for name, value in scan.values.items()}
    scan.setters = {renamed(name): owner for name, owner in scan.setters.items()}
    scan.parameters = {
        key: (renamed(fqn), tuple(map(renamed, aliases))) for key, (fqn, aliases) in scan.parameters.items()
    }


def _expert_offsets(module: nn.Module) -> list[tuple[str, int]]:
    """Return (prefix of the list of experts, number of this rank's first expert) for each layer."""
    experts_class = imported("moe.experts", "Experts")
    if experts_class is None:
        return []
    return [
        (bare + _LIST, _expert_parallel_rank(owner) * int(owner.num_local_experts))
        for _, bare, owner in walk_modules(module)
        if isinstance(owner, experts_class)
    ]


def _expert_parallel_rank(experts: Any) -> int:
    group = next((p.group_name for p in experts.parameters()), None)
    groups = imported("utils.groups", "_get_expert_parallel_group_dict")()
    return int(imported("utils.groups", "_get_expert_parallel_rank")(group)) if group in groups else 0
