"""Optimizers: state by parameter name, hyperparameters by parameter name, several optimizers as one namespace.

A kind's tree is {"groups": [{"params": [FQN, ...], hyperparameter: value, ...}, ...],
"state": {FQN: {slot: value}}, "aliases": {FQN: [further names]}, "globals": [...], "optimizers": [type names]}, and
"complete": true where all that belongs to a parameter of these groups stands in this very tree, so that nobody has to look
for more of it in those of other ranks.
"state" has only what is not a plain tensor directly in a parameter's state: numbers, None, and nested containers, in
which a tensor is a reference to the slot that holds it. Tensors among the hyperparameters (a learning rate that a
compiled step reads) are small and stand in the tree itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import CorruptCheckpointError, UsageError
from bytecheckpoint.frameworks.base import Names
from bytecheckpoint.frameworks.dtensors import is_dtensor
from bytecheckpoint.frameworks.leaves import add_shards, dtype_name, dtype_named, memory_of
from bytecheckpoint.frameworks.objects import unique
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey
from bytecheckpoint.representation.values import dotted, encode

__all__ = [
    "NOT_HYPERPARAMETERS",
    "Group",
    "ParameterNames",
    "as_optimizers",
    "capture_optimizers",
    "inline",
    "layout_of",
    "named_groups",
    "outline",
    "reference",
    "referenced",
]

#: Keys of a param group that say which parameters it has; positions, not settings.
NOT_HYPERPARAMETERS = frozenset({"params", "param_names"})

_TENSOR = "__tensor__"


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """id of a parameter -> (FQN, aliases), from the modules of the same states and from an explicit mapping."""

    by_id: Mapping[int, tuple[str, tuple[str, ...]]]

    @staticmethod
    def build(scanned: Sequence[Mapping[int, tuple[str, tuple[str, ...]]]], names: Names | None) -> ParameterNames:
        """Names from modules, the first that knows a parameter first, overridden by `names` (either direction).

        Raises:
            UsageError: `names` is neither parameter -> FQN nor FQN -> parameter.
        """
        merged: dict[int, tuple[str, tuple[str, ...]]] = {}
        for parameters in reversed(scanned):
            merged.update(parameters)
        for key, value in (names or {}).items():
            if isinstance(key, str) and isinstance(value, torch.Tensor):
                fqn, parameter = key, value
            elif isinstance(key, torch.Tensor) and isinstance(value, str):
                fqn, parameter = value, key
            else:
                raise UsageError(
                    f"names= maps parameters to FQNs, or FQNs to parameters, not {type(key).__name__} to "
                    f"{type(value).__name__}"
                )
            merged[id(parameter)] = (fqn, ())
        return ParameterNames(merged)


@dataclass(slots=True)
class Group:
    """One param group of a live optimizer, its parameters named."""

    optimizer: Optimizer
    group: dict[str, Any]
    params: list[torch.Tensor]
    names: list[tuple[str, tuple[str, ...]]]


def as_optimizers(kind: str, value: object) -> list[Optimizer] | None:
    """`value` as a list of optimizers, or None when it is something else (a dict's values count as a list).

    An empty list is a rank without parameters in the kind "optimizer", and a plain value in any other.
    """
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    found = [item for item in items if isinstance(item, Optimizer)]
    without = kind == "optimizer" and isinstance(value, list | tuple)
    return found if len(found) == len(items) and (found or without) else None


def named_groups(kind: str, optimizers: Sequence[Optimizer], names: ParameterNames) -> list[Group]:
    """All param groups of `optimizers`, with the FQN of every parameter.

    Raises:
        UsageError: a parameter has no name, or one name (or parameter) stands in two groups.
    """
    seen: set[str] = set()
    out: list[Group] = []
    for optimizer in optimizers:
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise UsageError(
                f"{kind}: ZeroRedundancyOptimizer is not supported: use fully_shard (FSDP2) to shard its state"
            )
        for index, group in enumerate(optimizer.param_groups):
            params: list[torch.Tensor] = group["params"]
            found: list[tuple[str, tuple[str, ...]]] = []
            for position, parameter in enumerate(params):
                name = names.by_id.get(id(parameter))
                if name is None:
                    raise UsageError(
                        f"{kind}: {type(optimizer).__name__} has a parameter without a name (shape "
                        f"{tuple(parameter.shape)}, group {index}, position {position}): put its module into the "
                        "same states, or pass names="
                    )
                if name[0] in seen:
                    raise UsageError(
                        f"{kind}: {name[0]!r} names two parameters of the optimizer(s), or one that stands in two groups: "
                        "pass names= that tell them apart"
                    )
                seen.add(name[0])
                found.append(name)
            out.append(Group(optimizer, group, params, found))
    return out


def capture_optimizers(
    kind: str, optimizers: Sequence[Optimizer], names: ParameterNames, *, complete: bool = True
) -> LiveState:
    """The shards and values of all optimizers of one kind.

    Args:
        kind: name of the state.
        optimizers: all of the kind.
        names: of their parameters.
        complete: each parameter in a group has its state on this rank, if it has any; False: groups name parameters whose
            state other ranks have.
    """
    state = LiveState(kind, merged=True)
    shards = state.shards
    groups = named_groups(kind, optimizers, names)
    values: dict[str, dict[Any, Any]] = {}
    # FQN -> (parameter, its aliases, slots in use), for parameters that have values.
    context: dict[str, tuple[torch.Tensor, tuple[str, ...], dict[str, Any]]] = {}
    aliases: dict[str, list[str]] = {}
    for live in groups:
        all_state = live.optimizer.state
        for parameter, (fqn, others) in zip(live.params, live.names, strict=True):
            if others:
                aliases[fqn] = list(others)
            own = all_state.get(parameter)
            if not own:
                continue
            slots, plain = _capture_state(kind, fqn, others, parameter, own, shards)
            if plain:
                values[fqn] = plain
                context[fqn] = (parameter, others, slots)
    tree = {
        "groups": [
            {
                "params": [fqn for fqn, _ in live.names],
                **{key: inline(value) for key, value in live.group.items() if key not in NOT_HYPERPARAMETERS},
            }
            for live in groups
        ],
        "state": values,
        "aliases": aliases,
        "globals": [
            {key: inline(value) for key, value in o.state.items() if not isinstance(key, torch.Tensor)}
            for o in optimizers
        ],
        "optimizers": [type(o).__name__ for o in optimizers],
        **({"complete": True} if complete else {}),
    }

    def add(path: tuple[object, ...], tensor: torch.Tensor) -> str:
        if path[0] != "state":
            raise UsageError(
                f"{kind}/{dotted(path)}: a tensor in a value of this type cannot be stored: use dicts, lists"
            )
        fqn = str(path[1])
        parameter, others, slots = context[fqn]
        slot = unique(dotted(path[2:]) or "value", slots)
        slots[slot] = tensor
        add_shards(shards, TensorKey(kind, fqn, slot), tensor, aliases=others, like=layout_of(tensor, parameter))
        return reference(fqn, slot)

    state.tree = encode(tree, on_tensor=add)
    return state


def reference(fqn: str, slot: str) -> str:
    """The name by which the tree refers to a state tensor inside a container."""
    return f"{len(fqn)}:{fqn}{slot}"


def referenced(name: str) -> tuple[str, str]:
    """The inverse of `reference`: (FQN, slot)."""
    length, _, rest = name.partition(":")
    if not length.isdecimal():
        raise CorruptCheckpointError(f"the optimizer's values refer to a tensor by a malformed name: {name!r}")
    return rest[: int(length)], rest[int(length) :]


def _capture_state(
    kind: str,
    fqn: str,
    aliases: tuple[str, ...],
    parameter: torch.Tensor,
    own: Mapping[Any, Any],
    shards: list[LiveShard],
) -> tuple[dict[str, Any], dict[Any, Any] | None]:
    """Append the state tensors of one parameter; return its slots, and the entries that the tree must hold."""
    plain: dict[Any, Any] | None = None
    slots: dict[str, Any] = {}
    sharded = is_dtensor(parameter)
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and type(name) is str and name:
            slots[name] = value
            like = layout_of(value, parameter) if sharded else None
            add_shards(shards, TensorKey(kind, fqn, name), value, aliases=aliases, like=like)
        elif plain is None:
            plain = {name: value}
        else:
            plain[name] = value
    return slots, plain


def layout_of(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    """The parameter, when `value` is a plain tensor that a custom optimizer made like the parameter's local part.

    A plain tensor of the whole parameter's shape is the whole, replicated.
    """
    if not is_dtensor(parameter) or is_dtensor(value):
        return None
    return parameter if value.shape == memory_of(parameter).shape and value.shape != parameter.shape else None


def inline(value: Any) -> Any:
    """`value` with its tensors as plain data, for values that belong into the tree itself."""
    if isinstance(value, torch.Tensor):
        if is_dtensor(value):
            value = value.full_tensor()
        data = value.detach().cpu().contiguous()
        flat = data.reshape(-1).view(torch.uint8) if data.numel() else data.new_empty(0, dtype=torch.uint8)
        return {_TENSOR: [dtype_name(data.dtype), list(data.shape), flat.numpy().tobytes()]}
    if type(value) is dict:
        return {key: inline(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(inline, value))
    return value


def outline(value: Any) -> Any:
    """The inverse of `inline`; tensors come back on the CPU."""
    if type(value) is dict:
        if value.keys() == {_TENSOR}:
            dtype, shape, data = value[_TENSOR]
            made = torch.empty(shape, dtype=dtype_named(dtype), device="cpu")
            if made.numel():
                made.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return made
        return {key: outline(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(outline, value))
    return value
