"""Loading optimizers: state exactly as saved, hyperparameters by parameter name.

Optimizer.load_state_dict is not used: it casts state to the parameter's dtype and matches by position. State goes
straight into `optimizer.state`, with the dtype that it was saved with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.leaves import (
    add_shards,
    dtype_name,
    dtype_named,
    empty_beside,
    empty_like_layout,
    is_writable,
    memory_of,
)
from bytecheckpoint.frameworks.masters import is_foreign_master
from bytecheckpoint.frameworks.optimizers import (
    NOT_HYPERPARAMETERS,
    Group,
    ParameterNames,
    layout_of,
    named_groups,
    outline,
    referenced,
)
from bytecheckpoint.representation.values import decode, encode

__all__ = ["ParameterRestore", "ParameterState", "SavedTrees", "fresh_state", "load_optimizers"]

# Scalars that torch's optimizers keep on the CPU, whatever the parameter's device, unless capturable or fused.
_HOST_SLOTS = frozenset({"step", "mu_product"})
_TREE_KEYS = {"groups", "state", "aliases", "globals", "optimizers"}
_SHOWN = 3  # names in a note; the rest are counted


def load_optimizers(
    kind: str,
    optimizers: Sequence[Optimizer],
    names: ParameterNames,
    saved: SavedStates,
    into: Destination,
    *,
    strict: bool,
    restorer: Callable[[Optimizer, torch.Tensor, tuple[str, tuple[str, ...]], bool], ParameterRestore] | None = None,
) -> None:
    """Plan the load of one kind into live optimizers.

    Args:
        kind: name of the state.
        optimizers: all of the kind.
        names: of their parameters.
        saved: the checkpoint.
        into: receives the plan.
        strict: as in `load`.
        restorer: what restores one parameter, made from (optimizer, parameter, (FQN, aliases), whether scalars live on
            the parameter's device). None: `ParameterState`, for parameters that are tensors or DTensors of their own.

    Raises:
        IncompatibleCheckpointError: parameters of one group here had different hyperparameters in the checkpoint, and
            `strict` is set.
    """
    groups = named_groups(kind, optimizers, names)
    trees = SavedTrees(kind, saved, groups)
    stateless: list[str] = []
    for index, live in enumerate(groups):
        found = trees.groups_of(live.names)
        for parameter, (fqn, _), source in zip(live.params, live.names, found, strict=True):
            # ZeRO's groups have only parameters that are trained; one that is not has no use for settings.
            if source is None and parameter.requires_grad:
                into.missing.append(f"{kind}/param_groups/{fqn}")
        settings = _settings(kind, index, live, found, into, strict=strict)
        if settings:
            into.finish.append(partial(_set_group, live, settings))
        on_device = any(settings.get(key, live.group.get(key)) for key in ("capturable", "fused"))
        for parameter, name, source in zip(live.params, live.names, found, strict=True):
            state: ParameterRestore
            if restorer is None:
                state = ParameterState(kind, live.optimizer, parameter, name, on_device)
            else:
                state = restorer(live.optimizer, parameter, name, on_device)
            if state.plan(saved, trees, into):
                into.finish.append(state.install)
            elif source is not None:
                into.finish.append(state.clear)
                stateless.append(name[0])
    if stateless:
        shown = ", ".join(stateless[:_SHOWN]) + (", ..." if len(stateless) > _SHOWN else "")
        into.notes.append(f"{kind}: {len(stateless)} parameters have no state in the checkpoint and none now: {shown}")
    _load_globals(kind, optimizers, trees, into)


class SavedTrees:
    """The trees of all ranks as one: settings and plain state by parameter name, this rank's own tree first.

    Trees that say that they are complete are read until every live parameter is found: those of other pipeline stages, or
    of ranks that stepped other parameters, are left alone.
    """

    def __init__(self, kind: str, saved: SavedStates, live: Sequence[Group]) -> None:
        self.groups: dict[str, dict[str, Any]] = {}
        self.values: dict[str, dict[Any, Any]] = {}
        self.canonical: dict[str, str] = {}
        self.globals: list[dict[Any, Any]] = []
        # Names of the types of all optimizers.
        self.types: set[str] = set()
        # Memory for tensors inside containers: saved (FQN, slot) -> tensor, for the parameters that are here.
        self.nested: dict[tuple[str, str], torch.Tensor] = {}
        self._kind = kind
        self._saved = saved
        self._live = live
        self._by_saved_name: dict[str, torch.Tensor] | None = None
        lacking = [name for group in live for name in group.names]
        for position, blob in enumerate(saved.trees_about(kind, [n for fqn, more in lacking for n in (fqn, *more)])):
            references: list[str] = []
            tree: Any = decode(blob, on_tensor=partial(_noted, references))
            if not isinstance(tree, dict) or tree.keys() - {"complete"} != _TREE_KEYS:
                raise IncompatibleCheckpointError(
                    f"{kind} was saved from plain values, not from an optimizer: load it into a dict"
                )
            self.types.update(tree["optimizers"])
            for fqn, aliases in tree["aliases"].items():
                self.canonical.update(dict.fromkeys(aliases, fqn))
            if references:
                # Now that the names are known, the same again with memory in the place of the tensors.
                tree = decode(blob, on_tensor=self._memory)
            for group in tree["groups"]:
                for fqn in group["params"]:
                    self.groups.setdefault(fqn, group)
            for fqn, values in tree["state"].items():
                self.values.setdefault(fqn, values)
            if position == 0:
                self.globals = tree["globals"]
            if tree.get("complete", False):
                found = self.groups_of(lacking)
                lacking = [name for name, group in zip(lacking, found, strict=True) if group is None]
                if not lacking:
                    break

    def _memory(self, name: str) -> torch.Tensor | None:
        fqn, slot = referenced(name)
        if (fqn, slot) not in self.nested:
            parameter = self._parameter(fqn)
            found = self._saved.find(self._kind, (fqn,), slot)
            if found is None:
                raise CorruptCheckpointError(f"the values of {self._kind} refer to {name!r}, which the catalog lacks")
            if parameter is None:
                return None
            self.nested[fqn, slot] = fresh_state(found, parameter, on_device=False)
        return self.nested[fqn, slot]

    def _parameter(self, saved_fqn: str) -> torch.Tensor | None:
        if self._by_saved_name is None:
            self._by_saved_name = {
                saved: parameter
                for group in self._live
                for parameter, (fqn, aliases) in zip(group.params, group.names, strict=True)
                for name in (fqn, *aliases)
                for saved in (name, self.canonical.get(name, name))
            }
        return self._by_saved_name.get(saved_fqn)

    def groups_of(self, names: Sequence[tuple[str, tuple[str, ...]]]) -> list[dict[str, Any] | None]:
        """The saved group of each parameter, found by any of its names."""
        return [self._by_name(self.groups, fqn, aliases) for fqn, aliases in names]

    def values_of(self, fqn: str, aliases: tuple[str, ...]) -> dict[Any, Any]:
        """The saved state of a parameter that is not plain tensors."""
        return self._by_name(self.values, fqn, aliases) or {}

    def _by_name(self, table: dict[str, dict[Any, Any]], fqn: str, aliases: tuple[str, ...]) -> dict[Any, Any] | None:
        found = table.get(fqn)
        if found is None and (aliases or self.canonical):
            for name in (fqn, *aliases):
                found = table.get(name) or table.get(self.canonical.get(name, name))
                if found is not None:
                    break
        return found


class ParameterRestore(Protocol):
    """What `load_optimizers` does with the state of one parameter."""

    def plan(self, saved: SavedStates, trees: SavedTrees, into: Destination) -> bool:
        """Ask for the state tensors; False when the checkpoint holds no state of this parameter."""

    def install(self) -> None:
        """Make the parameter's state what was saved."""

    def clear(self) -> None:
        """Leave the parameter without state: the checkpoint knows the parameter, and holds none."""


class ParameterState:
    """Restores the state of one parameter that is a tensor of its own: what to fill, then what to install."""

    __slots__ = ("_aliases", "_fqn", "_kind", "_on_device", "_optimizer", "_parameter", "_targets", "_values")

    def __init__(
        self,
        kind: str,
        optimizer: Optimizer,
        parameter: torch.Tensor,
        name: tuple[str, tuple[str, ...]],
        on_device: bool,
    ) -> None:
        self._kind = kind
        self._optimizer = optimizer
        self._parameter = parameter
        self._fqn, self._aliases = name
        self._on_device = on_device
        self._targets: dict[str, torch.Tensor] = {}
        self._values: dict[Any, Any] = {}

    def plan(self, saved: SavedStates, trees: SavedTrees, into: Destination) -> bool:
        """Ask for the state tensors; False when the checkpoint holds no state of this parameter."""
        names = (self._fqn, *self._aliases)
        live = self._optimizer.state.get(self._parameter) or {}
        used: set[int] = set()
        for found in saved.slots(self._kind, names):
            slot = found.key.slot
            if is_foreign_master(slot, live, self._optimizer, trees.types):
                into.claimed.add(found.key)
                continue
            target = trees.nested.get((found.key.fqn, slot))
            if target is None:
                target = live.get(slot)
                if not (isinstance(target, torch.Tensor) and id(target) not in used and self._takes(target, found)):
                    target = fresh_state(found, self._parameter, on_device=self._on_device)
                used.add(id(target))
                self._targets[slot] = target
            into.claimed.add(found.key)
            like = layout_of(target, self._parameter)
            add_shards(into.wanted, found.key, target, aliases=self._aliases, like=like)
        if self._aliases:
            # Tied here, but stored separately (two pipeline stages): the other copies are accounted for too.
            into.claimed.update(other.key for name in names for other in saved.slots(self._kind, (name,)))
        self._values = trees.values_of(self._fqn, self._aliases)
        return bool(self._targets or self._values)

    def install(self) -> None:
        """Make the parameter's state exactly what was saved."""
        state = self._optimizer.state[self._parameter]
        state.clear()
        state.update(self._targets)
        state.update(self._values)

    def clear(self) -> None:
        """Leave the parameter without state."""
        self._optimizer.state.pop(self._parameter, None)

    def _takes(self, live: torch.Tensor, found: SavedTensor) -> bool:
        whole = live if layout_of(live, self._parameter) is None else self._parameter
        return tuple(whole.shape) == found.global_shape and dtype_name(live.dtype) == found.dtype and is_writable(live)


def fresh_state(found: SavedTensor, parameter: torch.Tensor, *, on_device: bool) -> torch.Tensor:
    """Uninitialised memory for a state tensor of `parameter`, distributed as the parameter is where the shape allows it."""
    dtype = dtype_named(found.dtype)
    if found.key.slot.rpartition(".")[2] in _HOST_SLOTS and not found.global_shape and not on_device:
        return torch.empty((), dtype=dtype, device="cpu")
    if found.global_shape == tuple(parameter.shape):
        return empty_like_layout(parameter, dtype)
    return empty_beside(found.global_shape, dtype, parameter)


def _noted(references: list[str], name: str) -> None:
    references.append(name)


def _settings(
    kind: str, index: int, live: Group, found: list[dict[str, Any] | None], into: Destination, *, strict: bool
) -> dict[str, Any]:
    """The hyperparameters that a live group takes from the saved groups of its parameters."""
    sources: dict[int, tuple[dict[str, Any], str]] = {}
    for (fqn, _), group in zip(live.names, found, strict=True):
        if group is not None:
            sources.setdefault(id(group), (group, fqn))
    if not sources:
        return {}
    groups = list(sources.values())
    first, first_fqn = groups[0]
    settings = {key: value for key, value in first.items() if key not in NOT_HYPERPARAMETERS}
    differing = []
    for group, fqn in groups[1:]:
        for key in dict.fromkeys((*first, *group)):
            if key in NOT_HYPERPARAMETERS or _same(first, group, key):
                continue
            differing.append(f"{key!r} is {_shown(first, key)} for {first_fqn!r}, {_shown(group, key)} for {fqn!r}")
            settings.pop(key, None)
    if differing:
        more = f" and {len(differing) - 8} more" if len(differing) > 8 else ""
        message = (
            f"{kind}: group {index} joins parameters whose settings differ in the checkpoint: "
            f"{'; '.join(differing[:8])}{more}"
        )
        if strict:
            raise IncompatibleCheckpointError(f"{message}: split the group as it was, or load with strict=False")
        into.notes.append(f"{message}; the values here were kept")
    kept = [key for key in live.group if key not in NOT_HYPERPARAMETERS and not any(key in g for g, _ in groups)]
    if kept:
        into.notes.append(
            f"{kind}: group {index} keeps {', '.join(map(repr, kept))}, which the checkpoint does not have"
        )
    return settings


def _same(first: dict[str, Any], second: dict[str, Any], key: str) -> bool:
    if (key in first) != (key in second):
        return False
    # By encoding: exact in type, and nan equals nan.
    return first is second or _encoded(first[key]) == _encoded(second[key])


def _encoded(value: Any) -> bytes:
    return encode(value, on_tensor=lambda path, tensor: "")


def _shown(group: dict[str, Any], key: str) -> str:
    return repr(outline(group[key])) if key in group else "nothing"


def _set_group(live: Group, settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        new = outline(value)
        old = live.group.get(key)
        if isinstance(old, torch.Tensor) and type(new) in (float, int):
            new = torch.tensor(new, dtype=old.dtype, device="cpu").expand(old.shape)
        if not isinstance(new, torch.Tensor):
            live.group[key] = new
        elif isinstance(old, torch.Tensor) and old.shape == new.shape:
            # A compiled or captured step has this very tensor.
            with torch.no_grad():
                old.copy_(new)
        else:
            live.group[key] = new.to(memory_of(live.params[0]).device)


def _load_globals(kind: str, optimizers: Sequence[Optimizer], trees: SavedTrees, into: Destination) -> None:
    """State that belongs to no parameter, by the optimizer's position."""
    if not any(trees.globals):
        return
    if len(trees.globals) != len(optimizers):
        into.notes.append(
            f"{kind}: state that belongs to no parameter was not loaded: the number of optimizers differs"
        )
        return
    for optimizer, values in zip(optimizers, trees.globals, strict=True):
        into.finish.append(partial(_set_globals, optimizer, values))


def _set_globals(optimizer: Optimizer, values: dict[Any, Any]) -> None:
    for key in [k for k in optimizer.state if not isinstance(k, torch.Tensor)]:
        del optimizer.state[key]
    for key, value in values.items():
        optimizer.state[key] = outline(value)
