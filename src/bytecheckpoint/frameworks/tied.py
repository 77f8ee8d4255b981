"""Tensors that are one here and several in the checkpoint: a load fills the one, and compares it with the others."""

from __future__ import annotations

from functools import partial

import torch

from bytecheckpoint.frameworks.base import Destination, SavedTensor
from bytecheckpoint.frameworks.optimizers.master_weights import MASTER
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named
from bytecheckpoint.representation.shards import LiveShard, each_box

__all__ = ["compare_tied"]

_PIECE = 32 << 20  # elements that are compared at a time


def compare_tied(destination: Destination) -> None:
    """Request the other copies of tied tensors, to compare them with what the load has filled. Call it once, at the end.

    Stages of a pipeline save a tied weight twice, with equal content. Weights with different content were not tied, and one
    of them would be lost: `Destination.mismatches` gets their names.
    """
    for found, other in destination.tied:
        if (found.dtype, found.global_shape) != (other.dtype, other.global_shape):
            destination.mismatches.append(_message(found, other))
            continue
        pairs = []
        for shard in _filled(destination.wanted, found):
            first = shard if shard.key == found.key else _buffer(shard, found)
            pairs.append((first.data, (second := _buffer(shard, other)).data))
            destination.wanted += [second] if first is shard else [first, second]
        if pairs:
            destination.checks.append(partial(_compare, destination, found, other, pairs))


def _filled(wanted: list[LiveShard], found: SavedTensor) -> list[LiveShard]:
    """Return the wanted boxes of a tensor, or those of its master weight if the load fills the tensor from that."""
    own = [shard for shard in wanted if shard.key == found.key]
    if not own:
        own = [
            shard
            for shard in wanted
            if shard.key.slot == MASTER and shard.key.fqn == found.key.fqn and shard.global_shape == found.global_shape
        ]
    return list({(shard.offsets, shard.lengths): shard for shard in each_box(own)}.values())


def _buffer(shard: LiveShard, saved: SavedTensor) -> LiveShard:
    """Return the same box of another tensor, with memory of its own."""
    dtype = shard.dtype if shard.key.slot != MASTER else saved.dtype
    data = torch.empty(shard.lengths, dtype=dtype_named(dtype), device="cpu")
    return LiveShard(saved.key, dtype, shard.global_shape, shard.offsets, shard.lengths, data, converts=shard.converts)


def _compare(
    destination: Destination, found: SavedTensor, other: SavedTensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    if not all(_same_bits(first, second) for first, second in pairs):
        destination.mismatches.append(_message(found, other))


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    first, second = first.detach().reshape(-1), second.reshape(-1)
    return all(
        torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(first.split(_PIECE), second.split(_PIECE), strict=True)
    )


def _message(found: SavedTensor, other: SavedTensor) -> str:
    return f"{found.key} and {other.key} are one tensor here, and differ in the checkpoint: {other.key} would be lost"
