"""Optimizers that are not as they look: a view by original parameters, for capture_optimizers and load_optimizers.

Frameworks that shard by bytes give their optimizer flat tensors, or hide it in an engine. Names, groups, settings and
plain values are still those of the original parameters. An adapter builds a view that shows them so, with a stand-in
for each parameter, and deals only with the state that follows the elements (see `irregular`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.optim import Optimizer

__all__ = ["optimizer_view", "stand_in"]


class _View:
    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = {}


def optimizer_view(class_name: str) -> Optimizer:
    """Something that looks like an empty optimizer to whoever reads its `param_groups` and `state`.

    Args:
        class_name: of the real optimizer; it is written into checkpoints.
    """
    return cast(Optimizer, type(class_name, (_View,), {})())


def stand_in(shape: tuple[int, ...], near: torch.Tensor, *, requires_grad: bool = True) -> torch.Tensor:
    """A tensor of the whole parameter's shape and of the device and dtype of `near`, with the memory of one element.

    Args:
        shape: of the whole parameter.
        near: a tensor there; one without dimensions and gradient is used itself.
        requires_grad: whether the parameter is trained.
    """
    one = near.detach().new_empty(()) if near.ndim or near.requires_grad else near
    return one.expand(shape).requires_grad_(requires_grad)
