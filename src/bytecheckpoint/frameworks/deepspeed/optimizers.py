"""Optimizers inside an engine: state, master weights and settings by original parameter.

ZeRO gives the optimizer flat tensors, of which each rank steps its own; the optimizer is shown to the ordinary code as a
view by original parameters (see `flat_optimizers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, SavedStates
from bytecheckpoint.frameworks.deepspeed.partitions import (
    Flat,
    Run,
    is_replica,
    link_state,
    shape_of,
    unflattened,
    zero_flats,
)
from bytecheckpoint.frameworks.flat_optimizers import Member, Part, Words, capture_members
from bytecheckpoint.frameworks.flat_restore import load_members
from bytecheckpoint.frameworks.irregular import WHOLE, fragment_shards
from bytecheckpoint.frameworks.masters import MASTER
from bytecheckpoint.frameworks.optimizers import NOT_HYPERPARAMETERS, ParameterNames
from bytecheckpoint.frameworks.views import optimizer_view, stand_in
from bytecheckpoint.representation.shards import LiveState, TensorKey

__all__ = ["WrappedOptimizer", "capture_wrapped", "load_wrapped"]

_WORDS = Words(
    framework="ZeRO",
    unsplit="use an optimizer with one value per element",
    unfit="load it into an engine without ZeRO, or into fully_shard (FSDP2)",
    joined="ZeRO steps a param group as one: give them groups of their own",
)
# Of a group of FusedAdam: how many steps state that is made from now on has had; and what makes a group one of experts.
_BOOKKEEPING = frozenset({"step", "moe"})


@dataclass(slots=True, kw_only=True)
class _ZeroMember(Member):
    """A flat tensor of ZeRO.

    ZeRO steps a parameter that has no gradient too, with a gradient of zeros.
    """

    def state(self) -> Mapping[Any, Any]:
        """The live state, in the form of torch's optimizers: DeepSpeed's own count steps in plain numbers."""
        own = Member.state(self)
        if type(own.get("step")) is int:
            return {**own, "step": torch.tensor(float(own["step"]))}
        return own

    def install(self, state: Mapping[Any, Any]) -> None:
        """Make `state` the live state, in the form that the optimizer has it."""
        step = state.get("step")
        if isinstance(step, torch.Tensor) and _counts_in_numbers(self.optimizer):
            state = {**state, "step": int(step)}
        Member.install(self, state)

    def leaves(self, slot: str, saved_types: set[str]) -> bool:
        """Master weights are filled with the weights, by `load_zero_modules`."""
        return slot == MASTER

    @property
    def steps_stateless(self) -> bool:
        """True: what had no state goes on from zeros."""
        return True


def _counts_in_numbers(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("deepspeed.")


class WrappedOptimizer:
    """What stands behind an engine's optimizer.

    Args:
        kind: name of the state.
        wrapper: the optimizer.
        names: of all parameters of the states.

    Attributes:
        wrapper: the optimizer.
        base: the one that it steps.
        flats: the flat tensors; empty where each parameter has a master weight of its own.
        masters: id of a parameter -> its master weights here, where there are any.

    Raises:
        UsageError: it has a parameter that no module in the states has.
    """

    def __init__(self, kind: str, wrapper: Any, names: ParameterNames) -> None:
        self.kind = kind
        self.wrapper = wrapper
        self.base: Optimizer = wrapper.optimizer
        self.names = names
        self.masters: dict[int, Run] = {}
        self.flats: list[Flat] = []
        if unflattened(wrapper):
            for low, high in self._pairs():
                self._named(low)
                self.masters[id(low)] = Run(high.detach(), 0, 0, high.numel())
            return
        self.flats = zero_flats(wrapper)
        for flat in self.flats:
            for parameter, run in flat.runs:
                self._named(parameter)
                self.masters[id(parameter)] = replace(run, data=run.data.detach())

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, its master weight), where each has its own."""
        for lows, highs in zip(self.wrapper.fp16_groups, self.wrapper.fp32_groups, strict=True):
            yield from zip(lows, highs, strict=True)

    def _named(self, parameter: torch.Tensor) -> tuple[str, tuple[str, ...]]:
        found = self.names.by_id.get(id(parameter))
        if found is None:
            raise UsageError(
                f"{self.kind}: {type(self.wrapper).__name__} has a parameter of shape {shape_of(parameter)} that is in"
                " none of the modules in the states: put the engine, or its module, beside its optimizer"
            )
        return found

    def part(self, parameter: torch.Tensor, run: Run) -> Part:
        """One parameter of a flat tensor."""
        fqn, aliases = self._named(parameter)
        held = run.count > 0 and not is_replica(parameter)
        shape = shape_of(parameter)
        return Part(fqn, list(aliases), shape, run.start, run.first, run.count, held, WHOLE, parameter.requires_grad)

    def view(self, *, saves: bool) -> tuple[Optimizer, ParameterNames, list[Member]]:
        """The optimizer by original parameters, the names of these, and the flat tensors.

        Args:
            saves: for a save. The view's type is written into the checkpoint, and says that master weights are not those
                of a plain optimizer.
        """
        name = type(self.base).__name__
        view = optimizer_view(f"{type(self.wrapper).__name__}({name})" if saves else name)
        for group in self.base.param_groups:
            view.param_groups.append({**_settings(group), "params": []})
        if not self.flats:
            return view, self._view_of_pairs(view, saves=saves), []
        by_id: dict[int, tuple[str, tuple[str, ...]]] = {}
        members: list[Member] = []
        for number, flat in enumerate(self.flats):
            parts = [self.part(parameter, run) for parameter, run in flat.runs]
            member = _ZeroMember(
                optimizer=flat.optimizer,
                view=view,
                parameter=flat.data,
                parts=parts,
                joined=True,
                local_shape=tuple(flat.data.shape),
                where=f"flat tensor {number} (param group {flat.group})",
                words=_WORDS,
            )
            near = stand_in((), flat.data, requires_grad=False)
            for part in parts:
                whole = stand_in(part.shape, near, requires_grad=part.requires_grad)
                member.stand_ins.append(whole)
                by_id[id(whole)] = part.named
                view.param_groups[flat.group]["params"].append(whole)
            members.append(member)
        return view, ParameterNames(by_id), members

    def _view_of_pairs(self, view: Optimizer, *, saves: bool) -> ParameterNames:
        """Fill a view whose parameters are the master weights themselves."""
        for own, group in zip(self.base.param_groups, view.param_groups, strict=True):
            group["params"] = list(own["params"])
        view.state = self.base.state
        if saves:
            state: Any = {high: {**self.base.state.get(high, {}), MASTER: high.detach()} for _, high in self._pairs()}
            view.state = state
        return ParameterNames({id(high): self._named(low) for low, high in self._pairs()})

    def hand_back(self, view: Optimizer) -> None:
        """Put the settings of the view's groups into the optimizer's own, after its state has been installed."""
        for own, group in zip(self.base.param_groups, view.param_groups, strict=True):
            own.update(_settings(group))
        link_state(self.wrapper, self.flats)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters; the name of a group of experts says which ranks share it."""
    left = _BOOKKEEPING | {"name"} if group.get("moe") else _BOOKKEEPING
    return {key: value for key, value in group.items() if key not in NOT_HYPERPARAMETERS and key not in left}


def capture_wrapped(wrapped: WrappedOptimizer) -> LiveState:
    """The shards and values of an engine's optimizer.

    Raises:
        UsageError: state is neither one value per element nor one value; names it.
    """
    view, names, members = wrapped.view(saves=True)
    state = capture_members(wrapped.kind, [view], names, members)
    fragments = []
    for flat in wrapped.flats:
        for parameter, run in flat.runs:
            # A model in full precision needs no copies beside it.
            part = wrapped.part(parameter, run)
            if part.held and flat.data.dtype != parameter.dtype:
                fragment = part.fragment(TensorKey(wrapped.kind, part.fqn, MASTER), flat.data.detach(), run.first)
                fragment.requires_grad = False
                fragments.append(fragment)
    state.shards += fragment_shards(fragments)
    return state


def load_wrapped(wrapped: WrappedOptimizer, saved: SavedStates, into: Destination, *, strict: bool) -> None:
    """Plan the load of an engine's optimizer, but for its master weights; see `load_members` for what is raised."""
    view, names, members = wrapped.view(saves=False)
    load_members(wrapped.kind, [view], names, members, saved, into, strict=strict)
    into.finish.append(lambda: wrapped.hand_back(view))
