"""Load optimizers: state exactly as saved, hyperparameters by parameter name.

Optimizer.load_state_dict is not used: it casts state to the parameter's dtype and matches by position. State goes
straight into `optimizer.state`, in the dtype in which it was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

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
from bytecheckpoint.frameworks.optimizers.names import ParameterNames, named_groups
from bytecheckpoint.frameworks.optimizers.saved_trees import SavedTrees
from bytecheckpoint.frameworks.optimizers.state_memory import allocate_state
from bytecheckpoint.frameworks.tensors.allocation import is_writable
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name

__all__ = ["ParameterRestore", "PlainParameterRestore", "Restorer", "first_names", "load_optimizers"]

_MAX_LISTED = 3  # parameters in a note or an error


class ParameterRestore(Protocol):
    """The load of one parameter's optimizer state."""

    def plan(self, saved: SavedStates, trees: SavedTrees, into: Destination) -> bool:
        """Request the state tensors; return False when the checkpoint holds no state of this parameter."""

    def install(self) -> None:
        """Replace the parameter's state by the loaded one."""

    def clear(self) -> None:
        """Remove the parameter's state: the checkpoint knows the parameter, and holds no state of it."""


#: Makes the load of one parameter from (optimizer, parameter, name, whether scalars live on the parameter's device).
Restorer = Callable[[Optimizer, torch.Tensor, ParameterName, bool], ParameterRestore]


def load_optimizers(
    kind: str,
    optimizers: Sequence[Optimizer],
    names: ParameterNames,
    saved: SavedStates,
    into: Destination,
    *,
    strict: Strict,
    restorer: Restorer | None = None,
) -> None:
    """Plan the load of one kind into live optimizers.

    Args:
        kind: name of the state.
        optimizers: all of the kind.
        names: names of their parameters.
        saved: the checkpoint.
        into: receives the plan.
        strict: as in `load`.
        restorer: makes the load of one parameter. None: `PlainParameterRestore`, for plain tensors and DTensors.

    Raises:
        IncompatibleCheckpointError: parameters of one group here had different hyperparameters in the checkpoint, and
            `strict` is set.
    """
    groups = named_groups(kind, optimizers, names)
    trees = SavedTrees(kind, saved, groups)
    stateless: list[str] = []
    for index, group in enumerate(groups):
        saved_groups = trees.groups_of(group)
        for parameter, (fqn, _), found in zip(group.params, group.names, saved_groups, strict=True):
            # ZeRO's groups have trained parameters only; a frozen one needs no hyperparameters.
            if not found and parameter.requires_grad:
                into.missing.append(f"{kind}/param_groups/{fqn}")
        settings = load_hyperparameters(kind, index, group, saved_groups, into, strict=is_strict(strict, kind))
        on_device = any(settings.get(key, group.live.get(key)) for key in ("capturable", "fused"))
        for parameter, name, found in zip(group.params, group.names, saved_groups, strict=True):
            restore: ParameterRestore
            if restorer is None:
                restore = PlainParameterRestore(kind, group.optimizer, parameter, name, on_device)
            else:
                restore = restorer(group.optimizer, parameter, name, on_device)
            if restore.plan(saved, trees, into):
                into.finish.append(restore.install)
            elif found:
                into.finish.append(restore.clear)
                stateless.append(name[0])
    if stateless:
        into.notes.append(
            f"{kind}: {len(stateless)} parameters have no state in the checkpoint and none now: {first_names(stateless)}"
        )
    load_globals(kind, optimizers, trees, into)


def first_names(names: Sequence[str]) -> str:
    """Join the first few of `names`, for a note."""
    return ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")


class PlainParameterRestore:
    """The load of the optimizer state of one plain tensor or DTensor."""

    __slots__ = ("_aliases", "_fqn", "_kind", "_on_device", "_optimizer", "_parameter", "_tensors", "_values")

    def __init__(
        self, kind: str, optimizer: Optimizer, parameter: torch.Tensor, name: ParameterName, on_device: bool
    ) -> None:
        self._kind = kind
        self._optimizer = optimizer
        self._parameter = parameter
        self._fqn, self._aliases = name
        self._on_device = on_device
        self._tensors: dict[str, torch.Tensor] = {}
        self._values: dict[Any, Any] = {}

    def plan(self, saved: SavedStates, trees: SavedTrees, into: Destination) -> bool:
        """Request the state tensors; return False when the checkpoint holds no state of this parameter."""
        names = (self._fqn, *self._aliases)
        live = self._optimizer.state.get(self._parameter) or {}
        used: set[int] = set()
        self._values, nested = trees.take_values(self._fqn, self._aliases)
        for found in saved.slots(self._kind, names):
            slot = found.key.slot
            into.recognized.add(found.key)
            if is_unused_master(slot, live, self._optimizer, trees.optimizer_types):
                continue
            target = nested.get((found.key.fqn, slot))
            if target is None:
                target = live.get(slot)
                if not (isinstance(target, torch.Tensor) and id(target) not in used and self._fits(target, found)):
                    target = allocate_state(found, self._parameter, on_device=self._on_device)
                used.add(id(target))
                self._tensors[slot] = target
            like = layout_of(target, self._parameter)
            add_shards(into.wanted, found.key, target, aliases=self._aliases, like=like)
        if self._aliases:
            # Tied here, but stored separately (two pipeline stages): the load knows the other copies.
            into.recognized.update(other.key for name in names for other in saved.slots(self._kind, (name,)))
        return bool(self._tensors or self._values)

    def install(self) -> None:
        """Replace the parameter's state by the loaded one."""
        state = self._optimizer.state[self._parameter]
        state.clear()
        state.update(self._tensors)
        state.update(self._values)

    def clear(self) -> None:
        """Remove the parameter's state."""
        self._optimizer.state.pop(self._parameter, None)

    def _fits(self, live: torch.Tensor, found: SavedTensor) -> bool:
        whole = live if layout_of(live, self._parameter) is None else self._parameter
        return tuple(whole.shape) == found.global_shape and dtype_name(live.dtype) == found.dtype and is_writable(live)
