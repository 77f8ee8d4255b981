"""Optimizers whose parameters are flat runs of original ones: their state and settings by original parameter.

FSDP1 and ZeRO step flat tensors: several parameters strung together and cut (*joined*), or the run of one. A framework
describes each such tensor as a `Member` of an optimizer view (see `views`) whose parameters are stand-ins for the original
ones: names, groups and plain values are then handled as for any optimizer, and state that follows the elements is cut into
fragments where it lies. Loading is in `flat_restore`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.irregular import Block, Fragment, fragment_shards
from bytecheckpoint.frameworks.masters import is_foreign_master
from bytecheckpoint.frameworks.optimizers import ParameterNames, capture_optimizers
from bytecheckpoint.representation.shards import LiveState, TensorKey

__all__ = ["Member", "Part", "Words", "capture_members"]


@dataclass(slots=True)
class Part:
    """One original parameter of a flat tensor.

    Attributes:
        fqn: its name in the bare model.
        aliases: further names (shared parameters).
        shape: of the whole parameter.
        start: number of the first element that is here, in the memory order of `block`.
        first: its place in the flat tensor.
        count: number of elements here.
        held: whether this rank speaks for them.
        block: what was flattened: a transposed parameter, a tensor-parallel part.
        requires_grad: whether it is trained.
    """

    fqn: str
    aliases: list[str]
    shape: tuple[int, ...]
    start: int
    first: int
    count: int
    held: bool
    block: Block
    requires_grad: bool

    @property
    def named(self) -> tuple[str, tuple[str, ...]]:
        """(FQN, aliases)."""
        return self.fqn, tuple(self.aliases)

    def fragment(self, key: TensorKey, data: torch.Tensor, first: int) -> Fragment:
        """The run of elements of `key` that stands in `data` from place `first`."""
        return Fragment(
            key, self.shape, self.start, data, first, self.count, self.block, tuple(self.aliases), self.requires_grad
        )


class Words(NamedTuple):
    """What errors say of a framework.

    Attributes:
        framework: its name.
        unsplit: what to do when state cannot be split.
        unfit: what to do when saved state cannot be loaded.
        joined: what to do when joined parameters differ.
    """

    framework: str
    unsplit: str
    unfit: str
    joined: str


@dataclass(slots=True, kw_only=True)
class Member:
    """One flat tensor that an optimizer steps; a framework derives from it.

    Attributes:
        optimizer: the live one.
        view: of it.
        parameter: the flat tensor, as the optimizer has it.
        parts: the original parameters behind it.
        joined: whether they share its step and settings. False: one part, and the tensor is its run.
        local_shape: shape of state that has one value per element.
        where: what the flat tensor is, for errors.
        words: for errors.
        stand_ins: for each part the parameter of the view.
    """

    optimizer: Optimizer
    view: Optimizer
    parameter: torch.Tensor
    parts: Sequence[Part]
    joined: bool
    local_shape: tuple[int, ...]
    where: str
    words: Words
    stand_ins: list[torch.Tensor] = field(default_factory=list)

    def place(self, part: Part) -> int:
        """Where the elements of `part` begin in state that follows the elements."""
        return part.first if self.joined else 0

    def state(self) -> Mapping[Any, Any]:
        """The live state; empty where there is none."""
        return self.optimizer.state.get(self.parameter) or {}

    def install(self, state: Mapping[Any, Any]) -> None:
        """Make `state` the live state; none where it is empty."""
        if state:
            own = self.optimizer.state[self.parameter]
            own.clear()
            own.update(state)
        else:
            self.optimizer.state.pop(self.parameter, None)

    def leaves(self, slot: str, saved_types: set[str]) -> bool:
        """Whether a saved state of that name is no state of this optimizer."""
        return is_foreign_master(slot, self.state(), self.optimizer, saved_types)

    @property
    def steps_stateless(self) -> bool:
        """Whether a joined parameter that has no state is stepped like the others: its state is zeros then."""
        return False


def capture_members(
    kind: str, views: Sequence[Optimizer], names: ParameterNames, members: Sequence[Member]
) -> LiveState:
    """The shards and values of all optimizers of one kind.

    Args:
        kind: name of the state.
        views: of the optimizers; hold the state of parameters that are not flat.
        names: of the views' parameters.
        members: the flat ones.

    Raises:
        UsageError: state of a flat tensor is neither one value per element nor one value; names it.
    """
    fragments: list[Fragment] = []
    for member in members:
        own = member.state()
        # A rank that holds no element of a parameter does not step it: what state it has is not the parameter's.
        held = [(p, s) for p, s in zip(member.parts, member.stand_ins, strict=True) if p.held]
        if not own or not held:
            continue
        elementwise, rest = _sorted(kind, member, own)
        for slot, value in elementwise.items():
            for part, whole in held:
                fqn, aliases = names.by_id[id(whole)]
                fragment = part.fragment(TensorKey(kind, fqn, slot), value, member.place(part))
                fragment.aliases, fragment.requires_grad = aliases, False
                fragments.append(fragment)
        if rest:
            state: Any = member.view.state
            state.update((whole, rest) for _, whole in held)
    captured = capture_optimizers(kind, views, names, complete=False)
    captured.shards += fragment_shards(fragments)
    return captured


def _sorted(kind: str, member: Member, own: Mapping[Any, Any]) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
    """State with one value per element by slot; and single values."""
    elementwise: dict[str, torch.Tensor] = {}
    rest: dict[Any, Any] = {}
    for slot, value in own.items():
        if isinstance(value, torch.Tensor) and type(slot) is str and slot:
            if tuple(value.shape) == member.local_shape:
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
            f"{kind}/state/{member.parts[0].fqn}/{slot} is a tensor {form}, and {member.words.framework} keeps the "
            f"parameter as a flat run of shape {member.local_shape}: state that does not follow its elements cannot be "
            f"split by parameter; {member.words.unsplit}"
        )
    return elementwise, rest


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds_tensor, value))
