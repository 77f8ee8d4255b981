"""Find FSDP1 units, and the parameters that they have flattened."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.frameworks.detection import contains_module, loaded_class, nested_objects

__all__ = ["find_fsdp1", "is_flattened", "is_fsdp1"]


def find_fsdp1(states: Mapping[str, object]) -> str:
    """Describe where in `states` FSDP1 is, or return ""."""
    unit = _unit_class()
    if unit is None:
        return ""
    for state_name, value in states.items():
        for item in nested_objects(value, (nn.Module, Optimizer)):
            if isinstance(item, nn.Module) and contains_module(item, unit):
                name = next(name for name, module in item.named_modules() if isinstance(module, unit))
                return f"{state_name}: module {name!r}" if name else state_name
            if isinstance(item, Optimizer) and any(any(map(is_flattened, g["params"])) for g in item.param_groups):
                return f"{state_name}: a parameter of {type(item).__name__}"
    return ""


def is_fsdp1(module: nn.Module) -> bool:
    """Return whether `module` is a FullyShardedDataParallel."""
    unit = _unit_class()
    return unit is not None and isinstance(module, unit)


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return whether `parameter` is a flat parameter of FSDP1, or a part of one."""
    # Asking a tensor for an attribute that it lacks takes ten times as long.
    return "_fsdp_flattened" in vars(parameter)


def _unit_class() -> type | None:
    return loaded_class("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
