"""Find out what a save with staging="background" must copy in the call, and what it may leave for later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from bytecheckpoint.engine.tensor_bytes import movable
from bytecheckpoint.representation.shards import LiveShard, LiveState

__all__ = ["copy_volatile", "reason_to_block"]


def reason_to_block(objects: Mapping[str, object]) -> str:
    """Return why states cannot be copied in the background; "" if they can: the fence sees their optimizers' steps."""
    for optimizer in _optimizers(objects.values()):
        name = type(optimizer).__name__
        if not getattr(type(optimizer).step, "hooked", False) or "step" in vars(optimizer):
            return f"hooks do not see the steps of {name}"
        if any(group.get("capturable") for group in optimizer.param_groups):
            return f"steps of {name} may be replayed as a graph (capturable=True)"
    return ""


def _optimizers(values: Iterable[object]) -> Iterator[torch.optim.Optimizer]:
    for value in values:
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif isinstance(value, list | tuple):
            yield from _optimizers(value)
        elif isinstance(value, dict):
            yield from _optimizers(value.values())


def copy_volatile(states: Iterable[LiveState]) -> int:
    """Copy what may change before an optimizer steps, and detach the rest from the program's own tensors.

    Buffers, extra states and streams are copied; a copy lies on the device of its tensor. A tensor whose memory the program
    exchanges (`.data =`) keeps the old memory here.

    Returns:
        Bytes that were copied.
    """
    copied = 0
    with torch.no_grad():
        for state in states:
            for shard in (*state.shards, *(shard for part in state.streams for shard in part.shards)):
                if _stands_still(shard):
                    shard.data = shard.data.detach()
                else:
                    shard.data = movable(shard.data).clone().view(shard.data.dtype)
                    copied += shard.data.nbytes
    return copied


def _stands_still(shard: LiveShard) -> bool:
    """Return whether a shard is a parameter, or optimizer state: nothing but a step changes it."""
    return shard.requires_grad or shard.must_be_equal or (bool(shard.key.slot) and not shard.by_content)
