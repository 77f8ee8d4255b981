"""Request boxes of saved tensors for Megatron's parameters, as whole tensors or flat ranges."""

from __future__ import annotations

import torch

from bytecheckpoint.frameworks.base import Destination, SavedTensor
from bytecheckpoint.frameworks.megatron.layouts import ShardCollector, TensorBox, clip_to_saved_shape
from bytecheckpoint.frameworks.optimizers.state_dtypes import mark_exact_conversions
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = ["BoxRequests", "clip_to_saved_rows"]


class BoxRequests:
    """Collects the requests of one state, for tensors that a load may convert where nothing is lost.

    Args:
        destination: receives the requests.
    """

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._collector = ShardCollector()
        self._dtypes: dict[TensorKey, str] = {}

    def add(self, box: TensorBox, found: SavedTensor, target: torch.Tensor, start: int | None = None) -> None:
        """Request the elements of one box that `target` holds; the arguments are those of `ShardCollector.add`."""
        if found.global_shape == box.global_shape or not box.resizable:
            self._collector.add(box, found.key, target, start)
            self._dtypes[found.key] = found.dtype
            return
        collector = ShardCollector()
        collector.add(box, found.key, target, start)
        shards = clip_to_saved_rows(collector.shards(), box, found, self._destination)
        mark_exact_conversions(shards, found.dtype)
        self._destination.wanted += shards

    def finish(self) -> None:
        """Decompose the flat ranges of all parameters, after the last `add`."""
        for shard in (shards := self._collector.shards()):
            mark_exact_conversions([shard], self._dtypes[shard.key])
        self._destination.wanted += shards


def clip_to_saved_rows(
    shards: list[LiveShard], box: TensorBox, found: SavedTensor, destination: Destination
) -> list[LiveShard]:
    """Clip the shards of a resizable box to the saved tensor, and record in `destination` the saved rows left out."""
    if len(found.global_shape) == len(box.global_shape):
        for saved, live in zip(found.global_shape, box.global_shape, strict=True):
            if saved > live:
                destination.left_out[found.key] = f"{saved - live} of the {saved} rows of {found.key}"
    return clip_to_saved_shape(shards, found.global_shape)
