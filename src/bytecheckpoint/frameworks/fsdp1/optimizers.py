"""Optimizers over FSDP1's parameters: their state and settings by original parameter.

An optimizer holds flat parameters (use_orig_params=False), or original ones of which this rank has a run of elements
(True). Either way a view of the optimizer is made, whose parameters are stand-ins for the original ones: names, groups
and plain values are then handled as for any optimizer. State that follows the elements is cut into fragments where it
lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.fsdp1.flats import Flat, Piece, is_flattened
from bytecheckpoint.frameworks.irregular import Fragment, fragment_shards
from bytecheckpoint.frameworks.optimizers import NOT_HYPERPARAMETERS, ParameterNames, capture_optimizers
from bytecheckpoint.frameworks.views import optimizer_view, stand_in
from bytecheckpoint.representation.shards import LiveState, TensorKey

__all__ = ["FlatTable", "Member", "Views", "capture_flat_optimizers"]


@dataclass(slots=True)
class FlatTable:
    """What stands behind the parameters that an optimizer may hold, by their id.

    Attributes:
        whole: flat parameters.
        pieces: original parameters of which this rank has a run of elements.
        unsharded: original parameters that are whole on every rank (NO_SHARD).
    """

    whole: dict[int, Flat] = field(default_factory=dict)
    pieces: dict[int, tuple[Flat, Piece]] = field(default_factory=dict)
    unsharded: set[int] = field(default_factory=set)

    @staticmethod
    def build(flats: Sequence[Flat]) -> FlatTable:
        """From all flat parameters of the modules in the states."""
        table = FlatTable()
        for flat in flats:
            if not flat.originals:
                table.whole[id(flat.parameter)] = flat
            elif flat.sharded:
                table.pieces.update((id(p.parameter), (flat, p)) for p in flat.pieces)
            else:
                table.unsharded.update(id(p.parameter) for p in flat.pieces)
        return table


@dataclass(slots=True)
class Member:
    """One parameter of an optimizer that FSDP1 has flattened.

    Attributes:
        optimizer: the live one.
        view: of it.
        parameter: as the optimizer has it.
        flat: the flat parameter behind it.
        pieces: the original parameters that it stands for: all of a flat one, or one.
        stand_ins: for each piece the parameter of the view.
    """

    optimizer: Optimizer
    view: Optimizer
    parameter: torch.Tensor
    flat: Flat
    pieces: list[Piece]
    stand_ins: list[torch.Tensor] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether `parameter` is a flat one."""
        return not self.flat.originals

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of state that has one value per element."""
        return tuple(self.flat.shard_shape) if self.whole else (self.pieces[0].count,)

    def place(self, piece: Piece) -> int:
        """Where the elements of `piece` begin in such state."""
        return piece.first if self.whole else 0

    def state(self) -> Mapping[Any, Any]:
        """The live state; empty where there is none."""
        return self.optimizer.state.get(self.parameter) or {}


class Views:
    """The optimizers of one kind, by original parameters.

    Args:
        kind: name of the state.
        optimizers: the live ones.
        names: of the parameters that FSDP1 left alone.
        table: of those that it flattened.
        live: let the views share the optimizers' state; else it holds the parameters that FSDP1 left alone only.

    Attributes:
        optimizers: one view for each optimizer, of a class of the same name.
        names: with the stand-ins.
        members: the flattened parameters.

    Raises:
        UsageError: an optimizer has a parameter of an FSDP1 module that is not in the states.
    """

    def __init__(
        self,
        kind: str,
        optimizers: Sequence[Optimizer],
        names: ParameterNames,
        table: FlatTable,
        *,
        live: bool,
    ) -> None:
        self._kind = kind
        self._real = list(optimizers)
        self._table = table
        self._by_id = dict(names.by_id)
        self._near: dict[int, torch.Tensor] = {}
        self.members: list[Member] = []
        self.optimizers: list[Optimizer] = []
        for optimizer in optimizers:
            view = optimizer_view(type(optimizer).__name__)
            for group in optimizer.param_groups:
                view.param_groups.append({**group, "params": list(self._expanded(optimizer, view, group["params"]))})
            if live:
                view.state = optimizer.state
            else:
                flattened = {id(m.parameter) for m in self.members}
                view.state.update((k, v) for k, v in optimizer.state.items() if id(k) not in flattened)
            self.optimizers.append(view)
        self.names = ParameterNames(self._by_id)

    def _expanded(
        self, optimizer: Optimizer, view: Optimizer, params: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        for parameter in params:
            one = self._table.pieces.get(id(parameter))
            if one is not None:
                flat, piece = one
                named = [self._by_id.get(id(parameter), piece.named)]
                yield from self._add(Member(optimizer, view, parameter, flat, [piece]), named)
            elif (whole := self._table.whole.get(id(parameter))) is not None:
                named = [piece.named for piece in whole.pieces]
                yield from self._add(Member(optimizer, view, parameter, whole, whole.pieces), named)
            elif is_flattened(parameter) and id(parameter) not in self._table.unsharded:
                raise UsageError(
                    f"{self._kind}: {type(optimizer).__name__} has a parameter of an FSDP1 module (shape "
                    f"{tuple(parameter.shape)}) that is not in the states: put the module beside its optimizer"
                )
            else:
                yield parameter

    def _add(self, member: Member, named: Sequence[tuple[str, tuple[str, ...]]]) -> Iterator[torch.Tensor]:
        self.members.append(member)
        near = self._near.get(id(member.flat))
        if near is None:
            near = self._near[id(member.flat)] = stand_in((), member.flat.parameter, requires_grad=False)
        for piece, names in zip(member.pieces, named, strict=True):
            whole = stand_in(piece.shape, near, requires_grad=piece.requires_grad)
            member.stand_ins.append(whole)
            self._by_id[id(whole)] = names
            yield whole

    def hand_back(self) -> None:
        """Put the settings of the views' groups into the optimizers' own."""
        for optimizer, view in zip(self._real, self.optimizers, strict=True):
            for own, group in zip(optimizer.param_groups, view.param_groups, strict=True):
                own.update((key, value) for key, value in group.items() if key not in NOT_HYPERPARAMETERS)


def capture_flat_optimizers(
    kind: str, optimizers: Sequence[Optimizer], names: ParameterNames, table: FlatTable
) -> LiveState:
    """The shards and values of all optimizers of one kind.

    Raises:
        UsageError: state of a flattened parameter is neither one value per element nor one value; names it.
    """
    views = Views(kind, optimizers, names, table, live=False)
    fragments: list[Fragment] = []
    for member in views.members:
        own = member.state()
        # A rank that holds no element of a parameter does not step it: what state it has is not the parameter's.
        held = [(p, s) for p, s in zip(member.pieces, member.stand_ins, strict=True) if p.held]
        if not own or not held:
            continue
        elementwise, rest = _sorted(kind, member, own)
        for slot, value in elementwise.items():
            for piece, whole in held:
                fqn, aliases = views.names.by_id[id(whole)]
                fragment = piece.fragment(TensorKey(kind, fqn, slot), value, member.place(piece))
                fragment.aliases, fragment.requires_grad = aliases, False
                fragments.append(fragment)
        if rest:
            state: Any = member.view.state
            state.update((whole, rest) for _, whole in held)
    captured = capture_optimizers(kind, views.optimizers, views.names)
    captured.shards += fragment_shards(fragments)
    return captured


def _sorted(kind: str, member: Member, own: Mapping[Any, Any]) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
    """State with one value per element by slot; and single values."""
    elementwise: dict[str, torch.Tensor] = {}
    rest: dict[Any, Any] = {}
    local = member.local_shape
    for slot, value in own.items():
        if isinstance(value, torch.Tensor) and type(slot) is str and slot:
            if tuple(value.shape) == local:
                elementwise[slot] = value
                continue
            if value.numel() == 1:
                rest[slot] = value
                continue
            form = f"of shape {tuple(value.shape)}"
        elif _holds_tensor(value):
            form = f"in a {type(value).__name__}"
        else:
            rest[slot] = value
            continue
        raise UsageError(
            f"{kind}/state/{member.pieces[0].fqn}/{slot} is a tensor {form}, and FSDP1 keeps the parameter as a flat run "
            f"of shape {local}: state that does not follow its elements cannot be split by parameter; use an optimizer "
            "with one value per element, or fully_shard (FSDP2)"
        )
    return elementwise, rest


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds_tensor, value))
