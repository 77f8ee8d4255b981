"""Load optimizers over flat tensors from state by original parameter, saved at any layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import IncompatibleCheckpointError, listed
from bytecheckpoint.frameworks.base import Destination, ParameterName, SavedStates, SavedTensor
from bytecheckpoint.frameworks.optimizer_tree import comparable_bytes, unpack_tensors
from bytecheckpoint.frameworks.optimizers.flat_tensors import FlatOptimizerTensor
from bytecheckpoint.frameworks.optimizers.names import ParameterNames
from bytecheckpoint.frameworks.optimizers.restore import (
    ParameterRestore,
    PlainParameterRestore,
    load_optimizers,
)
from bytecheckpoint.frameworks.optimizers.saved_trees import SavedTrees
from bytecheckpoint.frameworks.optimizers.state_dtypes import SINGLE_VALUE_SLOTS, mark_exact_conversions
from bytecheckpoint.frameworks.optimizers.state_memory import allocate_state, is_reusable, request_state
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name
from bytecheckpoint.frameworks.tensors.flat_ranges import FlatRange, ParameterRange, flat_range_shards
from bytecheckpoint.representation.shards import TensorKey

__all__ = ["load_flat_tensors"]


def load_flat_tensors(
    state_name: str,
    views: Sequence[Optimizer],
    names: ParameterNames,
    tensors: Sequence[FlatOptimizerTensor],
    saved: SavedStates,
    destination: Destination,
    *,
    strict: bool,
) -> None:
    """Plan the load of one state.

    Args:
        state_name: name of the state.
        views: the views of the optimizers; they share the state of parameters that are not flat.
        names: names of the views' parameters.
        tensors: the flat tensors.
        saved: the checkpoint.
        destination: receives the plan.
        strict: strictness of the load about this state.

    Raises:
        IncompatibleCheckpointError: saved state of a parameter that is flat here does not have one value per element, or
            parameters that are joined here have different state or hyperparameters in the checkpoint. `Destination.check`
            finds steps that differ, before any rank installs anything.
    """
    restores = [_FlatTensorRestore(state_name, flat) for flat in tensors]
    by_placeholder = {
        id(placeholder): (restore, original)
        for restore in restores
        for original, placeholder in zip(restore.flat.ranges, restore.flat.placeholders, strict=True)
    }

    def restorer(
        optimizer: Optimizer, parameter: torch.Tensor, name: ParameterName, on_device: bool
    ) -> ParameterRestore:
        found = by_placeholder.get(id(parameter))
        if found is None:
            return PlainParameterRestore(state_name, optimizer, parameter, name, on_device)
        return found[0].add_parameter(found[1], name, on_device)

    load_optimizers(state_name, views, names, saved, destination, strict=strict, restorer=restorer)
    ranges: list[FlatRange] = []
    dtypes: dict[TensorKey, str] = {}
    for restore in restores:
        restore.complete(destination)
        for flat_range, dtype in restore.wanted:
            ranges.append(flat_range)
            dtypes[flat_range.key] = dtype
    for shard in (shards := flat_range_shards(ranges)):
        mark_exact_conversions([shard], dtypes[shard.key])
    destination.wanted += shards


class _FlatTensorRestore:
    """The load of one flat tensor's state: memory that the original parameters behind it share.

    Attributes:
        state_name: name of the state.
        flat: the tensor.
        wanted: the flat ranges to fill, each with the dtype of the saved tensor.
    """

    def __init__(self, state_name: str, flat: FlatOptimizerTensor) -> None:
        self.state_name = state_name
        self.flat = flat
        self.wanted: list[tuple[FlatRange, str]] = []
        self._parameters: dict[str, _RangeRestore] = {}  # by FQN, in the order of the flat tensor
        self._memory: dict[str, torch.Tensor] = {}  # slot -> memory of state with one value per element

    def add_parameter(self, original: ParameterRange, name: ParameterName, on_device: bool) -> _RangeRestore:
        """Make the load of one original parameter's state, which becomes a part of this load."""
        restore = _RangeRestore(self, original, name, on_device)
        self._parameters[restore.fqn] = restore
        return restore

    def memory(self, slot: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of one slot on this rank: the live tensor where it fits, else a new one."""
        target = self._memory.get(slot)
        if target is None:
            shape = self.flat.local_shape
            live = self.flat.state().get(slot)
            if is_reusable(live, shape, dtype, self._memory.values()):
                target = live
            else:
                # Zeros: the optimizer steps the padding too, which must not hold nan.
                target = torch.zeros(shape, dtype=dtype, device=self.flat.tensor.device)
                if isinstance(live, torch.Tensor) and tuple(live.shape) == shape:
                    target.copy_(live.detach())  # the load may leave some of the parameters alone
            self._memory[slot] = target
        return target

    def complete(self, destination: Destination) -> None:
        """Check that the planned parameters go together, and add the steps that remain.

        Raises:
            IncompatibleCheckpointError: parameters of one flat tensor differ in their state.
        """
        known = {fqn: restore for fqn, restore in self._parameters.items() if restore.known}
        # Whether a parameter without elements ever had state does not matter.
        known = {fqn: restore for fqn, restore in known.items() if restore.elements} or known
        if self.flat.zeroes_missing_state:
            known = self._without_stateless(known, destination)
        if not known:
            return
        if not any(r.owned for r in self.flat.ranges) and not self.flat.joined:
            return
        self._check_same("state", {fqn: restore.slots for fqn, restore in known.items()})
        self._check_same("values", {fqn: restore.values for fqn, restore in known.items()})
        unknown = [fqn for fqn, restore in self._parameters.items() if not restore.known]
        if unknown:
            destination.notes.append(
                f"{self.state_name}: {', '.join(sorted(unknown))} keep the state that their flat parameter has here"
            )
        if len(known) > 1 and any(restore.scalars for restore in known.values()):
            destination.checks.append(partial(self._check_scalars, known))
        destination.finish.append(partial(self._install, next(iter(known.values()))))

    def _without_stateless(self, known: dict[str, _RangeRestore], destination: Destination) -> dict[str, _RangeRestore]:
        """If only some parameters have saved state, let the state of the others begin at zero, and leave those out."""
        stateless = [restore for restore in known.values() if not restore.has_state]
        if not stateless or len(stateless) == len(known):
            return known
        destination.notes.append(
            f"{self.state_name}: {len(stateless)} parameters without saved state begin at zero: "
            f"{listed([restore.fqn for restore in stateless])}"
        )
        destination.finish.append(partial(self._zero, stateless))
        return {fqn: restore for fqn, restore in known.items() if restore.has_state}

    def _zero(self, stateless: list[_RangeRestore]) -> None:
        for memory in self._memory.values():
            for restore in stateless:
                offset = self.flat.offset_of(restore.original)
                memory[offset : offset + restore.original.count].zero_()

    def _check_scalars(self, known: dict[str, _RangeRestore]) -> None:
        for slot in next(iter(known.values())).scalars:
            self._check_same(slot, {fqn: restore.scalars[slot].tolist() for fqn, restore in known.items()})

    def _check_same(self, what: str, found: dict[str, Any]) -> None:
        groups: dict[bytes, list[str]] = {}
        for fqn, value in found.items():
            groups.setdefault(comparable_bytes(value), []).append(fqn)
        if len(groups) < 2:
            return
        values = "; ".join(
            f"{unpack_tensors(found[fqns[0]])!r} for {listed([*map(repr, fqns)], 3)}" for fqns in groups.values()
        )
        raise IncompatibleCheckpointError(
            f"{self.state_name}: {self.flat.description} joins parameters whose {what} differs in the checkpoint: "
            f"{values}: {self.flat.advice.on_difference}"
        )

    def _install(self, restore: _RangeRestore) -> None:
        self.flat.install({**self._memory, **restore.scalars, **restore.values} if restore.has_state else {})


class _RangeRestore:
    """The load of one original parameter's state (`ParameterRestore`).

    Attributes:
        original: the parameter and its elements on this rank.
        fqn: the parameter's FQN in the live optimizer.
        elements: number of elements of the whole parameter.
        known: True if the checkpoint has the parameter, with or without state.
        slots: slot -> dtype of the state tensors.
        scalars: slot -> memory for single values.
        values: state that is not plain tensors.
    """

    def __init__(
        self, flat_restore: _FlatTensorRestore, original: ParameterRange, name: ParameterName, on_device: bool
    ) -> None:
        self._flat_restore = flat_restore
        self.original = original
        self.fqn, self._aliases = name
        self._on_device = on_device
        self.elements = prod(original.shape)
        self.known = False
        self.slots: dict[str, str] = {}
        self.scalars: dict[str, torch.Tensor] = {}
        self.values: dict[Any, Any] = {}

    @property
    def has_state(self) -> bool:
        """True if the checkpoint has state of the parameter."""
        return bool(self.slots or self.values)

    def plan(self, saved: SavedStates, trees: SavedTrees, destination: Destination) -> bool:
        """Request this rank's elements of the state, and its single values."""
        state_name, flat = self._flat_restore.state_name, self._flat_restore.flat
        names = (self.fqn, *self._aliases)
        for found in saved.slots(state_name, names):
            destination.recognized.add(found.key)
            if flat.skips_slot(found.key.slot, trees.merged.optimizer_types):
                continue
            if (found.key.fqn, found.key.slot) in trees.nested:
                raise self._does_not_fit(found, "stands in a container")
            live = flat.state().get(found.key.slot)
            dtype = trees.dtypes.choose(
                found, flat.optimizer, self.original.shape, flat.tensor.dtype, live, on_device=self._on_device
            )
            self.slots[found.key.slot] = dtype_name(dtype)
            self._request(found, dtype, destination)
        if self._aliases:
            # Tied here, but stored separately: the load knows the other copies.
            destination.recognized.update(other.key for name in names for other in saved.slots(state_name, (name,)))
        self.values = trees.values_of(self.fqn, self._aliases)
        self.known = self.has_state or trees.knows((self.fqn, self._aliases))
        return self.has_state

    def _request(self, found: SavedTensor, dtype: torch.dtype, destination: Destination) -> None:
        flat, original = self._flat_restore.flat, self.original
        elementwise = found.global_shape == original.shape and found.key.slot not in SINGLE_VALUE_SLOTS
        if not elementwise and found.global_shape.count(1) != len(found.global_shape):
            raise self._does_not_fit(found, f"has shape {found.global_shape}")
        if not original.owned and not flat.joined:
            return
        if elementwise:
            target = self._flat_restore.memory(found.key.slot, dtype)
            if target.dtype == dtype:  # else `complete` refuses
                flat_range = original.flat_range(found.key, target, flat.offset_of(original))
                flat_range.requires_grad = False
                self._flat_restore.wanted.append((flat_range, found.dtype))
        else:
            target = allocate_state(found, flat.tensor.detach(), dtype, on_device=self._on_device)
            self.scalars[found.key.slot] = target
            request_state(destination, found, target)

    def _does_not_fit(self, found: SavedTensor, form: str) -> IncompatibleCheckpointError:
        advice = self._flat_restore.flat.advice
        return IncompatibleCheckpointError(
            f"{found.key} {form}, and {advice.framework} keeps the parameter of shape {self.original.shape} flat here: "
            f"state that does not follow its elements cannot be loaded; {advice.on_load}"
        )

    def install(self) -> None:
        """Do nothing: the flat tensor's state is installed once for all its parameters."""

    def clear(self) -> None:
        """Do nothing, as in `install`."""
