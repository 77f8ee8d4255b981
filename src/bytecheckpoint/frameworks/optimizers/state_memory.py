"""Memory for the optimizer state that a load fills."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

import torch

from bytecheckpoint.frameworks.base import Destination, SavedTensor
from bytecheckpoint.frameworks.optimizers.state_dtypes import SINGLE_VALUE_SLOTS, mark_exact_conversions
from bytecheckpoint.frameworks.tensors.allocation import empty_like_layout, empty_on_mesh_of, is_writable
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.representation.shards import LiveShard

__all__ = ["allocate_state", "is_reusable", "request_state"]


def allocate_state(found: SavedTensor, parameter: torch.Tensor, dtype: torch.dtype, *, on_device: bool) -> torch.Tensor:
    """Allocate a state tensor of `parameter`, distributed as the parameter is where the shape allows it.

    Args:
        found: the saved state tensor.
        parameter: the live parameter.
        dtype: dtype of the new tensor (see `StateDtypes`).
        on_device: True if the optimizer holds scalars on the parameter's device.
    """
    if found.key.slot.rpartition(".")[2] in SINGLE_VALUE_SLOTS and not found.global_shape and not on_device:
        return torch.empty((), dtype=dtype, device="cpu")
    if found.global_shape == tuple(parameter.shape):
        return empty_like_layout(parameter, dtype)
    return empty_on_mesh_of(parameter, found.global_shape, dtype)


def is_reusable(
    live: object, shape: tuple[int, ...], dtype: torch.dtype, taken: Iterable[torch.Tensor]
) -> TypeGuard[torch.Tensor]:
    """Return whether a load can fill a live state tensor in place.

    Args:
        live: state that the optimizer has now.
        shape: shape of the state to load.
        dtype: dtype of the state to load.
        taken: memory that the load fills already.
    """
    return (
        isinstance(live, torch.Tensor)
        and tuple(live.shape) == shape
        and live.dtype == dtype
        and is_writable(live)
        and all(live is not other for other in taken)
    )


def request_state(
    destination: Destination,
    found: SavedTensor,
    target: torch.Tensor,
    *,
    aliases: tuple[str, ...] = (),
    like: torch.Tensor | None = None,
) -> None:
    """Request a saved state tensor into `target`; `aliases` and `like` are those of `add_shards`."""
    shards: list[LiveShard] = []
    add_shards(shards, found.key, target, aliases=aliases, like=like)
    mark_exact_conversions(shards, found.dtype)
    destination.wanted += shards
