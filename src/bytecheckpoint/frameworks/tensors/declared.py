"""Shards of tensors and other objects that list their own: by this package's protocol, or by torch's.

`__bytecheckpoint_shards__` (see `SupportsShards`) is for code with its own sharding scheme. torch's protocol for
checkpointable tensors (torch/distributed/_checkpointable.py: `__create_write_items__`, `__create_chunk_list__`,
`__get_tensor_shard__`) is the one that torch's distributed checkpoint uses, so types written for it work here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any

import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor
from bytecheckpoint.frameworks.tensors.flat_ranges import FlatRange, flat_range_shards
from bytecheckpoint.frameworks.tensors.plain import lists_own_shards, plain_shard
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = ["add_declared_shards"]


def add_declared_shards(
    out: list[LiveShard], key: TensorKey, value: Any, aliases: tuple[str, ...], by_content: bool
) -> None:
    """Append the shards that `value` lists to `out`.

    Raises:
        UsageError: a listed item is no tensor with a shape and a place; a box or a flat range does not lie inside the
            tensor, or is listed twice; the memory of a shard is not a plain tensor; or shards differ in global shape or
            dtype.
    """
    own = hasattr(type(value), "__bytecheckpoint_shards__")
    listed = value.__bytecheckpoint_shards__() if own else _listed_by_torch_protocol(key, value)
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    known: tuple[tuple[int, ...], str] | None = None
    for shard in _shards_of(key, _with_plain_numbers(key, value, listed)):
        shard.aliases, shard.by_content = aliases, by_content
        box = (shard.offsets, shard.lengths)
        if box in seen and 0 not in shard.lengths:  # an empty box may be listed twice
            raise UsageError(f"{key}: {type(value).__name__} lists the box of shape {box[1]} at {box[0]} twice")
        seen.add(box)
        shape = shard.global_shape
        known = known or (shape, shard.dtype)
        if known != (shape, shard.dtype):
            raise UsageError(
                f"{key}: {type(value).__name__} lists parts of a tensor of shape {known[0]} and dtype {known[1]}, and "
                f"of shape {shape} and dtype {shard.dtype}: one tensor has one shape and one dtype"
            )
        out.append(shard)


def _shards_of(
    key: TensorKey, listed: Iterable[tuple[tuple[int, ...], tuple[int, ...] | int, torch.Tensor]]
) -> Iterator[LiveShard]:
    """Iterate over the shards of all listed parts; flat ranges that follow each other are decomposed at once."""
    ranges: list[FlatRange] = []
    for shape, place, data in listed:
        if is_dtensor(data) or lists_own_shards(type(data)):
            raise UsageError(f"{key}: a shard is a {type(data).__name__}, which is sharded itself: list plain tensors")
        if isinstance(place, int):
            ranges.append(FlatRange(key, shape, place, data, requires_grad=data.requires_grad))
        else:
            yield from flat_range_shards(ranges)
            ranges.clear()
            yield from _box_shards(key, shape, place, data)
    yield from flat_range_shards(ranges)


def _box_shards(
    key: TensorKey, shape: tuple[int, ...], offsets: tuple[int, ...], data: torch.Tensor
) -> list[LiveShard]:
    """Describe `data`, the box at `offsets` of a tensor of `shape`; an empty box of a tensor with elements is no shard."""
    lengths = tuple(data.shape)
    inside = len(shape) == len(offsets) == len(lengths) and all(
        o >= 0 and o + n <= s for s, o, n in zip(shape, offsets, lengths, strict=True)
    )
    if not inside:
        raise UsageError(
            f"{key}: a shard of shape {lengths} at {offsets} does not lie inside the tensor's shape {shape}"
        )
    if 0 in lengths and 0 not in shape:
        return []
    shard = plain_shard(key, data)
    shard.global_shape, shard.offsets = shape, offsets
    return [shard]


def _with_plain_numbers(
    key: TensorKey, value: Any, listed: Iterable[Any]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...] | int, torch.Tensor]]:
    """Convert the shapes and places that `value` lists to Python numbers; NumPy's and torch's are accepted too."""
    try:
        for item in listed:
            whole, place, data = item
            if not isinstance(data, torch.Tensor):
                raise TypeError(f"{type(data).__name__} is no tensor")
            is_number = hasattr(type(place), "__index__") and not getattr(place, "ndim", 0)
            yield tuple(map(index, whole)), index(place) if is_number else tuple(map(index, place)), data
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{key}: {type(value).__name__} does not list its parts as (global shape, offsets or number of the first "
            f"element, tensor): {error}"
        ) from error


def _listed_by_torch_protocol(
    key: TensorKey, value: Any
) -> Iterator[tuple[Sequence[int], Sequence[int], torch.Tensor]]:
    for item in value.__create_write_items__(key.fqn, value):
        described = item.tensor_data
        if described is None:
            raise UsageError(f"{key}: {type(value).__name__} lists an item that is no tensor, which is not supported")
        yield described.size, described.chunk.offsets, value.__get_tensor_shard__(item.index)
