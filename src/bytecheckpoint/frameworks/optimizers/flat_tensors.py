"""Flat tensors that optimizers step in place of the original parameters (FSDP1, ZeRO).

A flat tensor either *joins* several parameters and is cut anywhere, or is the flat range of one parameter. A framework
describes each as a `FlatOptimizerTensor` of an optimizer view (see `view.py`), whose parameters are placeholders for the
original ones. Names, groups and plain values are then handled as for any optimizer. State with one value per element is
cut into flat ranges where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from bytecheckpoint.frameworks.optimizers.master_weights import is_unused_master
from bytecheckpoint.frameworks.tensors.flat_ranges import ParameterRange

__all__ = ["ErrorAdvice", "FlatOptimizerTensor"]


class ErrorAdvice(NamedTuple):
    """Advice in the errors about flat tensors of a framework.

    Attributes:
        framework: name of the framework.
        on_save: advice if state cannot be split by parameter.
        on_load: advice if saved state cannot be loaded.
        on_difference: advice if joined parameters differ.
    """

    framework: str
    on_save: str
    on_load: str
    on_difference: str


@dataclass(slots=True, kw_only=True)
class FlatOptimizerTensor:
    """One flat tensor that an optimizer steps; adapters derive from it.

    Attributes:
        optimizer: the live optimizer.
        view: its view.
        tensor: the flat tensor, as the optimizer has it.
        ranges: the original parameters behind it.
        joined: True if the parameters share its step and hyperparameters; False if the tensor is one parameter's range.
        local_shape: shape of state that has one value per element.
        description: name of the flat tensor in errors.
        advice: advice of the framework's errors.
        placeholders: the view's parameter for each of `ranges`.
    """

    optimizer: Optimizer
    view: Optimizer
    tensor: torch.Tensor
    ranges: Sequence[ParameterRange]
    joined: bool
    local_shape: tuple[int, ...]
    description: str
    advice: ErrorAdvice
    placeholders: list[torch.Tensor] = field(default_factory=list)

    def offset_of(self, original: ParameterRange) -> int:
        """Return where the elements of `original` begin in state with one value per element."""
        return original.offset if self.joined else 0

    def state(self) -> Mapping[Any, Any]:
        """Return the live state; empty where there is none."""
        return self.optimizer.state.get(self.tensor) or {}

    def install(self, state: Mapping[Any, Any]) -> None:
        """Replace the live state by `state`; remove it where that is empty."""
        if state:
            own = self.optimizer.state[self.tensor]
            own.clear()
            own.update(state)
        else:
            self.optimizer.state.pop(self.tensor, None)

    def skips_slot(self, slot: str, saved_types: set[str]) -> bool:
        """Return whether the saved state `slot` does not belong to this optimizer and is left out."""
        return is_unused_master(slot, self.state(), self.optimizer, saved_types)

    @property
    def zeroes_missing_state(self) -> bool:
        """True if joined parameters without saved state begin with zeros: the optimizer steps them like the others."""
        return False
