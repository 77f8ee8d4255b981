"""Capture optimizers over flat tensors: state and hyperparameters by original parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.optimizers.capture import capture_optimizers
from bytecheckpoint.frameworks.optimizers.flat_tensors import FlatOptimizerTensor
from bytecheckpoint.frameworks.optimizers.names import ParameterNames
from bytecheckpoint.frameworks.tensors.flat_ranges import FlatRange, flat_range_shards
from bytecheckpoint.representation.shards import LiveState, TensorKey

__all__ = ["capture_flat_tensors"]


def capture_flat_tensors(
    state_name: str, views: Sequence[Optimizer], names: ParameterNames, tensors: Sequence[FlatOptimizerTensor]
) -> LiveState:
    """Describe the shards and values of all optimizers of one state.

    Args:
        state_name: name of the state.
        views: the views of the optimizers; they hold the state of parameters that are not flat.
        names: names of the views' parameters.
        tensors: the flat tensors.

    Raises:
        UsageError: state of a flat tensor is neither one value per element nor one value; names it.
    """
    ranges: list[FlatRange] = []
    for flat in tensors:
        state = flat.state()
        # A rank without elements of a parameter does not step it, so its state is not the parameter's.
        owned = [pair for pair in zip(flat.ranges, flat.placeholders, strict=True) if pair[0].owned]
        if not state or not owned:
            continue
        elementwise, values = _split_state(state_name, flat, state)
        for slot, value in elementwise.items():
            for original, placeholder in owned:
                fqn, aliases = names.by_id[id(placeholder)]
                flat_range = original.flat_range(TensorKey(state_name, fqn, slot), value, flat.offset_of(original))
                flat_range.aliases, flat_range.requires_grad = aliases, False
                ranges.append(flat_range)
        if values:
            view_state: Any = flat.view.state
            view_state.update((placeholder, values) for _, placeholder in owned)
    captured = capture_optimizers(state_name, views, names, complete=False)
    captured.shards += flat_range_shards(ranges)
    return captured


def _split_state(
    state_name: str, flat: FlatOptimizerTensor, state: Mapping[Any, Any]
) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
    """Split state into tensors with one value per element, and single values; both by slot."""
    elementwise: dict[str, torch.Tensor] = {}
    values: dict[Any, Any] = {}
    for slot, value in state.items():
        if isinstance(value, torch.Tensor) and type(slot) is str and slot:
            if tuple(value.shape) == flat.local_shape:
                elementwise[slot] = value
                continue
            if value.numel() == 1:
                values[slot] = value
                continue
            form = f"of shape {tuple(value.shape)}"
        elif _contains_tensor(value):
            form = f"in a {type(value).__name__}"
        else:
            values[slot] = value
            continue
        raise UsageError(
            f"{state_name}/state/{flat.ranges[0].fqn}/{slot} is a tensor {form}, and {flat.advice.framework} keeps the "
            f"parameter as a flat run of shape {flat.local_shape}: state that does not follow its elements cannot be "
            f"split by parameter; {flat.advice.on_save}"
        )
    return elementwise, values


def _contains_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(map(_contains_tensor, value.values()))
    return isinstance(value, list | tuple) and any(map(_contains_tensor, value))
