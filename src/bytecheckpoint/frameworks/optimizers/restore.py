"""Load optimizers: state and hyperparameters by parameter name.

Optimizer.load_state_dict is not used: it matches by position, and casts all state to the parameter's dtype. State goes
straight into `optimizer.state`, in the dtype that the optimizer makes itself (`state_dtypes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import IncompatibleCheckpointError, listed
from bytecheckpoint.frameworks.base import (
    Destination,
    ParameterName,
    SavedStates,
    SavedTensor,
    Strict,
    is_strict,
)
from bytecheckpoint.frameworks.optimizers.capture import layout_of
from bytecheckpoint.frameworks.optimizers.hyperparameters import load_globals, load_hyperparameters
from bytecheckpoint.frameworks.optimizers.master_weights import is_unused_master
from bytecheckpoint.frameworks.optimizers.names import ParameterNames, ParamGroup, named_groups
from bytecheckpoint.frameworks.optimizers.own_values import load_own_values
from bytecheckpoint.frameworks.optimizers.saved_trees import SavedTrees
from bytecheckpoint.frameworks.optimizers.slots import SlotCheck, slots_of
from bytecheckpoint.frameworks.optimizers.state_dtypes import converts_exactly
from bytecheckpoint.frameworks.optimizers.state_memory import allocate_state, request_state
from bytecheckpoint.frameworks.optimizers.wrapped import is_wrapped, make_wrapped, wrapped_slots
from bytecheckpoint.frameworks.tensors.allocation import is_writable
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name, dtype_named
from bytecheckpoint.representation.shards import MASTER, TensorKey

__all__ = ["ParameterRestore", "PlainParameterRestore", "Restorer", "load_optimizers"]


class ParameterRestore(Protocol):
    """The load of one parameter's optimizer state."""

    def plan(self, saved: SavedStates, trees: SavedTrees, destination: Destination) -> bool:
        """Request the state tensors; return False when the checkpoint holds no state of this parameter."""

    def install(self) -> None:
        """Replace the parameter's state by the loaded one."""

    def clear(self) -> None:
        """Remove the parameter's state: the checkpoint knows the parameter, and holds no state of it."""


#: Slots of torch's optimizers with one value for each element of the parameter.
_BY_ELEMENT = {
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "step_size", "sum",
}  # fmt: skip

#: Makes the load of one parameter from (optimizer, parameter, name, whether scalars live on the parameter's device).
Restorer = Callable[[Optimizer, torch.Tensor, ParameterName, bool], ParameterRestore]


def load_optimizers(
    state_name: str,
    optimizers: Sequence[Optimizer],
    names: ParameterNames,
    saved: SavedStates,
    destination: Destination,
    *,
    strict: Strict,
    restorer: Restorer | None = None,
) -> None:
    """Plan the load of one state into live optimizers.

    Args:
        state_name: name of the state.
        optimizers: all of the state.
        names: names of their parameters.
        saved: the checkpoint.
        destination: receives the plan.
        strict: strictness of the load, for all states or by state.
        restorer: makes the load of one parameter. None: `PlainParameterRestore`, for plain tensors and DTensors.

    Raises:
        IncompatibleCheckpointError: parameters of one group here had different hyperparameters in the checkpoint, and
            `strict` is set.
    """
    groups = named_groups(state_name, optimizers, names)
    numbered = saved.number(state_name, [(fqn, *aliases) for group in groups for fqn, aliases in group.names])
    trees = SavedTrees(state_name, saved, groups)
    if numbered:
        _check_order(state_name, groups, trees, saved)
    types = trees.merged.optimizer_types
    stateless: list[str] = []
    foreign: list[str] = []
    foreign_slots: set[str] = set()
    others: list[Optimizer] = []
    without_master: list[str] = []
    for index, group in enumerate(groups):
        saved_groups = trees.groups_of(group)
        for parameter, (fqn, _), found in zip(group.params, group.names, saved_groups, strict=True):
            # ZeRO's groups have trained parameters only; a frozen one needs no hyperparameters.
            if not found and parameter.requires_grad:
                destination.missing.append(f"{state_name}/param_groups/{fqn}")
        settings = load_hyperparameters(
            state_name, index, group, saved_groups, destination, strict=is_strict(strict, state_name)
        )
        check = SlotCheck(group.optimizer, types)
        if check.is_other_algorithm():
            others.append(group.optimizer)
        on_device = any(settings.get(key, group.live.get(key)) for key in ("capturable", "fused"))
        for parameter, name, found in zip(group.params, group.names, saved_groups, strict=True):
            slots = {slot.key.slot: slot.key for slot in saved.slots(state_name, (name[0], *name[1]))}
            live = group.optimizer.state.get(parameter) or {}
            if check.is_foreign(live, {*slots, *trees.values_of(*name)}):
                foreign.append(name[0])
                foreign_slots.update(slots)
                destination.recognized.update(slots.values())
                destination.finish.append(partial(group.optimizer.state.pop, parameter, None))
                continue
            restore: ParameterRestore
            if restorer is None:
                restore = PlainParameterRestore(state_name, group.optimizer, parameter, name, on_device)
            else:
                restore = restorer(group.optimizer, parameter, name, on_device)
            if restore.plan(saved, trees, destination):
                destination.finish.append(restore.install)
            elif found:
                destination.finish.append(restore.clear)
                stateless.append(name[0])
            master = saved.find(state_name, (name[0], *name[1]), MASTER)
            if (
                master is not None
                and not converts_exactly(master.dtype, dtype_name(parameter.dtype))
                and is_unused_master(MASTER, group.optimizer.state.get(parameter) or {}, group.optimizer, types)
            ):
                without_master.append(name[0])
    if foreign or others:
        of = f" of {len(foreign)} parameters ({listed(foreign)})" if foreign else ""
        names_here = sorted({type(o).__name__ for o in others or optimizers})
        there = ", ".join(sorted(types or foreign_slots))  # other programs do not say their class
        destination.mismatches.append(
            f"{state_name}: the checkpoint has the state{of} of another algorithm ({there}), with which "
            f"{', '.join(names_here)} cannot continue"
        )
    if without_master:
        destination.notes.append(
            f"{state_name}: the master weights of {len(without_master)} parameters are left out, since the optimizer "
            f"here steps weights in lower precision: {listed(without_master)}"
        )
    if stateless:
        destination.notes.append(
            f"{state_name}: {len(stateless)} parameters have no state in the checkpoint and none now: {listed(stateless)}"
        )
    load_globals(state_name, optimizers, trees, destination)
    load_own_values(state_name, optimizers, trees.merged.own_values, destination, is_foreign=saved.is_foreign)
    if saved.is_foreign:
        own = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]  # others are views of engines
        destination.finish += [partial(_convert_state, optimizer) for optimizer in own]


def _convert_state(optimizer: Optimizer) -> None:
    """Let an optimizer convert what torch's before 1.12 counted in numbers, and one that is not torch's all its state."""
    numbers = any(isinstance(one, dict) and type(one.get("step")) in (int, float) for one in optimizer.state.values())
    if numbers or not type(optimizer).__setstate__.__module__.startswith("torch."):
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _follows(shape: Sequence[int], parameter: Sequence[int]) -> bool:
    """Return whether a state may be that of a parameter: of each element, each row or column, or one for all (NovoGrad)."""
    if not shape:
        return True
    return len(shape) == len(parameter) and all(n in (1, of) for n, of in zip(shape, parameter, strict=True))


def _check_order(state_name: str, groups: Sequence[ParamGroup], trees: SavedTrees, saved: SavedStates) -> None:
    """Check that parameters that a checkpoint knows by number are those here, as far as it says what they are.

    Raises:
        IncompatibleCheckpointError: the groups have other sizes, or the state of a parameter another shape.
    """
    here = [len(group.params) for group in groups]
    if here != trees.merged.group_sizes:
        raise IncompatibleCheckpointError(
            f"{state_name}: the checkpoint knows parameters by their numbers only, in groups of "
            f"{listed(list(map(str, trees.merged.group_sizes)))}, and the optimizer here has groups of "
            f"{listed(list(map(str, here)))}: give it the groups of the run that saved (of FSDP1 with flat parameters, "
            "FSDP.optim_state_dict has their names)"
        )
    shapes: set[tuple[int, ...]] = set()
    wrong: list[str] = []
    for group in groups:
        for parameter, (fqn, aliases) in zip(group.params, group.names, strict=True):
            for found in saved.slots(state_name, (fqn, *aliases)):
                shape = found.global_shape
                if found.key.slot not in _BY_ELEMENT:
                    continue
                shapes.add(shape)
                if not _follows(shape, parameter.shape):
                    wrong.append(
                        f"{found.key} has shape {shape}, and the parameter with this number here, {fqn}, has "
                        f"{tuple(parameter.shape)}: the optimizer's parameters have another order"
                    )
    # Optimizers of other packages have forms of their own (a part of the elements, all in one row).
    here_too = {tuple(parameter.shape) for group in groups for parameter in group.params}
    if wrong and (
        any(slots_of(type(group.optimizer)) for group in groups)
        or all(any(_follows(shape, one) for one in here_too) for shape in shapes)
    ):
        raise IncompatibleCheckpointError(wrong[0])


class PlainParameterRestore:
    """The load of the optimizer state of one plain tensor or DTensor."""

    __slots__ = ("_aliases", "_fqn", "_on_device", "_optimizer", "_parameter", "_state_name", "_tensors", "_values")

    def __init__(
        self, state_name: str, optimizer: Optimizer, parameter: torch.Tensor, name: ParameterName, on_device: bool
    ) -> None:
        self._state_name = state_name
        self._optimizer = optimizer
        self._parameter = parameter
        self._fqn, self._aliases = name
        self._on_device = on_device
        self._tensors: dict[str, torch.Tensor] = {}
        self._values: dict[Any, Any] = {}

    def plan(self, saved: SavedStates, trees: SavedTrees, destination: Destination) -> bool:
        """Request the state tensors; return False when the checkpoint holds no state of this parameter."""
        names = (self._fqn, *self._aliases)
        live = self._optimizer.state.get(self._parameter) or {}
        used: set[int] = set()
        values, nested = trees.take_values(self._fqn, self._aliases)
        wrapped = wrapped_slots(values)
        self._values = {slot: value for slot, value in values.items() if slot not in wrapped}
        inside: dict[str, dict[str, SavedTensor]] = {slot: {} for slot in wrapped}
        stepped = self._parameter.dtype
        slots: list[SavedTensor] = []
        for found in saved.slots(self._state_name, names):
            destination.recognized.add(found.key)
            outer, _, name = found.key.slot.rpartition(".")
            if outer in wrapped:
                inside[outer][name] = found
            elif not is_unused_master(found.key.slot, live, self._optimizer, trees.merged.optimizer_types):
                slots.append(found)
                if found.key.slot == MASTER:
                    stepped = dtype_named(found.dtype)
        for slot, described in wrapped.items():
            key = TensorKey(self._state_name, self._fqn, slot)
            self._check_takes(key, described[0], live, trees)
            self._tensors[slot] = make_wrapped(
                key, described, inside[slot], self._parameter, live.get(slot), self._aliases, destination.wanted
            )
        for found in slots:
            slot = found.key.slot
            target = nested.get((found.key.fqn, slot))
            if target is None:
                target = live.get(slot)
                shape = tuple(self._parameter.shape)
                dtype = trees.dtypes.choose(found, self._optimizer, shape, stepped, target, on_device=self._on_device)
                if not (
                    isinstance(target, torch.Tensor) and id(target) not in used and self._fits(target, found, dtype)
                ):
                    target = allocate_state(found, self._parameter, dtype, on_device=self._on_device)
                used.add(id(target))
                self._tensors[slot] = target
            like = self._layout_of(target, found)
            request_state(destination, found, target, aliases=self._aliases, like=like)
        if self._aliases:
            # Tied here, but stored separately (two pipeline stages): the load knows the other copies.
            destination.recognized.update(
                other.key for name in names for other in saved.slots(self._state_name, (name,))
            )
        return bool(self._tensors or self._values)

    def _check_takes(self, key: TensorKey, form: str, live: Mapping[Any, Any], trees: SavedTrees) -> None:
        """Refuse state in a form of another optimizer's own, which the step of this one may not know."""
        if type(self._optimizer).__name__ not in trees.merged.optimizer_types and not is_wrapped(live.get(key.slot)):
            raise IncompatibleCheckpointError(
                f"{key} is a {form} in the checkpoint, of {', '.join(sorted(trees.merged.optimizer_types))}: "
                f"{type(self._optimizer).__name__} cannot continue with it; leave the optimizer out, or use that one"
            )

    def install(self) -> None:
        """Replace the parameter's state by the loaded one."""
        state = self._optimizer.state[self._parameter]
        state.clear()
        state.update(self._tensors)
        state.update(self._values)

    def clear(self) -> None:
        """Remove the parameter's state."""
        self._optimizer.state.pop(self._parameter, None)

    def _fits(self, live: torch.Tensor, found: SavedTensor, dtype: torch.dtype) -> bool:
        whole = live if self._layout_of(live, found) is None else self._parameter
        return tuple(whole.shape) == found.global_shape and live.dtype == dtype and is_writable(live)

    def _layout_of(self, live: torch.Tensor, found: SavedTensor) -> torch.Tensor | None:
        """Return `layout_of` a tensor that is a part only if the saved one is as large as the parameter."""
        is_by_element = found.global_shape == tuple(self._parameter.shape)
        return layout_of(live, self._parameter, {}) if is_by_element else None
