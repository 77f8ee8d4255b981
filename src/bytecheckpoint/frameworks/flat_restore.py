"""Loading optimizers over flat tensors, from state by original parameter, wherever that was saved."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.flat_optimizers import Member, Part
from bytecheckpoint.frameworks.irregular import Fragment, fragment_shards
from bytecheckpoint.frameworks.leaves import add_shards, dtype_name, dtype_named, is_writable
from bytecheckpoint.frameworks.optimizer_restore import (
    ParameterRestore,
    ParameterState,
    SavedTrees,
    fresh_state,
    load_optimizers,
)
from bytecheckpoint.frameworks.optimizers import ParameterNames, outline
from bytecheckpoint.representation.values import encode

__all__ = ["load_members"]

_SHOWN = 3  # parameters named in an error


def load_members(
    kind: str,
    views: Sequence[Optimizer],
    names: ParameterNames,
    members: Sequence[Member],
    saved: SavedStates,
    into: Destination,
    *,
    strict: bool,
) -> None:
    """Plan the load of one kind.

    Args:
        kind: name of the state.
        views: of the optimizers; share the state of parameters that are not flat.
        names: of the views' parameters.
        members: the flat ones.
        saved: the checkpoint.
        into: receives the plan.
        strict: as in `load`.

    Raises:
        IncompatibleCheckpointError: saved state does not follow the elements of a parameter that is flat here, or
            parameters that are joined here have different state or settings in the checkpoint. Steps that differ are
            found when their values have arrived, before any rank installs anything.
    """
    loads = [_MemberLoad(kind, member) for member in members]
    parts = {
        id(stand_in): (load, part)
        for load in loads
        for part, stand_in in zip(load.member.parts, load.member.stand_ins, strict=True)
    }

    def restorer(
        optimizer: Optimizer, parameter: torch.Tensor, name: tuple[str, tuple[str, ...]], on_device: bool
    ) -> ParameterRestore:
        part = parts.get(id(parameter))
        if part is None:
            return ParameterState(kind, optimizer, parameter, name, on_device)
        return _PartLoad(*part, name, on_device)

    load_optimizers(kind, views, names, saved, into, strict=strict, restorer=restorer)
    fragments: list[Fragment] = []
    for load in loads:
        load.complete(into)
        fragments += load.fragments
    into.wanted += fragment_shards(fragments)


class _MemberLoad:
    """The state of one flat tensor: memory for it, shared by the original parameters behind it.

    Attributes:
        member: the tensor.
        fragments: what is to be filled.
        parts: FQN -> what the checkpoint has for it, in the order of the parts.
    """

    def __init__(self, kind: str, member: Member) -> None:
        self.kind = kind
        self.member = member
        self.fragments: list[Fragment] = []
        self.parts: dict[str, _PartLoad] = {}
        self._memory: dict[str, torch.Tensor] = {}

    def memory(self, found: SavedTensor) -> torch.Tensor:
        """The local part of one slot: the live tensor where it fits, else a new one."""
        slot = found.key.slot
        target = self._memory.get(slot)
        if target is None:
            shape, dtype = self.member.local_shape, dtype_named(found.dtype)
            live = self.member.state().get(slot)
            if (
                isinstance(live, torch.Tensor)
                and tuple(live.shape) == shape
                and live.dtype == dtype
                and is_writable(live)
                and all(live is not other for other in self._memory.values())
            ):
                target = live
            else:
                # Zeros: the padding is stepped too, and must not bring in nan.
                target = torch.zeros(shape, dtype=dtype, device=self.member.parameter.device)
            self._memory[slot] = target
        return target

    def complete(self, into: Destination) -> None:
        """All parts have been planned: see that they go together, and order what remains to be done.

        Raises:
            IncompatibleCheckpointError: parts of one flat tensor differ in what they have.
        """
        known = {fqn: part for fqn, part in self.parts.items() if part.known}
        # Whether state of a parameter without elements was ever made is all the same.
        known = {fqn: part for fqn, part in known.items() if part.elements} or known
        if self.member.steps_stateless:
            known = self._without_stateless(known, into)
        if not known:
            return
        if not any(p.held for p in self.member.parts) and not self.member.joined:
            return
        self._same("state", {fqn: part.slots for fqn, part in known.items()})
        self._same("values", {fqn: part.values for fqn, part in known.items()})
        kept = [fqn for fqn, part in self.parts.items() if not part.known]
        if kept:
            into.notes.append(
                f"{self.kind}: {', '.join(sorted(kept))} keep the state that their flat parameter has here"
            )
        if len(known) > 1 and any(part.scalars for part in known.values()):
            into.checks.append(partial(self._check_scalars, known))
        into.finish.append(partial(self._install, next(iter(known.values()))))

    def _without_stateless(self, known: dict[str, _PartLoad], into: Destination) -> dict[str, _PartLoad]:
        """Without the parts that have no state where others do; theirs begins at zero."""
        without = [part for part in known.values() if not (part.slots or part.values)]
        if not without or len(without) == len(known):
            return known
        shown = ", ".join(part.fqn for part in without[:_SHOWN]) + (", ..." if len(without) > _SHOWN else "")
        into.notes.append(f"{self.kind}: {len(without)} parameters without saved state begin at zero: {shown}")
        into.finish.append(partial(self._zero, without))
        return {fqn: part for fqn, part in known.items() if part not in without}

    def _zero(self, parts: list[_PartLoad]) -> None:
        for memory in self._memory.values():
            for load in parts:
                place = self.member.place(load.part)
                memory[place : place + load.part.count].zero_()

    def _check_scalars(self, known: dict[str, _PartLoad]) -> None:
        for slot in next(iter(known.values())).scalars:
            self._same(slot, {fqn: part.scalars[slot].tolist() for fqn, part in known.items()})

    def _same(self, what: str, found: dict[str, Any]) -> None:
        groups: dict[bytes, list[str]] = {}
        for fqn, value in found.items():
            # By encoding: exact in type, and nan equals nan.
            groups.setdefault(encode(value, on_tensor=lambda path, tensor: ""), []).append(fqn)
        if len(groups) < 2:
            return
        shown = "; ".join(
            f"{outline(found[fqns[0]])!r} for {', '.join(map(repr, fqns[:_SHOWN]))}"
            + (f" and {len(fqns) - _SHOWN} more" if len(fqns) > _SHOWN else "")
            for fqns in groups.values()
        )
        member = self.member
        raise IncompatibleCheckpointError(
            f"{self.kind}: {member.where} joins parameters whose {what} differs in the checkpoint: {shown}: "
            f"{member.words.joined}"
        )

    def _install(self, like: _PartLoad) -> None:
        state: dict[Any, Any] = {}
        if like.slots or like.values:
            state = {**self._memory, **like.scalars, **like.values}
        self.member.install(state)


class _PartLoad:
    """The state of one original parameter (`ParameterRestore`)."""

    def __init__(self, load: _MemberLoad, part: Part, name: tuple[str, tuple[str, ...]], on_device: bool) -> None:
        self._load = load
        self.part = part
        self.fqn, self._aliases = name
        self._on_device = on_device
        self.elements = prod(part.shape)
        # Whether the checkpoint knows the parameter at all.
        self.known = False
        self.slots: dict[str, str] = {}
        self.scalars: dict[str, torch.Tensor] = {}
        self.values: dict[Any, Any] = {}
        load.parts[self.fqn] = self

    def plan(self, saved: SavedStates, trees: SavedTrees, into: Destination) -> bool:
        """Ask for this rank's elements of the state, and for its single values."""
        load, part, kind = self._load, self.part, self._load.kind
        names = (self.fqn, *self._aliases)
        for found in saved.slots(kind, names):
            slot = found.key.slot
            into.claimed.add(found.key)
            if load.member.leaves(slot, trees.types):
                continue
            if (found.key.fqn, slot) in trees.nested:
                raise self._unfit(found, "stands in a container")
            self.slots[slot] = found.dtype
            if found.global_shape == part.shape:
                if part.held or load.member.joined:
                    target = load.memory(found)
                    if dtype_name(target.dtype) == found.dtype:
                        fragment = part.fragment(found.key, target, load.member.place(part))
                        fragment.requires_grad = False
                        load.fragments.append(fragment)
            elif found.global_shape.count(1) == len(found.global_shape):
                if part.held or load.member.joined:
                    near = load.member.parameter.detach()
                    target = fresh_state(found, near, on_device=self._on_device)
                    self.scalars[slot] = target
                    add_shards(into.wanted, found.key, target)
            else:
                raise self._unfit(found, f"has shape {found.global_shape}")
        if self._aliases:
            # Tied here, but stored separately: the other copies are accounted for too.
            into.claimed.update(other.key for name in names for other in saved.slots(kind, (name,)))
        self.values = trees.values_of(self.fqn, self._aliases)
        (group,) = trees.groups_of([(self.fqn, self._aliases)])
        self.known = bool(self.slots or self.values) or group is not None
        return bool(self.slots or self.values)

    def _unfit(self, found: SavedTensor, form: str) -> IncompatibleCheckpointError:
        words = self._load.member.words
        return IncompatibleCheckpointError(
            f"{found.key} {form}, and {words.framework} keeps the parameter of shape {self.part.shape} flat here: state "
            f"that does not follow its elements cannot be loaded; {words.unfit}"
        )

    def install(self) -> None:
        """Nothing: the flat tensor's state is installed once for all its parts."""

    def clear(self) -> None:
        """Nothing: as for `install`."""
