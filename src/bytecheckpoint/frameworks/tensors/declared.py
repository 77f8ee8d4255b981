"""Ask tensors and other objects for the shards that they list themselves, by this package's protocol or by torch's.

`__bytecheckpoint_shards__` (see `SupportsShards`) is for code with its own sharding scheme. A ShardedTensor, as FSDP1
puts into sharded state_dicts, has a list of its shards. torch's protocol for checkpointable tensors
(torch/distributed/_checkpointable.py: `__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__`) is the
one that torch's distributed checkpoint uses, so types written for it work here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any

import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor
from bytecheckpoint.frameworks.tensors.fragments import range_shards, range_table, repeated_box, table_shards
from bytecheckpoint.frameworks.tensors.plain import is_sharded_tensor, lists_own_shards, plain_shard
from bytecheckpoint.garbage_collection import gc_paused
from bytecheckpoint.representation.boxes import Int64s
from bytecheckpoint.representation.shards import LiveShard, TensorKey, boxes_of, each_box

__all__ = ["add_declared_shards"]

#: Offsets of a box, the number of the first element of a flat range, or a table of flat ranges.
_Place = tuple[int, ...] | int | Int64s


def add_declared_shards(
    out: list[LiveShard], key: TensorKey, value: Any, aliases: tuple[str, ...], by_content: bool
) -> None:
    """Append the shards that `value` lists to `out`.

    Raises:
        UsageError: a listed item is no tensor with a shape and a place; a box or a flat range does not lie inside the
            tensor, or is listed twice; the memory of a shard is not a plain tensor; or shards differ in global shape or
            dtype.
    """
    if hasattr(type(value), "__bytecheckpoint_shards__"):
        listed = value.__bytecheckpoint_shards__()
    elif is_sharded_tensor(type(value)):
        listed = [(value.size(), shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
    else:
        listed = _listed_by_torch_protocol(key, value)
    with gc_paused():
        found = list(_shards_of(key, _with_plain_numbers(key, value, listed)))
    if by_content:
        found = list(each_box(found))  # values are compared one by one
    for shard in found:
        shard.aliases, shard.by_content = aliases, by_content
        shape, dtype = found[0].global_shape, found[0].dtype
        if (shard.global_shape, shard.dtype) != (shape, dtype):
            raise UsageError(
                f"{key}: {type(value).__name__} lists parts of a tensor of shape {shape} and dtype {dtype}, and of shape "
                f"{shard.global_shape} and dtype {shard.dtype}: one tensor has one shape and one dtype"
            )
    if len(found) > 1 or any(shard.fragments is not None for shard in found):
        boxes = boxes_of(found, [0] * len(found))
        if (row := repeated_box(boxes)) is not None:
            offsets, lengths = (tuple(column[row, : len(shape)].tolist()) for column in (boxes.offsets, boxes.lengths))
            raise UsageError(f"{key}: {type(value).__name__} lists the box of shape {lengths} at {offsets} twice")
    out += found


def _shards_of(key: TensorKey, listed: Iterable[tuple[tuple[int, ...], _Place, torch.Tensor]]) -> Iterator[LiveShard]:
    """Iterate over the shards of all listed parts; consecutive flat ranges are decomposed together."""
    ranges: list[tuple[tuple[int, ...], int, torch.Tensor]] = []
    for shape, place, data in listed:
        if type(data) is not torch.Tensor and (is_dtensor(data) or lists_own_shards(type(data))):
            raise UsageError(f"{key}: a shard is a {type(data).__name__}, which is sharded itself: list plain tensors")
        if isinstance(place, int):
            ranges.append((shape, place, data))
            continue
        yield from range_shards(key, ranges)
        ranges.clear()
        if isinstance(place, tuple):
            yield from _box_shards(key, shape, place, data)
        else:
            yield from table_shards(key, shape, place, data)
    yield from range_shards(key, ranges)


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
) -> Iterator[tuple[tuple[int, ...], _Place, torch.Tensor]]:
    """Convert the shapes and places that `value` lists to Python numbers; NumPy's and torch's are accepted too."""
    shape: tuple[int, ...] = ()
    try:
        for item in listed:
            whole, place, data = item
            if type(whole) is not tuple or whole != shape:
                shape = tuple(map(index, whole))
            if not isinstance(data, torch.Tensor):
                raise TypeError(f"{type(data).__name__} is no tensor")
            if type(place) is not int:
                dims = getattr(place, "ndim", 0)
                if dims == 2:
                    place = range_table(place)
                elif hasattr(type(place), "__index__") and not dims:
                    place = index(place)
                else:
                    place = tuple(map(index, place))
            yield shape, place, data
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{key}: {type(value).__name__} does not list its parts as (global shape, offsets or number of the first "
            f"element or table of ranges, tensor): {error}"
        ) from error


def _listed_by_torch_protocol(
    key: TensorKey, value: Any
) -> Iterator[tuple[Sequence[int], Sequence[int], torch.Tensor]]:
    for item in value.__create_write_items__(key.fqn, value):
        described = item.tensor_data
        if described is None:
            raise UsageError(f"{key}: {type(value).__name__} lists an item that is no tensor, which is not supported")
        yield described.size, described.chunk.offsets, value.__get_tensor_shard__(item.index)
