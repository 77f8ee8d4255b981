"""Loading optimizers: state exactly as saved, hyperparameters by parameter name.

Optimizer.load_state_dict is not used: it casts state to the parameter's dtype and matches by position. State goes
straight into `optimizer.state`, with the dtype that it was saved with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.leaves import (
    add_shards,
    dtype_name,
    dtype_named,
    empty_like_layout,
    empty_replicated,
    is_writable,
    memory_of,
)
from bytecheckpoint.frameworks.optimizers import (
    NOT_HYPERPARAMETERS,
    Group,
    ParameterNames,
    layout_of,
    named_groups,
    outline,
    referenced,
)
from bytecheckpoint.representation.values import TensorRef, decode, encode

__all__ = ["load_optimizers"]

# Scalars that torch's optimizers keep on the CPU, whatever the parameter's device, unless capturable or fused.
_HOST_SLOTS = frozenset({"step", "mu_product"})
_SHOWN = 3  # names in a note; the rest are counted


def load_optimizers(
    kind: str,
    optimizers: Sequence[Optimizer],
    names: ParameterNames,
    saved: SavedStates,
    into: Destination,
    *,
    strict: bool,
) -> None:
    """Plan the load of one kind into live optimizers.

    Raises:
        IncompatibleCheckpointError: parameters of one group here had different hyperparameters in the checkpoint, and
            `strict` is set.
    """
    groups = named_groups(kind, optimizers, names)
    trees = _Trees(kind, saved)
    stateless: list[str] = []
    for index, live in enumerate(groups):
        found = trees.groups_of(live.names)
        for fqn, source in zip((fqn for fqn, _ in live.names), found, strict=True):
            if source is None:
                into.missing.append(f"{kind}/param_groups/{fqn}")
        settings = _settings(kind, index, live, found, into, strict=strict)
        if settings:
            into.finish.append(partial(_set_group, live, settings))
        on_device = any(settings.get(key, live.group.get(key)) for key in ("capturable", "fused"))
        for parameter, name, source in zip(live.params, live.names, found, strict=True):
            state = _ParameterLoad(kind, live.optimizer, parameter, name, on_device)
            if state.plan(saved, trees, into):
                into.finish.append(state.install)
            elif source is not None:
                into.finish.append(partial(live.optimizer.state.pop, parameter, None))
                stateless.append(name[0])
    if stateless:
        shown = ", ".join(stateless[:_SHOWN]) + (", ..." if len(stateless) > _SHOWN else "")
        into.notes.append(f"{kind}: {len(stateless)} parameters have no state in the checkpoint and none now: {shown}")
    _load_globals(kind, optimizers, trees, into)


class _Trees:
    """The trees of all ranks as one: settings and plain state by parameter name, this rank's own tree first."""

    def __init__(self, kind: str, saved: SavedStates) -> None:
        self.groups: dict[str, dict[str, Any]] = {}
        self.values: dict[str, dict[Any, Any]] = {}
        self.canonical: dict[str, str] = {}
        self.globals: list[dict[Any, Any]] = []
        own = saved.tree(kind)
        blobs = ([own] if own is not None else []) + [t for t in saved.trees(kind) if t != own]
        for position, blob in enumerate(blobs):
            tree = decode(blob, on_tensor=TensorRef)
            if not isinstance(tree, dict) or not isinstance(tree.get("groups"), list):
                raise IncompatibleCheckpointError(
                    f"{kind} was saved from plain values, not from an optimizer: load it into a dict"
                )
            for group in tree["groups"]:
                for fqn in group["params"]:
                    self.groups.setdefault(fqn, group)
            for fqn, values in tree.get("state", {}).items():
                self.values.setdefault(fqn, values)
            for fqn, aliases in tree.get("aliases", {}).items():
                for alias in aliases:
                    self.canonical.setdefault(alias, fqn)
            if position == 0:
                self.globals = tree.get("globals", [])

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


class _ParameterLoad:
    """The state of one parameter: what to fill, then what to install."""

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

    def plan(self, saved: SavedStates, trees: _Trees, into: Destination) -> bool:
        """Ask for the state tensors; False when the checkpoint holds no state of this parameter."""
        names = (self._fqn, *self._aliases)
        live = self._optimizer.state.get(self._parameter) or {}
        used: set[int] = set()
        for found in saved.slots(self._kind, names):
            slot = found.key.slot
            target = live.get(slot)
            if not (isinstance(target, torch.Tensor) and id(target) not in used and self._takes(target, found)):
                target = self._fresh(found)
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

    def _takes(self, live: torch.Tensor, found: SavedTensor) -> bool:
        whole = live if layout_of(live, self._parameter) is None else self._parameter
        return tuple(whole.shape) == found.global_shape and dtype_name(live.dtype) == found.dtype and is_writable(live)

    def _fresh(self, found: SavedTensor) -> torch.Tensor:
        dtype = dtype_named(found.dtype)
        if found.global_shape:
            if found.global_shape == tuple(self._parameter.shape):
                return empty_like_layout(self._parameter, dtype)
            return empty_replicated(found.global_shape, dtype, self._parameter)
        on_host = found.key.slot.rpartition(".")[2] in _HOST_SLOTS and not self._on_device
        return torch.empty((), dtype=dtype, device="cpu" if on_host else memory_of(self._parameter).device)

    def install(self) -> None:
        """Make the parameter's state exactly what was saved."""
        referred: set[str] = set()
        values = {key: self._resolved(value, referred) for key, value in self._values.items()}
        state = self._optimizer.state[self._parameter]
        state.clear()
        state.update((slot, tensor) for slot, tensor in self._targets.items() if slot not in referred)
        state.update(values)

    def _resolved(self, value: Any, referred: set[str]) -> Any:
        """`value` with tensors in the place of references."""
        if isinstance(value, TensorRef):
            _, slot = referenced(value.name)
            referred.add(slot)
            return self._targets[slot]
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = self._resolved(item, referred)
            return value
        if isinstance(value, list | tuple):
            items = [self._resolved(item, referred) for item in value]
            return items if type(value) is list else tuple(items) if type(value) is tuple else value
        return value


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
    for group, fqn in groups[1:]:
        for key in dict.fromkeys((*first, *group)):
            if key in NOT_HYPERPARAMETERS or _same(first, group, key):
                continue
            shown = f"{_shown(first, key)} for {first_fqn!r}, {_shown(group, key)} for {fqn!r}"
            message = f"{kind}: group {index} joins parameters whose {key!r} differs in the checkpoint: {shown}"
            if strict:
                raise IncompatibleCheckpointError(f"{message}: split the group as it was, or load with strict=False")
            into.notes.append(f"{message}; the value here was kept")
            settings.pop(key, None)
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
            new = torch.tensor(new, dtype=old.dtype).expand(old.shape)
        if not isinstance(new, torch.Tensor):
            live.group[key] = new
        elif isinstance(old, torch.Tensor) and old.shape == new.shape:
            # A compiled or captured step has this very tensor.
            with torch.no_grad():
                old.copy_(new)
        else:
            live.group[key] = new.to(memory_of(live.params[0]).device)


def _load_globals(kind: str, optimizers: Sequence[Optimizer], trees: _Trees, into: Destination) -> None:
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
