"""Map local Megatron parameters to boxes of checkpoint tensors.

The source is `sharded_state_dict()`: for each local tensor it gives the global tensor, the offsets and the fused parts.
Its keys are made for Megatron's own checkpoints. Here every tensor gets the name that it has in the model without
parallelism. So pipeline and expert parallelism only change names, tensor parallelism only changes boxes, and a plain
module with the same names loads the same checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.flat_ranges import FlatRange, FlattenedBox, flat_range_shards
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = [
    "ParameterLayout",
    "ShardCollector",
    "TensorBox",
    "boxes_of_factory",
    "checkpoint_names",
    "clip_to_saved_shape",
    "join_parts",
    "sharded_tensor_box",
]

# Under this prefix Megatron numbers experts along a dimension of their own.
_STACKED_EXPERTS = re.compile(r"(^|\.)experts\.experts\.")
_LOCAL_EXPERT = re.compile(r"(^|\.)local_experts\.\d+\.")
_TRAILING_NUMBER = re.compile(r"\d+$")


@dataclass(slots=True)
class TensorBox:
    """The box of one checkpoint tensor that a parameter, or a part of a fused parameter, holds.

    Attributes:
        names: the tensor's FQN, then its aliases.
        global_shape: shape of the tensor.
        offsets: first coordinate of the box.
        lengths: extent of the box; dimensions that the parameter lacks come first and are 1.
        start: row-major number, within the parameter, of the box's first element.
        slices: place of the box in the parameter; None: the box is the whole parameter.
        resizable: True if a checkpoint may hold the tensor with another shape (a vocabulary padded for another layout).
    """

    names: tuple[str, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int = 0
    slices: tuple[slice, ...] | None = None
    resizable: bool = False

    def key(self, state_name: str, slot: str = "") -> TensorKey:
        """Return the key under which the tensor is saved."""
        return TensorKey(state_name, self.names[0], slot)

    def shard(self, key: TensorKey, data: torch.Tensor) -> LiveShard:
        """Return the box as a view of `data`, a tensor of the parameter's shape."""
        found: list[LiveShard] = []
        add_shards(found, key, data)
        (shard,) = found
        if self.slices is not None:
            shard.data = shard.data[self.slices]
        shard.data = shard.data[(None,) * (len(self.lengths) - shard.data.ndim)]
        shard.global_shape, shard.offsets, shard.lengths = self.global_shape, self.offsets, self.lengths
        shard.aliases = self.names[1:]
        return shard

    def flat_ranges(self, key: TensorKey, data: torch.Tensor, start: int) -> Iterator[FlatRange]:
        """Yield the elements of the box that `data` holds, if any.

        Args:
            key: key of the tensor.
            data: 1-D, consecutive elements of the parameter.
            start: number of the first of them in the parameter.
        """
        first = max(self.start, start)
        end = min(self.start + prod(self.lengths), start + data.numel())
        if first < end:
            box = FlattenedBox(self.offsets, self.lengths)
            in_box, in_data = first - self.start, first - start
            yield FlatRange(key, self.global_shape, in_box, data, in_data, end - first, box, self.names[1:])


@dataclass(slots=True)
class ParameterLayout:
    """The boxes and names under which one parameter or buffer is stored in a checkpoint.

    Attributes:
        names: its FQN in the model without parallelism, then its aliases.
        tensor: the live tensor.
        boxes: the boxes that it consists of: one, unless the parameter is fused.
        saved_by_other_stage: True if another pipeline stage holds the same tensor and saves it.
        parts: layouts of the unfused parameters that a fused one joins; empty for others. Each has optimizer state of its
            own in a checkpoint. Their boxes are this layout's.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    boxes: list[TensorBox] = field(default_factory=list)
    saved_by_other_stage: bool = False
    parts: list[ParameterLayout] = field(default_factory=list)

    def describe(self) -> str:
        """Return for example "dim 0 in 2", or "whole"."""
        box = self.boxes[0]
        lengths = list(box.lengths)
        if len(self.boxes) > 1 and all(other.names == box.names for other in self.boxes):
            # The boxes of a fused gate lie in one checkpoint tensor: together they have the parameter's shape.
            lengths[-self.tensor.ndim :] = self.tensor.shape
        cuts = [
            f"dim {dim} in {whole // length}"
            for dim, (length, whole) in enumerate(zip(lengths, box.global_shape, strict=True))
            if 0 < length < whole
        ]
        return ", ".join(cuts) or "whole"


class ShardCollector:
    """Collects shards, and decomposes all flat ranges in one call, which takes a fraction of the time."""

    def __init__(self) -> None:
        self._shards: list[LiveShard] = []
        self._flat_ranges: list[FlatRange] = []

    def add(self, box: TensorBox, key: TensorKey, data: torch.Tensor, start: int | None = None) -> None:
        """Add the elements of one box that `data` holds.

        Args:
            box: the box.
            key: key of the shards.
            data: a tensor of the parameter's shape; with `start`, a 1-D tensor of consecutive elements of the parameter.
            start: number of the first of these elements in the parameter.
        """
        if start is None:
            self._shards.append(box.shard(key, data))
        else:
            self._flat_ranges += box.flat_ranges(key, data, start)

    def shards(self) -> list[LiveShard]:
        """Return the shards of everything that was added."""
        return self._shards + flat_range_shards(self._flat_ranges)


def clip_to_saved_shape(shards: list[LiveShard], saved_shape: tuple[int, ...]) -> list[LiveShard]:
    """Clip `shards` in place to a saved tensor of another shape; shards outside of it are left out of the result."""
    clipped: list[LiveShard] = []
    for shard in shards:
        if shard.global_shape != saved_shape and len(shard.global_shape) == len(saved_shape):
            lengths = [min(o + n, s) - o for o, n, s in zip(shard.offsets, shard.lengths, saved_shape, strict=True)]
            if min(lengths, default=1) <= 0:
                continue
            shard.data = shard.data[tuple(slice(n) for n in lengths)]
            shard.lengths, shard.global_shape = tuple(lengths), saved_shape
        clipped.append(shard)
    return clipped


def checkpoint_names(state_key: str, key: str, prepended: Sequence[int]) -> tuple[tuple[str, ...], int]:
    """Return all names of a tensor, the one of the model without parallelism first.

    A rank's module numbers its layers and experts from 0, Megatron's name has their numbers in the whole model. The first
    name is the module's, with the numbers of the whole model. Megatron's name is an alias, if it differs:

        state_key: decoder.layers.1.mlp.experts.linear_fc1.weight0         the rank's second layer and first expert
        key:       decoder.layers.3.mlp.experts.experts.linear_fc1.weight  with prepended = (12,), the expert
        1st name:  decoder.layers.3.mlp.experts.linear_fc1.weight12
        alias:     decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight

    Args:
        state_key: the name in this rank's module.
        key: the name in Megatron's own checkpoints.
        prepended: coordinates along the dimensions that Megatron prepends to the tensor's own.

    Returns:
        The names, and how many of the prepended dimensions are a number in them (1 in the example).
    """
    expert: int | None = None
    if len(prepended) == 1 and _STACKED_EXPERTS.search(key):
        expert = prepended[0]
        key = _STACKED_EXPERTS.sub(rf"\1experts.local_experts.{expert}.", key, count=1)
    dims_in_name = 0 if expert is None else 1
    if len(prepended) > dims_in_name:
        return (key,), dims_in_name  # all layers are stacked in one tensor, whose name has no layer number
    return tuple(dict.fromkeys((_name_in_whole_model(state_key, key, expert), key))), dims_in_name


def _name_in_whole_model(state_key: str, key: str, expert: int | None) -> str:
    """Return `state_key` with the layer number that `key` has, and with the number of the expert, if any."""
    local_parts = state_key.split(".")
    common: list[str] = []
    for local_part, key_part in zip(local_parts, key.split("."), strict=False):
        both_numbers = local_part.isdecimal() and key_part.isdecimal()
        if local_part != key_part and not both_numbers:
            break
        common.append(key_part)
    if not any(map(str.isdecimal, common)):
        return key  # not in a layer; if the names differ, `key` is that of a tied tensor (embedding and output layer)
    rest = ".".join(local_parts[len(common) :])
    if expert is not None:
        rest, replaced = _LOCAL_EXPERT.subn(rf"\1local_experts.{expert}.", rest, count=1)
        if not replaced:
            rest = _TRAILING_NUMBER.sub(str(expert), rest)
    return ".".join([*common, rest] if rest else common)


def sharded_tensor_box(where: str, state_key: str, sharded: Any, parameter_key: str | None = None) -> TensorBox:
    """Return the box that a `ShardedTensor` of Megatron describes.

    Args:
        where: display name of the tensor, for errors.
        state_key: name of the parameter on this rank.
        sharded: the ShardedTensor.
        parameter_key: Megatron's key of the fused parameter that the tensor is a part of; None: the tensor's own.

    Raises:
        UsageError: the box does not lie inside its tensor.
    """
    prepended = int(sharded.prepend_axis_num)
    # Parts of a fused parameter have its key, or that key with a suffix, which state_key lacks.
    key = parameter_key if parameter_key is not None and sharded.key.startswith(parameter_key) else sharded.key
    suffix = sharded.key[len(key) :]
    names, dims_in_name = checkpoint_names(state_key, key, tuple(sharded.global_offset[:prepended]))
    names = tuple(name + suffix for name in names)
    local_shape = tuple(sharded.local_shape)
    offsets = tuple(sharded.global_offset[dims_in_name:])
    lengths = (1,) * (prepended - dims_in_name) + local_shape
    shape = tuple(sharded.global_shape[dims_in_name:])
    resizable = bool(sharded.allow_shape_mismatch)
    if len(shape) != len(lengths) or any(o + n > s for o, n, s in zip(offsets, lengths, shape, strict=True)):
        raise UsageError(
            f"{where}: its sharded state dict puts a tensor of shape {local_shape} at {offsets} of {sharded.key!r}, which "
            f"has shape {shape}"
        )
    return TensorBox(names, shape, offsets, lengths, resizable=resizable)


def boxes_of_factory(
    where: str, state_key: str, factory: Any, parts: Sequence[Any], parameter: torch.Tensor
) -> list[TensorBox]:
    """Return the boxes into which a `ShardedTensorFactory` of Megatron splits a fused parameter.

    Args:
        where: display name of the parameter, for errors.
        state_key: its name on this rank.
        factory: the factory.
        parts: the ShardedTensors that the factory makes of `parameter`.
        parameter: a contiguous tensor of the parameter's shape.

    Raises:
        UsageError: the parts are not consecutive rows of the parameter.
    """
    boxes: list[TensorBox] = []
    covered = 0
    for part in parts:
        data: torch.Tensor = part.data
        is_view = data.untyped_storage()._cdata == parameter.untyped_storage()._cdata
        if not is_view or not data.is_contiguous() or data.ndim != parameter.ndim:
            raise UsageError(
                f"{where}: {factory.key!r} is stored in parts that are not consecutive elements of it, which is not "
                "supported"
            )
        box = sharded_tensor_box(where, state_key, part, factory.key)
        box.start = int(data.storage_offset())
        corner = _coordinates(box.start, tuple(parameter.shape))
        box.slices = tuple(slice(o, o + n) for o, n in zip(corner, data.shape, strict=True))
        boxes.append(box)
        covered += data.numel()
    if covered != parameter.numel():
        raise UsageError(f"{where}: the parts in which {factory.key!r} is stored do not cover it")
    return boxes


def join_parts(parameter: torch.Tensor, layouts: Sequence[ParameterLayout]) -> ParameterLayout | None:
    """Return the layout of a parameter of which a model describes parts, one after the other, as tensors of their own.

    None if `layouts` are not all of the parameter, or not consecutive elements of it.
    """
    if not parameter.is_contiguous():
        return None
    parts = sorted(layouts, key=lambda layout: layout.tensor.storage_offset())
    end = 0
    for part in parts:
        start = int(part.tensor.storage_offset() - parameter.storage_offset())
        if start != end or not part.tensor.is_contiguous() or len(part.boxes) != 1:
            return None
        (box,) = part.boxes
        box.start = start
        corner = _coordinates(start, tuple(parameter.shape))
        box.slices = tuple(slice(o, o + n) for o, n in zip(corner, part.tensor.shape, strict=True))
        end += part.tensor.numel()
    if end != parameter.numel():
        return None
    boxes = [box for part in parts for box in part.boxes]
    return ParameterLayout(parts[0].names, parameter, boxes, parts[0].saved_by_other_stage, parts)


def _coordinates(number: int, shape: tuple[int, ...]) -> list[int]:
    """Return the coordinates of the row-major element `number`."""
    reversed_coordinates = []
    for extent in reversed(shape):
        reversed_coordinates.append(number % max(extent, 1))
        number //= max(extent, 1)
    return reversed_coordinates[::-1]
