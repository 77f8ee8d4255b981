"""Recognise DTensors without importing their module, which takes seconds and which only their users need."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch

from bytecheckpoint.frameworks.detection import loaded_class

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["PLAIN_TYPES", "dtensor_of", "dtensor_type", "is_dtensor", "local_tensor"]

#: The types of nearly all tensors: a save checks each of thousands of tensors against them first.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether `value` is a DTensor."""
    if type(value) in PLAIN_TYPES:
        return False
    cls = dtensor_type()
    return cls is not None and isinstance(value, cls)


def dtensor_type() -> type | None:
    """Return the class DTensor, or None while its module is not imported."""
    return loaded_class("torch.distributed.tensor", "DTensor")


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return the memory of `value` on this rank: the local part of a DTensor, else the tensor itself. No copy."""
    return value._local_tensor if is_dtensor(value) else value


def dtensor_of(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return `local` as this rank's part of a DTensor that is distributed as `like`. No copy."""
    return type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
