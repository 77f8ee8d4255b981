"""Tensors and other objects that list their own boxes: by this package's protocol, or by the one of torch.

`__bytecheckpoint_shards__` (see `ShardedLeaf`) is for code with a sharding scheme of its own. torch's protocol for
checkpointable tensors (torch/distributed/_checkpointable.py: `__create_write_items__`, `__create_chunk_list__`,
`__get_tensor_shard__`) is what torch's own distributed checkpoint asks for, so whatever was written for that works here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any

import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.dtensors import is_dtensor
from bytecheckpoint.frameworks.irregular import Fragment, fragment_shards
from bytecheckpoint.frameworks.leaves import add_shards, declares
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = ["add_declared"]


def add_declared(out: list[LiveShard], key: TensorKey, leaf: Any, aliases: tuple[str, ...], by_content: bool) -> None:
    """Append the boxes that `leaf` lists to `out`.

    Raises:
        UsageError: what is listed is no tensor with a shape and a place; a box or a flat range does not lie inside the
            tensor, or is listed twice; its memory is not a plain tensor; or parts differ in shape of the whole, or dtype.
    """
    own = hasattr(type(leaf), "__bytecheckpoint_shards__")
    listed = leaf.__bytecheckpoint_shards__() if own else _chunks(key, leaf)
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    known: tuple[tuple[int, ...], str] | None = None
    for shape, place, data in _checked(key, leaf, listed):
        if is_dtensor(data) or declares(type(data)):
            raise UsageError(f"{key}: a shard is a {type(data).__name__}, which is sharded itself: list plain tensors")
        plain: list[LiveShard] = []
        if isinstance(place, int):
            plain += fragment_shards([Fragment(key, shape, place, data)])
        else:
            start, lengths = place, tuple(data.shape)
            inside = len(shape) == len(start) == len(lengths) and all(
                o >= 0 and o + n <= s for s, o, n in zip(shape, start, lengths, strict=True)
            )
            if not inside:
                raise UsageError(
                    f"{key}: a shard of shape {lengths} at {start} does not lie inside the tensor's shape {shape}"
                )
            if 0 in lengths and 0 not in shape:
                continue
            add_shards(plain, key, data)
            plain[0].global_shape, plain[0].offsets = shape, start
        for shard in plain:
            shard.aliases, shard.by_content, shard.requires_grad = aliases, by_content, data.requires_grad
            box = (shard.offsets, shard.lengths)
            if box in seen and 0 not in shard.lengths:  # nothing, twice, is nothing
                raise UsageError(f"{key}: {type(leaf).__name__} lists the box of shape {box[1]} at {box[0]} twice")
            seen.add(box)
            known = known or (shape, shard.dtype)
            if known != (shape, shard.dtype):
                raise UsageError(
                    f"{key}: {type(leaf).__name__} lists parts of a tensor of shape {known[0]} and dtype {known[1]}, and "
                    f"of shape {shape} and dtype {shard.dtype}: one tensor has one shape and one dtype"
                )
        out += plain


def _checked(
    key: TensorKey, leaf: Any, listed: Iterable[Any]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...] | int, torch.Tensor]]:
    """What `leaf` lists, with plain numbers; NumPy's and torch's are taken too."""
    try:
        for item in listed:
            whole, place, data = item
            if not isinstance(data, torch.Tensor):
                raise TypeError(f"{type(data).__name__} is no tensor")
            number = hasattr(type(place), "__index__") and not getattr(place, "ndim", 0)
            yield tuple(map(index, whole)), index(place) if number else tuple(map(index, place)), data
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{key}: {type(leaf).__name__} does not list its parts as (global shape, offsets or number of the first "
            f"element, tensor): {error}"
        ) from error


def _chunks(key: TensorKey, leaf: Any) -> Iterator[tuple[Sequence[int], Sequence[int], torch.Tensor]]:
    """By torch's protocol."""
    for item in leaf.__create_write_items__(key.fqn, leaf):
        described = item.tensor_data
        if described is None:
            raise UsageError(f"{key}: {type(leaf).__name__} lists an item that is no tensor, which is not supported")
        yield described.size, described.chunk.offsets, leaf.__get_tensor_shard__(item.index)
