"""Capture optimizers: state and hyperparameters by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import ParameterName
from bytecheckpoint.frameworks.objects.capture import tensor_name
from bytecheckpoint.frameworks.optimizers.names import NOT_HYPERPARAMETERS, ParameterNames, named_groups
from bytecheckpoint.frameworks.optimizers.tree import pack_tensors, state_reference
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor, local_tensor
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey
from bytecheckpoint.representation.values.codec import encode, key_of_path

__all__ = ["capture_optimizers", "layout_of"]


def capture_optimizers(
    kind: str, optimizers: Sequence[Optimizer], names: ParameterNames, *, complete: bool = True
) -> LiveState:
    """Describe the shards and values of all optimizers of one kind. `optimizers/tree.py` documents the tree.

    Args:
        kind: name of the state.
        optimizers: all of the kind.
        names: names of their parameters.
        complete: each parameter in a group has its state on this rank, if it has any; False: groups name parameters whose
            state is on other ranks.
    """
    state = LiveState(kind, merged=True)
    shards = state.shards
    groups = named_groups(kind, optimizers, names)
    values: dict[str, dict[Any, Any]] = {}
    # FQN -> (parameter, its aliases, slots in use), for parameters that have values.
    context: dict[str, tuple[torch.Tensor, tuple[str, ...], dict[str, Any]]] = {}
    aliases_of: dict[str, list[str]] = {}
    for group in groups:
        all_state = group.optimizer.state
        for parameter, (fqn, aliases) in zip(group.params, group.names, strict=True):
            if aliases:
                aliases_of[fqn] = list(aliases)
            own = all_state.get(parameter)
            if not own:
                continue
            slots, plain = _capture_state(kind, (fqn, aliases), parameter, own, shards)
            if plain:
                values[fqn] = plain
                context[fqn] = (parameter, aliases, slots)
    tree = {
        "groups": [
            {
                "params": [fqn for fqn, _ in group.names],
                **{key: pack_tensors(value) for key, value in group.live.items() if key not in NOT_HYPERPARAMETERS},
            }
            for group in groups
        ],
        "state": values,
        "aliases": aliases_of,
        "globals": [
            {key: pack_tensors(value) for key, value in o.state.items() if not isinstance(key, torch.Tensor)}
            for o in optimizers
        ],
        "optimizers": [type(o).__name__ for o in optimizers],
        **({"complete": True} if complete else {}),
    }

    def add(path: tuple[object, ...], tensor: torch.Tensor) -> str:
        if path[0] != "state":
            raise UsageError(
                f"{kind}/{key_of_path(path)}: a tensor in a value of this type cannot be stored: use dicts, lists"
            )
        fqn = str(path[1])
        parameter, aliases, slots = context[fqn]
        slot = tensor_name(path[2:], slots)
        slots[slot] = tensor
        add_shards(shards, TensorKey(kind, fqn, slot), tensor, aliases=aliases, like=layout_of(tensor, parameter))
        return state_reference(fqn, slot)

    state.tree = encode(tree, on_tensor=add)
    return state


def _capture_state(
    kind: str, name: ParameterName, parameter: torch.Tensor, own: Mapping[Any, Any], shards: list[LiveShard]
) -> tuple[dict[str, Any], dict[Any, Any] | None]:
    """Append the state tensors of one parameter; return its slots, and the entries that the tree must hold."""
    plain: dict[Any, Any] | None = None
    slots: dict[str, Any] = {}
    fqn, aliases = name
    sharded = is_dtensor(parameter)
    for slot, value in own.items():
        if isinstance(value, torch.Tensor) and type(slot) is str and slot:
            slots[slot] = value
            like = layout_of(value, parameter) if sharded else None
            add_shards(shards, TensorKey(kind, fqn, slot), value, aliases=aliases, like=like)
        elif plain is None:
            plain = {slot: value}
        else:
            plain[slot] = value
    return slots, plain


def layout_of(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return `parameter` if `value` is a plain tensor that an optimizer made like the local part of that DTensor.

    A plain tensor of the whole parameter's shape is replicated: None.
    """
    if not is_dtensor(parameter) or is_dtensor(value):
        return None
    return parameter if value.shape == local_tensor(parameter).shape and value.shape != parameter.shape else None
