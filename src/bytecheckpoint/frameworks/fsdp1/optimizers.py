"""Optimizers over FSDP1's parameters: their state and settings by original parameter.

An optimizer holds flat parameters (use_orig_params=False), or original ones of which this rank has a run of elements
(True). Either way a view of the optimizer is made, whose parameters are stand-ins for the original ones: names, groups
and plain values are then handled as for any optimizer. State that follows the elements is cut into fragments where it
lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, SavedStates
from bytecheckpoint.frameworks.flat_optimizers import Member, Words, capture_members
from bytecheckpoint.frameworks.flat_restore import load_members
from bytecheckpoint.frameworks.fsdp1.flats import Flat, Piece, is_flattened
from bytecheckpoint.frameworks.optimizers import NOT_HYPERPARAMETERS, ParameterNames
from bytecheckpoint.frameworks.views import optimizer_view, stand_in
from bytecheckpoint.representation.shards import LiveState

__all__ = ["FlatTable", "capture_flat_optimizers", "load_flat_optimizers"]


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


_WORDS = Words(
    framework="FSDP1",
    unsplit="use an optimizer with one value per element, or fully_shard (FSDP2)",
    unfit="load it into fully_shard (FSDP2), DDP or NO_SHARD with use_orig_params=True",
    joined="wrap the module with use_orig_params=True",
)


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
                yield from self._add(optimizer, view, parameter, flat, [piece], named)
            elif (whole := self._table.whole.get(id(parameter))) is not None:
                named = [piece.named for piece in whole.pieces]
                yield from self._add(optimizer, view, parameter, whole, whole.pieces, named)
            elif is_flattened(parameter) and id(parameter) not in self._table.unsharded:
                raise UsageError(
                    f"{self._kind}: {type(optimizer).__name__} has a parameter of an FSDP1 module (shape "
                    f"{tuple(parameter.shape)}) that is not in the states: put the module beside its optimizer"
                )
            elif self._table.whole and id(parameter) not in self._by_id:
                raise UsageError(
                    f"{self._kind}: {type(optimizer).__name__} has a parameter (shape {tuple(parameter.shape)}) that no "
                    "module in the states has: an optimizer that was made before FSDP1 wrapped the module without "
                    "use_orig_params steps what FSDP1 has replaced; make it from the parameters of the wrapped module, or "
                    "put its module into the states"
                )
            else:
                yield parameter

    def _add(
        self,
        optimizer: Optimizer,
        view: Optimizer,
        parameter: torch.Tensor,
        flat: Flat,
        pieces: Sequence[Piece],
        named: Sequence[tuple[str, tuple[str, ...]]],
    ) -> Iterator[torch.Tensor]:
        joined = not flat.originals
        member = Member(
            optimizer=optimizer,
            view=view,
            parameter=parameter,
            parts=pieces,
            joined=joined,
            local_shape=tuple(flat.shard_shape) if joined else (pieces[0].count,),
            where=f"the flat parameter of {flat.where or 'the root'!r}",
            words=_WORDS,
        )
        self.members.append(member)
        near = self._near.get(id(flat))
        if near is None:
            near = self._near[id(flat)] = stand_in((), flat.parameter, requires_grad=False)
        for piece, names in zip(pieces, named, strict=True):
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
    return capture_members(kind, views.optimizers, views.names, views.members)


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
    """Plan the load of one kind; see `load_members` for what is raised."""
    views = Views(kind, optimizers, names, table, live=True)
    load_members(kind, views.optimizers, views.names, views.members, saved, into, strict=strict)
    into.finish.append(views.hand_back)
