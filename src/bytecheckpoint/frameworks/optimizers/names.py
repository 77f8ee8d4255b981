"""Names of the parameters in optimizers, several optimizers as one namespace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import ParameterName, UserNames

__all__ = ["NOT_HYPERPARAMETERS", "ParamGroup", "ParameterNames", "as_optimizers", "named_groups"]

#: Keys of a param group that say which parameters it has; positions, not hyperparameters.
NOT_HYPERPARAMETERS = frozenset({"params", "param_names"})


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """id of a parameter -> its name, from the modules of the same states and from an explicit mapping."""

    by_id: Mapping[int, ParameterName]

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
        return ParameterNames(merged)


@dataclass(slots=True)
class ParamGroup:
    """One param group of a live optimizer with the names of its parameters.

    Attributes:
        optimizer: the live optimizer.
        live: its param group.
        params: the parameters of the group.
        names: their names, in the same order.
    """

    optimizer: Optimizer
    live: dict[str, Any]
    params: list[torch.Tensor]
    names: list[ParameterName]


def as_optimizers(kind: str, value: object) -> list[Optimizer] | None:
    """Return `value` as a list of optimizers, or None when it is something else; the values of a dict are a list too.

    An empty list means a rank without parameters in the kind "optimizer", and a plain value in any other kind.
    """
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    found = [item for item in items if isinstance(item, Optimizer)]
    may_be_empty = kind == "optimizer" and isinstance(value, list | tuple)
    return found if len(found) == len(items) and (found or may_be_empty) else None


def named_groups(kind: str, optimizers: Sequence[Optimizer], names: ParameterNames) -> list[ParamGroup]:
    """Return all param groups of `optimizers` with the names of their parameters.

    Raises:
        UsageError: a parameter has no name, or one name (or parameter) stands in two groups.
    """
    seen: set[str] = set()
    groups: list[ParamGroup] = []
    for optimizer in optimizers:
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise UsageError(
                f"{kind}: ZeroRedundancyOptimizer is not supported: use fully_shard (FSDP2) to shard its state"
            )
        for index, group in enumerate(optimizer.param_groups):
            params: list[torch.Tensor] = group["params"]
            found: list[ParameterName] = []
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
            groups.append(ParamGroup(optimizer, group, params, found))
    return groups
