"""Name the states of Megatron's optimizers in files of ranks, and prove each name.

torch numbers the parameters of an optimizer group by group, and Megatron has those of a group in the order of the model,
which the file has. Nothing says which group a parameter has, or whether it has one: it takes the next state of a group that
has its shape, and whose fp32 elements, where the optimizer has them, round to the parameter bit for bit. The same search
from the last parameter on has to lead to the same.

A distributed optimizer has flat tensors beside the file: the parameters of a chunk and dtype in the reverse order of the
model, each from the next multiple of 64 elements on, or right behind the one before, where a bucket begins. The fp32
elements say which.

The first and the last 4096 elements of each tensor are compared. To compare all would make every list, and every load of
the weights alone, read all weights and fp32 elements; and a search that leaves one choice by less has found it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import msgspec

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError, listed
from bytecheckpoint.formats.files import RangedFile, damage, open_files
from bytecheckpoint.formats.foreign import ForeignColumns
from bytecheckpoint.formats.meanings import StoredTensor, dtype_name
from bytecheckpoint.formats.megatron_buckets import ALIGNMENT
from bytecheckpoint.formats.megatron_names import (
    PARAM,
    SLOTS,
    STEP,
    add_steps,
    is_of_expert,
    named_groups,
    param_groups,
    settings_of,
)  # fmt: skip
from bytecheckpoint.formats.rank_parts import DividedTensor, FlatRanges, replicated
from bytecheckpoint.formats.rounding import is_rounded
from bytecheckpoint.formats.torch_save import TorchFiles
from bytecheckpoint.representation.boxes import row_major_of
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.values.tree import TensorRef
from bytecheckpoint.storage import Storage

__all__ = ["JoinedOptimizer", "RankParameter"]

_FP32: Final = SLOTS[PARAM]
#: Elements that are compared at the beginning of a tensor, and at its end.
_COMPARED: Final = 4096

#: State of a parameter by slot: tensors, or a number of steps.
_State = Mapping[str, Any]
#: Settings of a param group, and the states of its parameters.
_NumberedGroup = tuple[Mapping[str, Any], Sequence[_State]]


@dataclass(slots=True)
class RankParameter:
    """A tensor of the model in the file of a rank.

    Attributes:
        chunk: number of its chunk of the model.
        name: name in the chunk.
        weight: the tensor.
        state: its state in the optimizer, {} without one.
        group: settings of its param group; None if the file does not say it.
    """

    chunk: int
    name: str
    weight: StoredTensor
    state: _State = field(default_factory=dict)
    group: Mapping[str, Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.weight.shape


class _StateSearch:
    """The search for the parameters of the optimizers of one rank.

    Args:
        columns: places of the storages in the files.
        opened: function that returns a file by its number.
        parameters: parameters of the rank, in the order of the model.
    """

    def __init__(
        self, columns: ForeignColumns, opened: Callable[[int], RangedFile], parameters: Sequence[RankParameter]
    ) -> None:
        self._columns, self._opened, self._parameters = columns, opened, parameters
        self._is_master = cache(self._compare)

    def add_numbered(self, groups: Sequence[_NumberedGroup]) -> None:
        """Give the parameters the states of param groups."""
        parameters, last = self._parameters, len(self._parameters) - 1
        found = self._in_order(parameters, groups)
        reverse = self._in_order(parameters[::-1], [(settings, states[::-1]) for settings, states in groups])
        if different := {k for k, _ in found.items() ^ {(last - k, n) for k, n in reverse.items()}}:
            names = listed(sorted(parameters[k].name for k in different))
            raise IncompatibleCheckpointError(f"{names} fit the same states")
        states = [iter(states) for _, states in groups]
        for k, n in found.items():
            parameters[k].group, parameters[k].state = groups[n][0], next(states[n])

    def _in_order(self, parameters: Sequence[RankParameter], groups: Sequence[_NumberedGroup]) -> dict[int, int]:
        """Return the number of the group of each parameter that takes the next state of one, by its position."""
        at, found = [0] * len(groups), dict[int, int]()
        experts = any(_is_of_experts(settings) for settings, _ in groups)
        for k, parameter in enumerate(parameters):
            fitting = [
                n
                for n, (settings, states) in enumerate(groups)
                if _is_of_experts(settings) == (experts and is_of_expert(parameter.name))
                and any(self._fits(parameter, state) for state in states[at[n] : at[n] + 1])
            ]
            if len(fitting) > 1:
                raise IncompatibleCheckpointError(f"{parameter.name!r} fits the next states of groups {fitting}")
            for n in fitting:
                found[k] = n
                at[n] += 1
        for n, (_, states) in enumerate(groups):
            if at[n] < len(states):
                shapes = {slot: [*value.shape] for slot, value in states[at[n]].items() if slot != STEP}
                free = [p.name for k, p in enumerate(parameters) if k not in found and [*p.shape] in shapes.values()]
                text = f"a state of group {n} fits no parameter ({shapes}); without state are {listed(free) or 'none'}"
                raise IncompatibleCheckpointError(text)
        return found

    def _fits(self, parameter: RankParameter, state: _State) -> bool:
        """Return whether a state may be that of a parameter, by its shapes and its fp32 elements."""
        shapes = {value.shape for slot, value in state.items() if slot != STEP}
        return shapes == {parameter.shape} and (_FP32 not in state or self._is_master(state[_FP32], parameter.weight))

    def _compare(self, master: StoredTensor, weight: StoredTensor) -> bool:
        """Return whether elements of a master round to those of a weight."""
        dense, known = row_major_of(weight.shape), weight.dtype in {"bfloat16", "float16", "float32"}
        if not known or master.dtype != "float32" or {master.strides, weight.strides} != {dense}:
            return False
        places = ((*self._columns.places[one.storage.key], one.start) for one in (master, weight))
        (high, first), low = ((self._opened(file), begin + start) for file, begin, start in places)
        size = math.prod(weight.shape)
        ends = [(at, min(at + _COMPARED, size)) for at in {0, max(size - _COMPARED, 0)}]
        return all(is_rounded((high, first + 4 * at), low, weight.dtype, (at, end)) for at, end in ends)

    def add_flat(self, optimizers: Sequence[Any], files: Sequence[Any]) -> None:
        """Give the parameters the states in flat tensors of distributed optimizers; None for one that other ranks have."""
        of_experts = [any(map(_is_of_experts, one["optimizer"]["param_groups"])) for one in optimizers]
        for own, buffers in zip(of_experts, files, strict=True):
            if buffers is not None and not buffers.get("buckets_coalesced"):
                raise IncompatibleCheckpointError("flat tensors of single buckets are not read")
            seen = Counter[str]()
            for number in filter(lambda key: type(key) is int, buffers or ()):
                ((dtypes, tensors),) = buffers[number].items()
                dtype = dtype_name(dtypes[0])
                members = [p for p in self._parameters if not any(of_experts) or is_of_expert(p.name) == own]
                members = [p for p in members if p.weight.dtype == dtype]
                chunk = sorted({p.chunk for p in members})[seen[dtype]]
                seen[dtype] += 1
                self._add_buffer(f"flat tensor {number} of {dtype}", tensors, [p for p in members if p.chunk == chunk])

    def _add_buffer(self, label: str, tensors: Mapping[str, Any], members: Sequence[RankParameter]) -> None:
        """Give the parameters of a chunk their elements of flat tensors."""
        size, bucket, end = tensors["numel_unpadded"], 0, 0
        flat = {SLOTS.get(slot, slot): value for slot, value in tensors.items() if type(value) is StoredTensor}
        if _FP32 not in flat or any(value.shape != (size,) or value.strides != (1,) for value in flat.values()):
            raise ValueError(f"{label} has not {size} elements in all slots")
        placed, free, lost = list[RankParameter](), list[RankParameter](), "none"
        for parameter in reversed(members):
            aligned = bucket + -(-(end - bucket) // ALIGNMENT) * ALIGNMENT
            states = {first: _cut(flat, first, parameter.shape) for first in (aligned, end)}
            inside = [first for first in states if first + math.prod(parameter.shape) <= size]
            fitting = [first for first in inside if self._fits(parameter, states[first])]
            if len(fitting) > 1:
                raise IncompatibleCheckpointError(f"{parameter.name!r} fits two places of {label}")
            for first in fitting:
                parameter.state, bucket = states[first], bucket if first == aligned else first
                end, lost = first + math.prod(parameter.shape), "none"
            lost = parameter.name if not fitting and lost == "none" else lost
            (placed if fitting else free).append(parameter)
        if end != size:
            text = f"from element {end} on, {label} rounds to the weights of no parameter; the next one is {lost}"
            raise IncompatibleCheckpointError(text)
        for parameter, other in itertools.product(free, placed):
            if self._fits(parameter, other.state):
                raise IncompatibleCheckpointError(f"{parameter.name} and {other.name} fit the same state")


class JoinedOptimizer:
    """The optimizer of all ranks, whose state follows its parameters.

    Attributes:
        unproven: reason why the optimizer is left out, "" if it is not.
        notes: facts that a user should know.
    """

    def __init__(self, storage: Storage, files: TorchFiles, ranges: FlatRanges) -> None:
        self.unproven = ""
        self.notes: list[str] = []
        self._storage, self._files, self._ranges = storage, files, ranges
        self._saved: list[Any] = []  # entries of the optimizer
        self._held: dict[str, RankParameter] = {}  # of the first rank, by the name in the whole model
        self._states: dict[str, dict[str, Any]] = {}

    def name_states(self, file: RangedFile, flat: str, saved: Any, parameters: Sequence[RankParameter]) -> None:
        """Give the parameters of a rank's file their states from its entry of the optimizer, and from a file beside it."""
        self._saved += [] if saved is None else [saved]
        if self.unproven or (saved is None and not flat):
            return
        single = [*{(p.weight.storage.key, p.weight.start): p for p in reversed(parameters)}.values()][::-1]
        try:
            with ExitStack() as stack:
                beside, value = stack.enter_context(self._files.open(flat)) if flat else (file, None)
                names = [one.name for one in self._ranges.columns.files]
                opened = stack.enter_context(open_files(self._storage, names))
                search = _StateSearch(self._ranges.columns, opened, single)
                stack.enter_context(damage(beside, "Megatron"))
                if flat:
                    search.add_flat(_chained(saved), _chained(value))
                else:
                    search.add_numbered([group for one in _chained(saved) for group in _groups(one)])
        except (CorruptCheckpointError, IncompatibleCheckpointError) as error:
            reason = f"the optimizer is left out, because nothing proves whose its states are: {error}"
            self.unproven = f"{reason}; load it with Megatron, and save it with this package"
            self.notes = [self.unproven]

    def add(self, fqn: str, divided: DividedTensor, rank: int, parameter: RankParameter) -> None:
        """Add the state of a parameter of a rank; arguments as for `FlatRanges.add_whole`."""
        if self.unproven or not parameter.state:
            return
        if self._facts(self._held.setdefault(fqn, parameter)) != self._facts(parameter):
            raise ValueError(f"tensor-parallel ranks have other slots, settings or steps of {fqn!r}")
        for slot, value in parameter.state.items():
            own = (divided, rank) if slot != STEP else (replicated([()]), 0)
            if type(value) is StoredTensor and own[1] == rank:
                self._ranges.add_whole(("optimizer", f"state.{fqn}.{slot}"), *own, value)
                self._states.setdefault(fqn, {})[slot] = TensorRef(f"state.{fqn}.{slot}")

    def _facts(self, parameter: RankParameter) -> tuple[Any, ...]:
        """Return what the slices of a parameter have in common."""
        step, settings = parameter.state.get(STEP), parameter.group or {}
        step = self._files.crcs[step.storage.key] if type(step) is StoredTensor else settings.get(STEP, step)
        return {*parameter.state}, settings_of(settings), step

    def tree(self, args: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, bytes]]:
        """Return the tree of the optimizer, None without one, and the files of it that no folder holds."""
        if self.unproven or not self._saved:
            return None, {}
        columns, numbers = self._ranges.columns, self._ranges.numbers
        flat = {fqn: columns.shapes[numbers["model", fqn]] for fqn, own in self._held.items() if own.group is None}
        states = {fqn: self._held[fqn].state for fqn in flat}
        named = named_groups(param_groups(self._saved) if flat else (), flat, states, args)
        self.notes += named.notes
        for fqn, own in self._held.items():
            if own.group is not None:
                settings, step = settings_of(own.group), own.state.get(STEP, own.group.get(STEP))
                group = next((known for known in named.groups if settings_of(known) == settings), None)
                if group is None:
                    named.groups.append(group := {**settings, "params": []})
                group["params"].append(fqn)
                named.steps.update({fqn: float(step)} if isinstance(step, int | float) else {})
        return {"state": self._states, "param_groups": named.groups}, add_steps(columns, self._states, named.steps)


def _chained(value: Any) -> list[Any]:
    return value if type(value) is list else [value]


def _is_of_experts(group: Mapping[str, Any]) -> bool:
    return bool(group.get("is_expert_parallel"))


def _cut(flat: Mapping[str, StoredTensor], first: int, shape: tuple[int, ...]) -> _State:
    """Return elements of flat tensors as tensors of a shape."""
    strides, at = row_major_of(shape), {slot: first * itemsize(value.dtype) for slot, value in flat.items()}
    return {
        slot: msgspec.structs.replace(value, start=value.start + at[slot], shape=shape, strides=strides)
        for slot, value in flat.items()
    }


def _groups(saved: Mapping[str, Any]) -> list[_NumberedGroup]:
    """Return the param groups of the `state_dict` of an optimizer."""
    inner, masters = saved if "param_groups" in saved else saved["optimizer"], saved.get("fp32_from_fp16_params")
    if "state" not in inner:
        raise IncompatibleCheckpointError("the file of flat tensors, distrib_optim.pt, is missing")
    groups, states = inner["param_groups"], inner["state"]
    numbers = [number for group in groups for number in group["params"]]
    if numbers != [*range(len(numbers))] or not states.keys() <= {*numbers}:
        raise ValueError("the parameters of the groups are not numbered through")
    high: list[list[dict[str, Any]]] = [[{}] * len(group["params"]) for group in groups]
    if masters is not None:
        high = [[{_FP32: master} for master in of_group] for of_group in masters]
    if [*map(len, high)] != [len(group["params"]) for group in groups]:
        raise ValueError("there are not as many fp32 tensors as parameters in the groups")
    found: list[_NumberedGroup] = []
    for group, of_group in zip(groups, high, strict=True):
        both = [{**master, **states.get(n, {})} for n, master in zip(group["params"], of_group, strict=True)]
        found.append((group, [{slot: value for slot, value in one.items() if value is not None} for one in both]))
    return found
