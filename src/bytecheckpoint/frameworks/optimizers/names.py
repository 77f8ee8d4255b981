"""Names of the parameters in optimizers, several optimizers as one namespace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import ParameterName, UserNames
from bytecheckpoint.frameworks.wrappers import BY_STATE_DICT, optimizers_inside

__all__ = ["NOT_HYPERPARAMETERS", "ParamGroup", "ParameterNames", "as_optimizers", "named_groups"]

#: Keys of a param group that say which parameters it has; positions, not hyperparameters.
NOT_HYPERPARAMETERS = frozenset({"params", "param_names"})


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """Names of parameters, from the modules of the same states and from an explicit mapping.

    Attributes:
        by_id: id of a parameter -> its name.
        replicas: ids of the parameters that share their name with others of one list of modules, and with no others.
    """

    by_id: Mapping[int, ParameterName]
    replicas: frozenset[int] = frozenset()

    @staticmethod
    def build(scanned: Sequence[Mapping[int, ParameterName]], names: UserNames | None) -> ParameterNames:
        """Join the names from modules, where the first that knows a parameter wins, and override them by `names`.

        Raises:
            UsageError: `names` is neither parameter -> FQN nor FQN -> parameter.
        """
        merged: dict[int, ParameterName] = {}
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
        return ParameterNames(merged, _replicas(merged, scanned))


def _replicas(by_id: Mapping[int, ParameterName], scanned: Sequence[Mapping[int, ParameterName]]) -> frozenset[int]:
    """Return the ids of the parameters that share their name with others of one item of `scanned`, and with no others."""
    if len({fqn for fqn, _ in by_id.values()}) == len(by_id):
        return frozenset()
    holders: dict[str, list[tuple[int, int]]] = {}  # name -> (id, number of the item)
    for number, name in by_id.items():
        item = next((i for i, parameters in enumerate(scanned) if parameters.get(number) == name), -1)
        holders.setdefault(name[0], []).append((number, item))
    return frozenset(
        number
        for found in holders.values()
        if len(found) > 1 and len({item for _, item in found}) == 1 and found[0][1] >= 0
        for number, _ in found
    )


@dataclass(slots=True)
class ParamGroup:
    """One param group of a live optimizer with the names of its parameters.

    Attributes:
        optimizer: the live optimizer.
        live: its param group.
        params: the parameters of the group.
        names: their names, in the same order.
        copies: number of replicas of each in earlier groups.
    """

    optimizer: Optimizer
    live: dict[str, Any]
    params: list[torch.Tensor]
    names: list[ParameterName]
    copies: list[int]


def as_optimizers(state_name: str, value: object) -> list[Optimizer] | None:
    """Return `value` as a list of optimizers, or None when it is something else; the values of a dict are a list too.

    An empty list means a rank without parameters in the state "optimizer", and a plain value in any other state.
    """
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    found = [item for item in items if isinstance(item, Optimizer)]
    may_be_empty = state_name == "optimizer" and isinstance(value, list | tuple)
    return found if len(found) == len(items) and (found or may_be_empty) else None


def _optimizer_inside(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer around which another one with a state of its own is, that steps parameters of both."""
    is_view = not isinstance(optimizer, Optimizer)  # by the parameters before sharding, of the live one
    others = [] if is_view else [one for one in optimizers_inside(optimizer) if one.state is not optimizer.state]
    own = {id(p) for group in optimizer.param_groups for p in group["params"]} if others else set()
    return next(
        (one for one in others if any(id(p) in own for group in one.param_groups for p in group["params"])), None
    )


def _key_with_parameters(optimizer: Optimizer) -> object:
    """Return the key of an entry of the state that belongs to no parameter, and has parameters as keys; None for none."""
    others = ((key, value) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor))
    return next((k for k, v in others if isinstance(v, dict) and any(isinstance(one, torch.Tensor) for one in v)), None)


def named_groups(state_name: str, optimizers: Sequence[Optimizer], names: ParameterNames) -> list[ParamGroup]:
    """Return all param groups of `optimizers` with the names of their parameters.

    Raises:
        UsageError: a parameter has no name or stands in two groups, two parameters that are not replicas share a name, or
            an optimizer is around another one, and both have a state.
    """
    seen: dict[str, list[int]] = {}  # name -> ids of its parameters
    groups: list[ParamGroup] = []
    for optimizer in optimizers:
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise UsageError(
                f"{state_name}: ZeroRedundancyOptimizer is not supported: use fully_shard (FSDP2) to shard its state"
            )
        if (inner := _optimizer_inside(optimizer)) is not None:
            raise UsageError(
                f"{state_name}: {type(optimizer).__name__} holds another optimizer, {type(inner).__name__}, with a state "
                f"of its own: {BY_STATE_DICT}"
            )
        if (key := _key_with_parameters(optimizer)) is not None:
            raise UsageError(
                f"{state_name}: {type(optimizer).__name__} keeps tensors by parameter under {key!r} of its state: "
                f"{BY_STATE_DICT}"
            )
        for index, group in enumerate(optimizer.param_groups):
            params: list[torch.Tensor] = group["params"]
            found: list[ParameterName] = []
            copies: list[int] = []
            for position, parameter in enumerate(params):
                name = names.by_id.get(id(parameter))
                if name is None:
                    raise UsageError(
                        f"{state_name}: {type(optimizer).__name__} has a parameter without a name (shape "
                        f"{tuple(parameter.shape)}, group {index}, position {position}): give its module a state of "
                        "its own in the same call (a dict of modules is none), or pass names="
                    )
                earlier = seen.setdefault(name[0], [])
                if earlier and (id(parameter) in earlier or id(parameter) not in names.replicas):
                    raise UsageError(
                        f"{state_name}: {name[0]!r} names two parameters of the optimizer(s), or one that stands in "
                        "two groups: pass names= that tell them apart"
                    )
                found.append(name)
                copies.append(len(earlier))
                earlier.append(id(parameter))
            groups.append(ParamGroup(optimizer, group, params, found, copies))
    return groups
