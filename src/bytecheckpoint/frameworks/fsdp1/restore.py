"""Loading optimizers over FSDP1's parameters, from state by original parameter, wherever that was saved."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.fsdp1.flats import Piece
from bytecheckpoint.frameworks.fsdp1.optimizers import FlatTable, Member, Views
from bytecheckpoint.frameworks.irregular import Fragment, fragment_shards
from bytecheckpoint.frameworks.leaves import add_shards, dtype_name, dtype_named, is_writable
from bytecheckpoint.frameworks.masters import is_foreign_master
from bytecheckpoint.frameworks.optimizer_restore import (
    ParameterRestore,
    ParameterState,
    SavedTrees,
    fresh_state,
    load_optimizers,
)
from bytecheckpoint.frameworks.optimizers import ParameterNames, outline
from bytecheckpoint.representation.values import encode

__all__ = ["load_flat_optimizers"]

_SHOWN = 3  # parameters named in an error


def load_flat_optimizers(
    kind: str,
    optimizers: Sequence[Optimizer],
    names: ParameterNames,
    table: FlatTable,
    saved: SavedStates,
    into: Destination,
    *,
    strict: bool,
) -> None:
    """Plan the load of one kind.

    Raises:
        IncompatibleCheckpointError: saved state does not follow the elements of a parameter that is flat here, or
            parameters of one flat parameter have different state or settings in the checkpoint. Steps that differ are
            found when their values have arrived, before anything is installed.
    """
    views = Views(kind, optimizers, names, table, live=True)
    loads = [_MemberLoad(kind, member) for member in views.members]
    parts = {
        id(stand_in): (load, piece)
        for load in loads
        for piece, stand_in in zip(load.member.pieces, load.member.stand_ins, strict=True)
    }

    def restorer(
        optimizer: Optimizer, parameter: torch.Tensor, name: tuple[str, tuple[str, ...]], on_device: bool
    ) -> ParameterRestore:
        part = parts.get(id(parameter))
        if part is None:
            return ParameterState(kind, optimizer, parameter, name, on_device)
        return _PartLoad(*part, name, on_device)

    load_optimizers(kind, views.optimizers, views.names, saved, into, strict=strict, restorer=restorer)
    into.finish.append(views.hand_back)
    fragments: list[Fragment] = []
    for load in loads:
        load.complete(into)
        fragments += load.fragments
    into.wanted += fragment_shards(fragments)


class _MemberLoad:
    """The state of one parameter of an optimizer: memory for it, shared by the original parameters behind it.

    Attributes:
        member: the parameter.
        fragments: what is to be filled.
        parts: FQN -> what the checkpoint has for it, in the order of the pieces.
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
                target = torch.zeros(shape, dtype=dtype, device=self.member.flat.parameter.device)
            self._memory[slot] = target
        return target

    def complete(self, into: Destination) -> None:
        """All parts have been planned: see that they go together, and order what remains to be done.

        Raises:
            IncompatibleCheckpointError: parts of one flat parameter differ in what they have.
        """
        known = {fqn: part for fqn, part in self.parts.items() if part.known}
        # Whether state of a parameter without elements was ever made is all the same.
        known = {fqn: part for fqn, part in known.items() if part.elements} or known
        if not known:
            return
        if not any(p.held for p in self.member.pieces) and not self.member.whole:
            return
        self._same("state", {fqn: part.slots for fqn, part in known.items()})
        self._same("values", {fqn: part.values for fqn, part in known.items()})
        kept = self.parts.keys() - known.keys()
        if kept:
            into.notes.append(
                f"{self.kind}: {', '.join(sorted(kept))} keep the state that their flat parameter has here"
            )
        if len(known) > 1 and any(part.scalars for part in known.values()):
            # Before anything is installed anywhere.
            into.finish.insert(0, partial(self._check_scalars, known))
        into.finish.append(partial(self._install, next(iter(known.values()))))

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
        raise IncompatibleCheckpointError(
            f"{self.kind}: the flat parameter of {self.member.flat.where or 'the root'!r} joins parameters whose {what} "
            f"differs in the checkpoint: {shown}: wrap the module with use_orig_params=True"
        )

    def _install(self, like: _PartLoad) -> None:
        state = self.member.optimizer.state
        if like.slots or like.values:
            own = state[self.member.parameter]
            own.clear()
            own.update(self._memory)
            own.update(like.scalars)
            own.update(like.values)
        else:
            state.pop(self.member.parameter, None)


class _PartLoad:
    """The state of one original parameter (`ParameterRestore`)."""

    def __init__(self, load: _MemberLoad, piece: Piece, name: tuple[str, tuple[str, ...]], on_device: bool) -> None:
        self._load = load
        self._piece = piece
        self._fqn, self._aliases = name
        self._on_device = on_device
        self.elements = prod(piece.shape)
        # Whether the checkpoint knows the parameter at all.
        self.known = False
        self.slots: dict[str, str] = {}
        self.scalars: dict[str, torch.Tensor] = {}
        self.values: dict[Any, Any] = {}
        load.parts[self._fqn] = self

    def plan(self, saved: SavedStates, trees: SavedTrees, into: Destination) -> bool:
        """Ask for this rank's elements of the state, and for its single values."""
        load, piece, kind = self._load, self._piece, self._load.kind
        names = (self._fqn, *self._aliases)
        for found in saved.slots(kind, names):
            slot = found.key.slot
            into.claimed.add(found.key)
            if is_foreign_master(slot, load.member.state(), load.member.optimizer, trees.types):
                continue
            if (found.key.fqn, slot) in trees.nested:
                raise self._unfit(found, "stands in a container")
            self.slots[slot] = found.dtype
            if found.global_shape == piece.shape:
                if piece.held or load.member.whole:
                    target = load.memory(found)
                    if dtype_name(target.dtype) == found.dtype:
                        fragment = piece.fragment(found.key, target, load.member.place(piece))
                        fragment.requires_grad = False
                        load.fragments.append(fragment)
            elif found.global_shape.count(1) == len(found.global_shape):
                if piece.held or load.member.whole:
                    near = load.member.flat.parameter.detach()
                    target = fresh_state(found, near, on_device=self._on_device)
                    self.scalars[slot] = target
                    add_shards(into.wanted, found.key, target)
            else:
                raise self._unfit(found, f"has shape {found.global_shape}")
        if self._aliases:
            # Tied here, but stored separately: the other copies are accounted for too.
            into.claimed.update(other.key for name in names for other in saved.slots(kind, (name,)))
        self.values = trees.values_of(self._fqn, self._aliases)
        (group,) = trees.groups_of([(self._fqn, self._aliases)])
        self.known = bool(self.slots or self.values) or group is not None
        return bool(self.slots or self.values)

    def _unfit(self, found: SavedTensor, form: str) -> IncompatibleCheckpointError:
        return IncompatibleCheckpointError(
            f"{found.key} {form}, and FSDP1 keeps the parameter of shape {self._piece.shape} flat here: state that does "
            "not follow its elements cannot be loaded; load it into fully_shard (FSDP2), DDP or NO_SHARD with "
            "use_orig_params=True"
        )

    def install(self) -> None:
        """Nothing: the parameter of the optimizer installs once for all its parts."""

    def clear(self) -> None:
        """Nothing: as for `install`."""
