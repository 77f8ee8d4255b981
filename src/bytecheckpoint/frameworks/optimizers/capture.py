"""Capture optimizers: state and hyperparameters by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.base import ParameterName
from bytecheckpoint.frameworks.objects.capture import tensor_name
from bytecheckpoint.frameworks.optimizer_tree import comparable_bytes, pack_tensors
from bytecheckpoint.frameworks.optimizers.names import (
    NOT_HYPERPARAMETERS,
    ParameterNames,
    ParamGroup,
    as_optimizers,
    named_groups,
)
from bytecheckpoint.frameworks.optimizers.own_values import pack_own_values
from bytecheckpoint.frameworks.optimizers.wrapped import capture_wrapped, is_wrapped
from bytecheckpoint.frameworks.recapture import again_with_optimizers
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor, local_tensor
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey
from bytecheckpoint.representation.values.codec import encode, key_of_path
from bytecheckpoint.representation.values.tree import state_reference

__all__ = ["capture_optimizers", "layout_of"]


def capture_optimizers(
    state_name: str,
    optimizers: Sequence[Optimizer],
    names: ParameterNames,
    *,
    complete: bool = True,
    again: bool = False,
) -> LiveState:
    """Describe the shards and values of all optimizers of one state. `optimizers/tree.py` documents the tree.

    Args:
        state_name: name of the state.
        optimizers: all of the state.
        names: names of their parameters.
        complete: each parameter in a group has its state on this rank, if it has any; False: groups name parameters whose
            state is on other ranks.
        again: True to make the function that describes the state again in later saves.
    """
    state = LiveState(state_name, merged=True)
    groups = named_groups(state_name, optimizers, names)
    with_values: dict[str, _CapturedParameter] = {}  # by FQN
    replicas: dict[str, list[_CapturedParameter]] = {}  # by FQN
    for group in groups:
        all_state = group.optimizer.state
        for parameter, name in zip(group.params, group.names, strict=True):
            own = all_state.get(parameter)
            if not own:
                continue
            captured = _capture_state(state_name, name, parameter, own, state.shards)
            if captured.values:
                with_values.setdefault(name[0], captured)
            if id(parameter) in names.replicas:
                replicas.setdefault(name[0], []).append(captured)
    static = _StaticTree([[fqn for fqn, _ in group.names] for group in groups], _aliases(groups), complete)
    values = {fqn: captured.values for fqn, captured in with_values.items()}
    tree = static.with_values(optimizers, [group.live for group in groups], values)

    def add_nested(
        path: tuple[object, ...], tensor: torch.Tensor, owners: Mapping[str, _CapturedParameter] = with_values
    ) -> str:
        """Store a tensor that lies inside a plain value, under a slot of its own; return the reference to it."""
        if path[0] != "state":
            raise UsageError(
                f"{state_name}/{key_of_path(path)}: a tensor in a value of this type cannot be stored: use dicts, lists"
            )
        fqn = str(path[1])
        owner = owners[fqn]
        slot = tensor_name(path[2:], owner.slots)
        owner.slots[slot] = tensor
        like = layout_of(tensor, owner.parameter, owner.slots)
        add_shards(state.shards, TensorKey(state_name, fqn, slot), tensor, aliases=owner.aliases, like=like)
        return state_reference(fqn, slot)

    for fqn, (first, *others) in replicas.items():
        for other in others:
            _check_equal_state(state_name, fqn, first, other)
            encode({"state": {fqn: other.values}}, on_tensor=partial(add_nested, owners={fqn: other}))
    state.tree = encode(tree, on_tensor=add_nested)
    if again and not values and not replicas:
        by_name = partial(as_optimizers, state_name)
        state.again = again_with_optimizers(state, by_name, static.encode_again, optimizers)
    return state


@dataclass(frozen=True, slots=True)
class _StaticTree:
    """The part of the tree that depends on the parameters alone.

    Attributes:
        params: FQNs of the parameters of each group.
        aliases: further names of parameters that have some.
        complete: argument of `capture_optimizers`.
    """

    params: list[list[str]]
    aliases: dict[str, list[str]]
    complete: bool

    def with_values(
        self, optimizers: Sequence[Optimizer], groups: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the whole tree.

        Args:
            optimizers: live optimizers.
            groups: their param groups.
            values: state of parameters that is not a tensor, by FQN.
        """
        own = [pack_own_values(o) for o in optimizers]
        return {
            "groups": [
                {
                    "params": params,
                    **{key: pack_tensors(value) for key, value in group.items() if key not in NOT_HYPERPARAMETERS},
                }
                for params, group in zip(self.params, groups, strict=True)
            ],
            "state": values,
            "aliases": self.aliases,
            "globals": [
                {key: pack_tensors(value) for key, value in o.state.items() if not isinstance(key, torch.Tensor)}
                for o in optimizers
            ],
            "optimizers": [type(o).__name__ for o in optimizers],
            **({"own": own} if any(own) else {}),
            **({"complete": True} if self.complete else {}),
        }

    def encode_again(self, optimizers: Sequence[Optimizer]) -> bytes | None:
        """Encode the tree of optimizers whose state is all tensors; None if a value holds a tensor in a container."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        try:
            return encode(self.with_values(optimizers, groups, {}), on_tensor=_refuse_tensor)
        except _NestedTensorError:
            return None


class _NestedTensorError(Exception):
    """A tensor lies in a container among the plain values."""


def _refuse_tensor(path: tuple[object, ...], tensor: torch.Tensor) -> str:
    raise _NestedTensorError


def _aliases(groups: Sequence[ParamGroup]) -> dict[str, list[str]]:
    """Return the further names of each parameter that has some: those of all its replicas."""
    found: dict[str, list[str]] = {}
    for group in groups:
        for fqn, aliases in group.names:
            if aliases:
                found[fqn] = list(dict.fromkeys((*found.get(fqn, ()), *aliases)))
    return found


class _CapturedParameter(NamedTuple):
    """The state of one parameter: tensors by slot, which are shards, and other values, which the tree holds."""

    parameter: torch.Tensor
    aliases: tuple[str, ...]
    slots: dict[str, Any]
    values: dict[Any, Any]


def _capture_state(
    state_name: str, name: ParameterName, parameter: torch.Tensor, own: Mapping[Any, Any], shards: list[LiveShard]
) -> _CapturedParameter:
    """Append the state tensors of one parameter to `shards`."""
    slots: dict[str, Any] = {}
    values: dict[Any, Any] = {}
    fqn, aliases = name
    sharded = is_dtensor(parameter)
    for slot, value in own.items():
        if is_wrapped(value) and type(slot) is str and slot:
            values[slot] = capture_wrapped(TensorKey(state_name, fqn, slot), value, aliases, shards)
        elif isinstance(value, torch.Tensor) and type(slot) is str and slot:
            slots[slot] = value
            like = layout_of(value, parameter, own) if sharded else None
            add_shards(shards, TensorKey(state_name, fqn, slot), value, aliases=aliases, like=like)
        else:
            values[slot] = value
    return _CapturedParameter(parameter, aliases, slots, values)


def _check_equal_state(state_name: str, fqn: str, first: _CapturedParameter, other: _CapturedParameter) -> None:
    """Refuse state of two replicas that differs in anything but the content of tensors, which the save compares."""
    if first.slots.keys() != other.slots.keys() or comparable_bytes(first.values) != comparable_bytes(other.values):
        raise IncompatibleCheckpointError(
            f"{state_name}/state/{fqn} is held twice by the optimizers of this rank, with different contents: keep the "
            "state of replicas equal, or give different parameters different names"
        )


def layout_of(value: torch.Tensor, parameter: torch.Tensor, state: Mapping[Any, Any]) -> torch.Tensor | None:
    """Return `parameter` if `value` is a plain tensor that an optimizer made like the local part of that DTensor.

    A plain tensor of the whole parameter's shape is replicated, and so is one element beside DTensors: None.

    Args:
        value: a tensor of the parameter's state.
        parameter: the parameter.
        state: all of its state.
    """
    if not is_dtensor(parameter) or is_dtensor(value):
        return None
    if value.shape != local_tensor(parameter).shape or value.shape == parameter.shape:
        return None
    return None if value.numel() == 1 and any(map(is_dtensor, state.values())) else parameter
