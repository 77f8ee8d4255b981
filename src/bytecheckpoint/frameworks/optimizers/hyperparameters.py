"""Load hyperparameters by parameter name, and optimizer state that belongs to no parameter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import Destination
from bytecheckpoint.frameworks.optimizer_tree import comparable_bytes, unpack_tensors
from bytecheckpoint.frameworks.optimizers.names import NOT_HYPERPARAMETERS, ParamGroup
from bytecheckpoint.frameworks.optimizers.saved_trees import SavedTrees
from bytecheckpoint.frameworks.optimizers.slots import fixed_settings
from bytecheckpoint.frameworks.tensors.dtensors import local_tensor

__all__ = ["load_globals", "load_hyperparameters"]

_MAX_LISTED = 8  # differences in a message; the rest are counted


def load_hyperparameters(
    state_name: str,
    index: int,
    group: ParamGroup,
    saved_groups: Sequence[Sequence[dict[str, Any]]],
    destination: Destination,
    *,
    strict: bool,
) -> dict[str, Any]:
    """Plan the load of a live group's hyperparameters from the saved groups of its parameters.

    Args:
        state_name: name of the state.
        index: number of the live group.
        group: the live group.
        saved_groups: the saved groups of each of its parameters: none if the checkpoint has none, several for a parameter
            that had replicas, if it stands for more than one of them.
        destination: receives the plan.
        strict: strictness of the load about this state.

    Returns:
        The hyperparameters that the group gets.

    Raises:
        IncompatibleCheckpointError: the saved groups differ, and `strict` is set.
    """
    sources: dict[int, tuple[dict[str, Any], str]] = {}
    for (fqn, _), found in zip(group.names, saved_groups, strict=True):
        for saved_group in found:
            sources.setdefault(id(saved_group), (saved_group, fqn))
    if not sources:
        return {}
    settings, differences = _common_settings(list(sources.values()))
    if differences:
        omitted = len(differences) - _MAX_LISTED
        more = f" and {omitted} more" if omitted > 0 else ""
        message = (
            f"{state_name}: group {index} joins parameters whose settings differ in the checkpoint: "
            f"{'; '.join(differences[:_MAX_LISTED])}{more}"
        )
        if strict:
            raise IncompatibleCheckpointError(f"{message}: split the group as it was, or load with strict=False")
        destination.notes.append(f"{message}; the values here were kept")
    saved_keys = {key for saved_group, _ in sources.values() for key in saved_group}
    unsaved = [key for key in group.live if key not in NOT_HYPERPARAMETERS and key not in saved_keys]
    if unsaved:
        destination.notes.append(
            f"{state_name}: group {index} keeps {', '.join(map(repr, unsaved))}, which the checkpoint does not have"
        )
    settings |= {key: value for key, value in fixed_settings(group.optimizer).items() if key in group.live}
    if settings:
        destination.finish.append(partial(_set_hyperparameters, group, settings))
    return settings


def _common_settings(sources: Sequence[tuple[dict[str, Any], str]]) -> tuple[dict[str, Any], list[str]]:
    """Return the hyperparameters that are equal in all saved groups, and a sentence for each difference.

    Args:
        sources: (saved group, FQN of one of its parameters).
    """
    (first, first_fqn), *others = sources
    settings = {key: value for key, value in first.items() if key not in NOT_HYPERPARAMETERS}
    differences: list[str] = []
    for other, fqn in others:
        for key in dict.fromkeys((*first, *other)):
            if key in NOT_HYPERPARAMETERS or _is_same(first, other, key):
                continue
            differences.append(
                f"{key!r} is {_display(first, key)} for {first_fqn!r}, {_display(other, key)} for {fqn!r}"
            )
            settings.pop(key, None)
    return settings, differences


def _is_same(first: dict[str, Any], second: dict[str, Any], key: str) -> bool:
    if (key in first) != (key in second):
        return False
    return first is second or comparable_bytes(first[key]) == comparable_bytes(second[key])


def _display(group: dict[str, Any], key: str) -> str:
    return repr(unpack_tensors(group[key])) if key in group else "nothing"


def _set_hyperparameters(group: ParamGroup, settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        new = unpack_tensors(value)
        old = group.live.get(key)
        if isinstance(old, torch.Tensor) and type(new) in (float, int):
            new = torch.tensor(new, dtype=old.dtype, device="cpu").expand(old.shape)
        if not isinstance(new, torch.Tensor):
            group.live[key] = new
        elif isinstance(old, torch.Tensor) and old.shape == new.shape:
            # A compiled or captured step reads this very tensor.
            with torch.no_grad():
                old.copy_(new)
        else:
            group.live[key] = new.to(local_tensor(group.params[0]).device)


def load_globals(state_name: str, optimizers: Sequence[Optimizer], trees: SavedTrees, destination: Destination) -> None:
    """Plan the load of state that belongs to no parameter, by the optimizer's position."""
    if not any(trees.merged.globals):
        return
    if len(trees.merged.globals) != len(optimizers):
        destination.notes.append(
            f"{state_name}: state that belongs to no parameter was not loaded: the number of optimizers differs"
        )
        return
    for optimizer, values in zip(optimizers, trees.merged.globals, strict=True):
        destination.finish.append(partial(_set_globals, optimizer, values))


def _set_globals(optimizer: Optimizer, values: dict[Any, Any]) -> None:
    for key in [k for k in optimizer.state if not isinstance(k, torch.Tensor)]:
        del optimizer.state[key]
    for key, value in values.items():
        optimizer.state[key] = unpack_tensors(value)
