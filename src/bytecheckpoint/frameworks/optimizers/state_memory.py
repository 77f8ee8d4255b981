"""Memory for the optimizer state that a load fills."""

from __future__ import annotations

import torch

from bytecheckpoint.frameworks.base import SavedTensor
from bytecheckpoint.frameworks.tensors.allocation import empty_like_layout, empty_on_mesh_of
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named

__all__ = ["SINGLE_VALUE_SLOTS", "allocate_state"]

#: States with one value for each parameter, also for a parameter without dimensions, whose shape does not tell. torch's
#: optimizers hold them on the CPU, whatever the parameter's device, unless capturable or fused.
SINGLE_VALUE_SLOTS = frozenset({"step", "mu_product"})


def allocate_state(found: SavedTensor, parameter: torch.Tensor, *, on_device: bool) -> torch.Tensor:
    """Allocate a state tensor of `parameter`, distributed as the parameter is where the shape allows it.

    Args:
        found: the saved state tensor.
        parameter: the live parameter.
        on_device: whether the optimizer holds scalars on the parameter's device.
    """
    dtype = dtype_named(found.dtype)
    if found.key.slot.rpartition(".")[2] in SINGLE_VALUE_SLOTS and not found.global_shape and not on_device:
        return torch.empty((), dtype=dtype, device="cpu")
    if found.global_shape == tuple(parameter.shape):
        return empty_like_layout(parameter, dtype)
    return empty_on_mesh_of(parameter, found.global_shape, dtype)
