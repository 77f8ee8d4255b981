"""Describe a checkpoint as Megatron-Core's `torch_dist` holds it, with a fully reshardable optimizer.

This is the inverse of `formats.megatron`: the layers of a model, and the experts of a layer, become one tensor, and the
state of a parameter `optimizer.state.<slot>.<parameter>`. Layers that differ keep their numbers, as in Megatron.

Megatron looks for the norm in front of a linear layer under the name that the model's layer specification gives. Both
names are written, and an empty extra state for each module; one item of DCP holds all of those with the same bytes.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError, listed
from bytecheckpoint.formats.megatron import COMMON, SCHEDULER
from bytecheckpoint.formats.megatron_names import block_of, other_names, place_in_stack
from bytecheckpoint.opening.entry import Entry
from bytecheckpoint.opening.view import CheckpointView
from bytecheckpoint.tools.optimizer_states import Parameter, names_beside, parameters_of
from bytecheckpoint.tools.state_dicts import mapped, state_dict_of
from bytecheckpoint.tools.torch_files import DcpItem, why_not_plain

__all__ = ["MegatronContent", "megatron_content"]

#: Blocks whose layers Megatron numbers, even if they are alike: multi-token prediction, hybrid models.
_NUMBERED = re.compile(r"(^|\.)mtp\.|\.mixer\.")
_EXTRA = "_extra_state"
#: Empty extra state; one object, so that it is written once.
_NONE = [None]
_FORM = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
#: Settings of a param group by which Megatron's optimizer finds it again, and that no other program has.
_IDENTIFIER = "wd_mult"


@dataclass(frozen=True, slots=True)
class MegatronContent:
    """A checkpoint as DCP items.

    Attributes:
        items: the tensors.
        blobs: plain values by name.
        skipped: names of states and values that are left out.
    """

    items: Sequence[DcpItem]
    blobs: Mapping[str, Any]
    skipped: Sequence[str]


def megatron_content(view: CheckpointView, model: str, *, alone: bool) -> MegatronContent:
    """Return a checkpoint as Megatron's; `alone` leaves out the optimizer and all states but the model.

    Raises:
        UsageError: there is no such model, or its names are not Megatron's.
        IncompatibleCheckpointError: Megatron cannot hold what a state has; the message says why.
    """
    if model not in view.states:
        raise UsageError(f"{view.path} has no {model!r}; it holds {', '.join(view.states)}")
    shown: dict[str, Entry] = {}
    skipped = []
    for key in view.keys_of(model):
        if key.endswith(_EXTRA):
            skipped += [key] if key in view.tensors or view[key] is not None else []
        elif key in view.tensors:
            fqn = key.removeprefix(f"{model}/")
            shown |= dict.fromkeys((fqn, *other_names(fqn)), view.tensors[key])
    if not any(block_of(fqn) in ("decoder.layers.", "encoder.layers.") for fqn in shown):
        raise UsageError(
            f"{view.path}: the names of {model!r} are not Megatron's: open it with a layout that gives these"
        )
    stacks = _stacks(view, shown)
    items = [stacks[fqn].item("", entry, entry.dtype) for fqn, entry in shown.items()]
    blobs: dict[str, Any] = dict.fromkeys(_extra_states(stacks), _NONE)
    common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0}
    optimizer, _ = names_beside(model)
    others = [state for state in view.states if state not in (model, optimizer)]
    if not alone:
        if optimizer in view.states:
            parameters, groups = parameters_of(view, model, optimizer, "Megatron")
            items += _states_of(view, model, shown, stacks, parameters)
            steps = [max((float(parameters[p].step or 0) for p in one["params"]), default=0.0) for one in groups]
            common |= {"iteration": int(max(steps)), "optimizer": _optimizer(view, groups, steps)}
        of_program, more = _of_program(view, others, common.keys() & {"optimizer"})
        common, blobs = {**common, **of_program}, {**blobs, **more}
        skipped += [state for state in others if state not in ("extra_states", "scheduler", SCHEDULER)]
    common["content_metadata"] = {**common.get("content_metadata", {}), **_FORM}
    _check_common(view, common)
    return MegatronContent(items, {**blobs, COMMON: [common]}, skipped)


@dataclass(frozen=True, slots=True)
class _StackPlace:
    """The place of a tensor in a stack of tensors; a stack without dimensions is the tensor itself.

    Attributes:
        name: name of the stack.
        at: coordinates in the dimensions of the stack.
        sizes: sizes of these dimensions.
    """

    name: str
    at: tuple[int, ...]
    sizes: tuple[int, ...]

    def item(self, prefix: str, entry: Entry, dtype: torch.dtype) -> DcpItem:
        return DcpItem(f"{prefix}{self.name}", entry.key, (*self.sizes, *entry.shape), dtype, self.at)

    def extra_state(self) -> str:
        """Return the name of the extra state of the module that has the tensor."""
        place, sizes = (".".join(map(str, numbers)) for numbers in (self.at or (0,), self.sizes or (1,)))
        return f"{self.name.rpartition('.')[0]}.{_EXTRA}/shard_{place}_{sizes}"


def _stacks(view: CheckpointView, shown: Mapping[str, Entry]) -> dict[str, _StackPlace]:
    """Return the places of all tensors. Layers are stacked if all layers of their block are alike."""
    blocks = {fqn: block for fqn in shown if (block := block_of(fqn)) is not None}
    layers = dict.fromkeys(blocks.values(), 0)
    for fqn, block in blocks.items():
        layers[block] = max(layers[block], place_in_stack(fqn, by_layer=True)[1][0] + 1)
    numbered = {block for fqn, block in blocks.items() if _NUMBERED.search(fqn)}
    for fqns, sizes in _stacked(shown, set()).values():
        block = blocks.get(fqns[0])
        if block is not None and (sizes is None or sizes[0] != layers[block]):
            numbered.add(block)
    found: dict[str, _StackPlace] = {}
    for name, (fqns, sizes) in _stacked(shown, numbered).items():
        if sizes is None:
            raise IncompatibleCheckpointError(
                f"{view.path}: Megatron has no stack of different experts, as {name!r} is"
            )
        found |= {fqn: _StackPlace(name, place_in_stack(fqn, block_of(fqn) not in numbered)[1], sizes) for fqn in fqns}
    return found


def _stacked(
    shown: Mapping[str, Entry], numbered: Container[str | None]
) -> dict[str, tuple[list[str], tuple[int, ...] | None]]:
    """Return the tensors of each stack and its sizes; None for the sizes if tensors lack or differ."""
    parts: dict[str, dict[tuple[int, ...], str]] = {}
    for fqn in shown:
        name, at = place_in_stack(fqn, block_of(fqn) not in numbered)
        parts.setdefault(name, {})[at] = fqn
    found: dict[str, tuple[list[str], tuple[int, ...] | None]] = {}
    for name, of_stack in parts.items():
        sizes = tuple(max(numbers) + 1 for numbers in zip(*of_stack, strict=True))
        kinds = {(shown[fqn].shape, shown[fqn].dtype) for fqn in of_stack.values()}
        found[name] = list(of_stack.values()), sizes if len(of_stack) == math.prod(sizes) and len(kinds) == 1 else None
    return found


def _extra_states(stacks: Mapping[str, _StackPlace]) -> Iterator[str]:
    """Yield the names of extra states that a model may look for: Megatron's own layers save one that is empty."""
    for fqn, place in stacks.items():
        if not fqn.startswith(("embedding.", "output_layer.")):
            yield place.extra_state()
        if ".self_attention.linear_proj." in fqn:
            yield replace(place, name=place.name.replace(".linear_proj.", ".core_attention.")).extra_state()


def _states_of(
    view: CheckpointView,
    model: str,
    shown: Mapping[str, Entry],
    stacks: Mapping[str, _StackPlace],
    parameters: Mapping[str, Parameter],
) -> Iterator[DcpItem]:
    """Yield the state of all parameters, each under all names of the parameter."""
    known: dict[Any, list[str]] = {}
    for fqn, entry in shown.items():
        known.setdefault(view.stored_under(entry.key), []).append(fqn)
    names = {fqn: known[view.stored_under(f"{model}/{fqn}")] for fqn in parameters}
    held = {name for of_one in names.values() for name in of_one}
    stacked = {stacks[name].name for name in held}
    if lacking := [fqn for fqn, place in stacks.items() if place.name in stacked and fqn not in held]:
        raise IncompatibleCheckpointError(
            f"{view.path}: Megatron has the states of all layers and experts or of none; {listed(lacking)} have none"
        )
    for fqn, one in parameters.items():
        for name in names[fqn]:
            yield stacks[name].item("optimizer.state.param.", one.weight, torch.float32)
            for slot, entry in one.slots.items():
                yield stacks[name].item(f"optimizer.state.{slot}.", entry, entry.dtype)


def _optimizer(view: CheckpointView, groups: Sequence[Mapping[str, Any]], steps: Sequence[float]) -> dict[Any, Any]:
    """Return the values of the optimizer; experts with groups of their own have an optimizer of their own."""
    if any(_IDENTIFIER not in group for group in groups):
        raise IncompatibleCheckpointError(
            f"{view.path}: Megatron finds param groups by settings that these lack ({_IDENTIFIER!r}): state= exports "
            "the model alone"
        )
    of_experts = [
        bool(group["params"]) and all(".local_experts." in fqn for fqn in group["params"]) for group in groups
    ]
    forms = []
    for expert in sorted(set(of_experts)):
        found = [
            {"is_expert_parallel": expert, **{k: v for k, v in group.items() if k != "params"}, "step": step}
            for group, step, of in zip(groups, steps, of_experts, strict=True)
            if of == expert
        ]
        forms.append(
            {"optimizer": {"param_groups": found}, "param_state_sharding_type": _FORM["distrib_optim_sharding_type"]}
        )
    return dict(enumerate(forms)) if len(forms) > 1 else forms[0]


def _of_program(
    view: CheckpointView, states: Sequence[str], taken: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the common values of the program, and those that are values of their own, by name."""
    found: dict[str, Any] = {}
    extra = state_dict_of(view, "extra_states") if "extra_states" in states else {}
    if isinstance(extra, dict):
        found = mapped(extra, lambda entry: entry[...])
    for state in ("scheduler", SCHEDULER):
        if state in states:
            found[SCHEDULER] = mapped(state_dict_of(view, state), lambda entry: entry[...])
    if lost := sorted(taken & found.keys()):
        raise IncompatibleCheckpointError(
            f"{view.path}: Megatron has another meaning for {listed(lost)} in 'extra_states'"
        )
    if isinstance(args := found.get("args"), dict):
        found["args"] = Namespace(**args)
    own = {name: [found.pop(name)] for name in list(found) if "/shard_" in name}
    return found, own


def _check_common(view: CheckpointView, common: Mapping[str, Any]) -> None:
    """Refuse values that Megatron's own load refuses: it allows no classes but a few."""
    for name, value in common.items():
        if reason := why_not_plain(value, [Namespace]):
            raise IncompatibleCheckpointError(
                f"{view.path}: Megatron does not load {name!r} of 'extra_states': {reason}"
            )
