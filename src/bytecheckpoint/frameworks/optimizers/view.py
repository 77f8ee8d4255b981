"""Views of optimizers by original parameters, for `capture_optimizers` and `load_optimizers`.

Frameworks that shard by bytes give their optimizer flat tensors, or hide it in an engine. Names, groups, hyperparameters
and plain values still belong to the original parameters. An adapter builds a view that has a placeholder for each
original parameter. The adapter itself handles only state with one value per element (see `tensors/flat_ranges.py`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.optim import Optimizer

__all__ = ["live_optimizer", "optimizer_view", "placeholder_parameter"]


class _View:
    live: Optimizer | None = None

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = {}


def optimizer_view(class_name: str, live: Optimizer | None = None) -> Optimizer:
    """Make an object with the `param_groups` and the `state` of an empty optimizer.

    Args:
        class_name: name of the real optimizer's class, which checkpoints record.
        live: the real optimizer, if there is one.
    """
    view = type(class_name, (_View,), {})()
    view.live = live
    return cast(Optimizer, view)


def live_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Return `optimizer`, or the real one behind a view, if there is one."""
    held: Any = optimizer
    return held.live if isinstance(held, _View) else optimizer


def placeholder_parameter(shape: tuple[int, ...], like: torch.Tensor, *, requires_grad: bool = True) -> torch.Tensor:
    """Make a tensor of a whole parameter's shape that takes the memory of one element.

    Args:
        shape: shape of the whole parameter.
        like: a tensor of the same device and dtype; the memory of one without dimensions and gradient is shared.
        requires_grad: True if the parameter is trained.
    """
    one = like.detach().new_empty(()) if like.ndim or like.requires_grad else like
    return one.expand(shape).requires_grad_(requires_grad)
