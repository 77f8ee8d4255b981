"""Master weights of a model whose optimizer is not in the states, found by the links that Megatron leaves at parameters.

Megatron's optimizers set `main_param` at each parameter that they step a float32 copy of. The copy of a distributed
optimizer is this rank's range of the parameter, which the buckets of the model's wrapper tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

__all__ = ["LinkedMaster", "has_linked_master", "linked_master"]


class LinkedMaster(NamedTuple):
    """This rank's master weights of one parameter.

    Attributes:
        tensor: the master weights.
        start: for a flat range, the number of its first element in the parameter; None: the tensor has all elements.
    """

    tensor: torch.Tensor
    start: int | None


def has_linked_master(parameter: torch.Tensor) -> bool:
    """Return whether the parameter has master weights, on whatever rank."""
    attributes = vars(parameter)
    return attributes.get("main_param") is not None or bool(attributes.get("main_param_sharded", False))


def linked_master(parameter: torch.Tensor, ranges: Mapping[int, Sequence[tuple[int, int]]]) -> LinkedMaster | None:
    """Return this rank's master weights of a parameter; None if it has none here, or if their place is uncertain.

    Args:
        parameter: one that `has_linked_master`.
        ranges: id of a parameter -> (first, count) of the elements that this rank steps.
    """
    master = vars(parameter).get("main_param")
    if not isinstance(master, torch.Tensor):
        return None
    master = master.detach()
    if master.shape == parameter.shape and not vars(parameter).get("main_param_sharded", False):
        return LinkedMaster(master, None)
    own = ranges.get(id(parameter), ())
    if len(own) != 1 or own[0][1] != master.numel():
        return None
    start, count = own[0]
    weights = parameter.detach().reshape(-1)[start : start + count]
    # A range of another place would have other values.
    same = torch.allclose(master.reshape(-1).to(weights.dtype), weights, rtol=0, atol=0, equal_nan=True)
    return LinkedMaster(master.reshape(-1), start) if same else None
