"""Modules of an engine: low-precision weights and master weights are filled together, so that they always agree.

A module that ZeRO does not divide is an ordinary one. Stage 3 leaves its parameters empty: their names are those of the
module, their elements the shards. Any parameter may have a master weight, of which this rank has a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.deepspeed.experts import number_experts
from bytecheckpoint.frameworks.deepspeed.partitions import (
    Run,
    agrees,
    forget_copies,
    gathered,
    is_sharded,
    master_run,
    shape_of,
    shard_run,
)
from bytecheckpoint.frameworks.irregular import Fragment, fragment_shards
from bytecheckpoint.frameworks.leaves import add_shards, dtype_name
from bytecheckpoint.frameworks.masters import precise
from bytecheckpoint.frameworks.modules import ModuleScan, capture_modules, load_modules, scan_modules
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey

__all__ = ["ZeroModules", "capture_zero_modules", "load_zero_modules", "scan_zero_modules"]

# What float32 holds exactly, so that a master weight may be made of it.
_WITHIN_FLOAT32 = frozenset({"float32", "bfloat16", "float16"})


@dataclass(slots=True)
class _Weight:
    """One parameter, with all of its names."""

    fqn: str
    aliases: tuple[str, ...]
    parameter: torch.Tensor

    @property
    def names(self) -> tuple[str, ...]:
        return (self.fqn, *self.aliases)


@dataclass(slots=True)
class ZeroModules:
    """All modules of one kind.

    Attributes:
        rest: everything that is whole here: parameters of stages up to 2, buffers, extra states.
        sharded: parameters of stage 3.
        modules: all of the kind.
        parameters: id of a parameter -> (FQN, aliases).
    """

    rest: ModuleScan
    sharded: list[_Weight]
    modules: Sequence[nn.Module]
    parameters: dict[int, tuple[str, tuple[str, ...]]]


def scan_zero_modules(kind: str, modules: Sequence[nn.Module]) -> ZeroModules:
    """Names and tensors of `modules`.

    Raises:
        UsageError: two modules use one FQN for different tensors.
    """
    scan = scan_modules(kind, modules)
    number_experts(scan)
    sharded = [_Weight(t.fqn, t.aliases, t.value) for t in scan.tensors if is_sharded(t.value)]
    rest = replace(scan, tensors=[t for t in scan.tensors if not is_sharded(t.value)])
    return ZeroModules(rest, sharded, modules, scan.parameters)


def capture_zero_modules(kind: str, scan: ZeroModules) -> LiveState:
    """The shards and values of a scanned kind.

    Raises:
        UsageError: a shard is not in memory; names it.
    """
    state = capture_modules(kind, scan.rest)
    fragments = []
    for weight in scan.sharded:
        key = TensorKey(kind, weight.fqn)
        fragments += _fragments(key, weight, shard_run(str(key), weight.parameter))
    state.shards += fragment_shards(fragments)
    return state


def _fragments(key: TensorKey, weight: _Weight, run: Run) -> list[Fragment]:
    shape = shape_of(weight.parameter)
    if not run.count and 0 not in shape:
        return []
    fragment = Fragment(key, shape, run.start, run.data, run.first, run.count)
    fragment.aliases, fragment.requires_grad = weight.aliases, weight.parameter.requires_grad
    return [fragment]


def load_zero_modules(
    kind: str,
    scan: ZeroModules,
    saved: SavedStates,
    into: Destination,
    *,
    masters: str | None,
    runs: Mapping[int, Run],
) -> None:
    """Plan the load of a scanned kind, in place.

    Args:
        kind: name of the state.
        scan: of its modules.
        saved: the checkpoint.
        into: receives the plan.
        masters: the kind that holds the master weights; None: nothing says so.
        runs: id of a parameter -> its master weights, where the parameter itself does not tell.

    Raises:
        UsageError: a shard is not in memory, or the engine is needed to tell the master weights; names it.
    """
    whole: list[Any] = []
    weights: list[tuple[_Weight, Run]] = []
    for tensor in scan.rest.tensors:
        run = runs.get(id(tensor.value))
        if run is None and (run := master_run(tensor.value)) is not None and not agrees(tensor.value, run):
            raise UsageError(
                f"{kind}/{tensor.fqn}: what this parameter leads to are not its master weights (gradients go round robin, "
                "or the weights were changed by hand): pass the engine instead of its module"
            )
        if run is None:
            whole.append(tensor)
        else:
            weights.append((_Weight(tensor.fqn, tensor.aliases, tensor.value), run))
    load_modules(kind, replace(scan.rest, tensors=whole), saved, into)
    load = _Load(kind, saved, into, masters)
    for weight, run in weights:
        load.add(weight, run)
    for weight in scan.sharded:
        load.add(weight, master_run(weight.parameter))
    load.finish()


class _Load:
    """The load of parameters that ZeRO divides, or has master weights of."""

    def __init__(self, kind: str, saved: SavedStates, into: Destination, masters: str | None) -> None:
        self._kind = kind
        self._saved = saved
        self._into = into
        self._masters = masters
        # By whether elements are converted as they arrive.
        self._fragments: dict[bool, list[Fragment]] = {False: [], True: []}
        self._made: list[str] = []

    def add(self, weight: _Weight, master: Run | None) -> None:
        """Ask for what this rank has of one parameter: its elements, all or a shard, and its master weights."""
        found = self._claimed(weight)
        if found is None:
            return
        parameter = weight.parameter
        low = dtype_name(parameter.dtype)
        high = low if master is None else dtype_name(master.data.dtype)
        exact = precise(self._saved, found, weight.names, high, self._masters)
        source = found if found.dtype == low else exact
        # Rounding the weights is what the engine does with its master weights after every step.
        mixed = high != low and exact.dtype in _WITHIN_FLOAT32 and high == "float32"
        shard = None
        if is_sharded(parameter):
            shard = shard_run(str(found.key), parameter)
            self._want(weight, source, shard, mixed)
            if (copy := gathered(parameter)) is not None:
                self._want_whole(weight, source, copy, mixed)
            self._into.finish.append(partial(forget_copies, parameter))
        else:
            self._want_whole(weight, source, parameter, mixed)
        if master is None or (shard is not None and _same_memory(shard, master)):
            return
        self._want(weight, exact, master, mixed)
        if mixed and exact.dtype != high:
            self._made.append(weight.fqn)

    def _claimed(self, weight: _Weight) -> SavedTensor | None:
        """What the checkpoint has under any of the names; all of them are accounted for."""
        found = self._saved.find(self._kind, weight.names)
        if found is None:
            self._into.missing.append(str(TensorKey(self._kind, weight.fqn)))
            return None
        self._into.claimed.add(found.key)
        for alias in weight.aliases:
            if (other := self._saved.find(self._kind, (alias,))) is not None:
                self._into.claimed.add(other.key)
        return found

    def _want(self, weight: _Weight, source: SavedTensor, run: Run, mixed: bool) -> None:
        if run.data.ndim != 1:
            self._want_whole(weight, source, run.data, mixed)
            return
        converts = mixed and source.dtype != dtype_name(run.data.dtype)
        self._fragments[converts] += _fragments(source.key, weight, run)

    def _want_whole(self, weight: _Weight, source: SavedTensor, target: torch.Tensor, mixed: bool) -> None:
        shards: list[LiveShard] = []
        add_shards(shards, source.key, target, aliases=weight.aliases)
        for shard in shards:
            shard.converts = mixed and source.dtype != shard.dtype
        self._into.wanted += shards

    def finish(self) -> None:
        """All parameters have been added."""
        for converts, fragments in self._fragments.items():
            shards = fragment_shards(fragments)
            for shard in shards:
                shard.converts = converts
            self._into.wanted += shards
        if self._made:
            self._into.notes.append(
                f"{self._kind}: the checkpoint has no master weights of {len(self._made)} parameters "
                f"({self._made[0]}, ...): they are made of its weights in low precision"
            )


def _same_memory(one: Run, other: Run) -> bool:
    """Whether the master weights are the weights (stage 3 in full precision)."""
    if one.data.dtype != other.data.dtype:
        return False
    size = one.data.element_size()
    return one.data.data_ptr() + one.first * size == other.data.data_ptr() + other.first * size
