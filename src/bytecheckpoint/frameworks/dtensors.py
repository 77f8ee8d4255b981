"""Recognising DTensors without importing them: that import takes seconds, and only its users need it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["dtensor_type", "is_dtensor"]

# Asked several times for each of thousands of tensors, nearly all of which are of these types.
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether `value` is a DTensor; there is none while their module was not imported."""
    if type(value) in _PLAIN:
        return False
    cls = dtensor_type()
    return cls is not None and isinstance(value, cls)


def dtensor_type() -> type | None:
    """The class DTensor, or None while its module was not imported."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
