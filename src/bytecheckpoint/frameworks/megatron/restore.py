"""Loading Megatron's optimizers, from state by parameter name, wherever that was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.leaves import add_shards, dtype_named, is_writable
from bytecheckpoint.frameworks.masters import MASTER
from bytecheckpoint.frameworks.megatron.layouts import Boxes, Layout, Piece, fitted
from bytecheckpoint.frameworks.megatron.optimizers import Member, View
from bytecheckpoint.frameworks.optimizer_restore import ParameterRestore, SavedTrees, fresh_state, load_optimizers
from bytecheckpoint.frameworks.optimizers import ParameterNames

__all__ = ["load_megatron_optimizers"]


def load_megatron_optimizers(
    kind: str,
    optimizers: Sequence[Any],
    names: ParameterNames,
    layouts: Mapping[int, Layout],
    models: Mapping[int, str],
    saved: SavedStates,
    into: Destination,
    *,
    strict: bool,
) -> None:
    """Plan the load of one kind.

    Args:
        kind: name of the state.
        optimizers: the live ones.
        names: of all parameters.
        layouts: id of a parameter -> its layout.
        models: id of a parameter -> the kind of its module.
        saved: the checkpoint.
        into: receives the plan.
        strict: as in `load`.

    Raises:
        IncompatibleCheckpointError: saved state does not follow the elements of its parameter. What is planned raises it
            before anything is installed when an optimizer keeps one step for a group, and saved steps differ there.
    """
    view = View(kind, optimizers, names, layouts, copies=True)
    members = {id(member.whole): member for member in view.members}

    def restorer(
        optimizer: Optimizer, parameter: torch.Tensor, name: tuple[str, tuple[str, ...]], on_device: bool
    ) -> ParameterRestore:
        member = members[id(parameter)]
        loads.append(_MemberLoad(kind, member, name, on_device, models[id(member.stepped.parameter)], boxes))
        return loads[-1]

    loads: list[_MemberLoad] = []
    boxes = Boxes()
    load_optimizers(kind, [view.optimizer], view.names, saved, into, strict=strict, restorer=restorer)
    for shard in (shards := boxes.shards()):
        shard.converts = True
    into.wanted += shards
    into.finish.insert(0, partial(_one_step_per_group, kind, loads))
    into.finish.append(view.hand_back)


def _one_step_per_group(kind: str, loads: Sequence[_MemberLoad]) -> None:
    """See that optimizers that keep one step for all of a group get one.

    Raises:
        IncompatibleCheckpointError: the saved steps differ inside a group.
    """
    first: dict[int, _MemberLoad] = {}
    for load in loads:
        if (step := load.group_step()) is None:
            continue
        other = first.setdefault(id(load.stepped.group), load)
        if (known := other.group_step()) != step:
            raise IncompatibleCheckpointError(
                f"{kind}: {type(load.stepped.inner).__name__} keeps one step for all parameters of a group, and the "
                f"checkpoint has {known} for {other.name!r}, {step} for {load.name!r}: use AdamW of torch, or groups of "
                "their own"
            )


class _MemberLoad:
    """The state of one parameter (`ParameterRestore`)."""

    def __init__(
        self,
        kind: str,
        member: Member,
        name: tuple[str, tuple[str, ...]],
        on_device: bool,
        model: str,
        boxes: Boxes,
    ) -> None:
        self._kind = kind
        self._layout = member.layout
        self.stepped = member.stepped
        self._names = (name[0], *name[1])
        self._on_device = on_device
        self._model = model
        self._boxes = boxes
        self._memory: dict[str, torch.Tensor] = {}
        self._scalars: dict[str, torch.Tensor] = {}
        self._values: dict[Any, Any] = {}

    def plan(self, saved: SavedStates, trees: SavedTrees, into: Destination) -> bool:
        """Ask for this rank's elements of the state, for its single values, and for the master weights."""
        kind, pieces = self._kind, self._layout.pieces
        filled: dict[str, list[Piece]] = {}
        for piece in pieces:
            # The name of the whole as well: where a parameter is stored in parts, its single values go by that.
            for names in dict.fromkeys((piece.names, self._names)):
                for found in saved.slots(kind, names):
                    into.claimed.add(found.key)
                    self._take(found, piece, trees, into, filled)
                for name in names:
                    # Tied here, but stored separately: the other copies are accounted for too.
                    into.claimed.update(other.key for other in saved.slots(kind, (name,)))
        if self.stepped.master:
            for piece in pieces:
                if piece in filled.get(MASTER, ()):
                    continue
                weight = saved.find(self._model, piece.names)
                if weight is not None:
                    # Saved without master weights: the model's own are exact.
                    self._want(weight, MASTER, piece, into)
        for slot, has in filled.items():
            into.missing += [str(piece.key(kind, slot)) for piece in pieces if piece not in has and slot != MASTER]
        self._values = trees.values_of(self._names[0], self._names[1:])
        return bool(filled or self._scalars or self._values)

    def _take(
        self, found: SavedTensor, piece: Piece, trees: SavedTrees, into: Destination, filled: dict[str, list[Piece]]
    ) -> None:
        slot, shape = found.key.slot, found.global_shape
        if (found.key.fqn, slot) in trees.nested:
            raise self._unfit(found, "stands in a container")
        if slot == MASTER and not self.stepped.master:
            return
        same = shape == piece.global_shape or (piece.resizes and len(shape) == len(piece.global_shape))
        if same and slot != "step":
            if piece not in filled.setdefault(slot, []):
                filled[slot].append(piece)
                self._want(found, slot, piece, into)
        elif shape.count(1) != len(shape):
            raise self._unfit(found, f"has shape {shape}")
        elif slot not in self._scalars:
            target = fresh_state(found, self.stepped.tensor.detach(), on_device=self._on_device)
            self._scalars[slot] = target
            add_shards(into.wanted, found.key, target)

    def _want(self, found: SavedTensor, slot: str, piece: Piece, into: Destination) -> None:
        target = self._target(found, slot, piece)
        if found.global_shape == piece.global_shape or not piece.resizes:
            self._boxes.add(piece, found.key, target, self.stepped.start)
            return
        other = Boxes()
        other.add(piece, found.key, target, self.stepped.start)
        for shard in (shards := fitted(other.shards(), found.global_shape)):
            shard.converts = True
        into.wanted += shards

    def _target(self, found: SavedTensor, slot: str, piece: Piece) -> torch.Tensor:
        """Memory for this rank's elements: the live tensor where it fits, else a new one."""
        stepped = self.stepped.tensor.detach()
        if slot == MASTER:
            return stepped
        target = self._memory.get(slot)
        if target is None:
            dtype = dtype_named(found.dtype)
            if dtype.is_floating_point and torch.promote_types(dtype, stepped.dtype) != dtype:
                dtype = stepped.dtype  # from an optimizer that stepped in lower precision
            live = self.stepped.state().get(slot)
            fits = (
                isinstance(live, torch.Tensor)
                and live.shape == stepped.shape
                and live.dtype == dtype
                and is_writable(live)
                and found.global_shape == piece.global_shape
                and all(live is not other for other in self._memory.values())
            )
            # Zeros: of what a vocabulary was padded with, a checkpoint may hold nothing.
            target = live if fits else torch.zeros_like(stepped, dtype=dtype)
            assert target is not None
            self._memory[slot] = target
        return target

    def _unfit(self, found: SavedTensor, form: str) -> IncompatibleCheckpointError:
        return IncompatibleCheckpointError(
            f"{found.key} {form}, and Megatron's optimizers step the parameter of shape {tuple(self._layout.tensor.shape)} "
            "here element by element: state that does not follow the elements cannot be loaded"
        )

    @property
    def name(self) -> str:
        """The parameter's FQN."""
        return self._names[0]

    def group_step(self) -> int | None:
        """The saved step, where the optimizer keeps that in the group. The bytes must be there."""
        step = self._scalars.get("step", self._values.get("step")) if self.stepped.steps_of_group else None
        return None if step is None else int(step)

    def install(self) -> None:
        """Make the parameter's state exactly what was saved."""
        inner, tensor = self.stepped.inner, self.stepped.tensor
        values = {**self._scalars, **self._values}
        if (step := self.group_step()) is not None:
            self.stepped.group["step"] = step
            del values["step"]
        inner.state.pop(tensor, None)
        if self._memory or values:
            inner.state[tensor].update({**self._memory, **values})

    def clear(self) -> None:
        """Leave the parameter without state."""
        self.stepped.inner.state.pop(self.stepped.tensor, None)
