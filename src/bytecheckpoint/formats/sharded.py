"""Tensors of which a file holds a part: DTensors and ShardedTensors, whose pickles say with plain data which part it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.formats.inert import CallRecord, GlobalName
from bytecheckpoint.formats.meanings import StoredTensor, dtype_name, shape_of
from bytecheckpoint.representation.dtypes import itemsize
from bytecheckpoint.representation.placements import MeshSplit, split_boxes

__all__ = ["ShardedValue", "local_parts", "rebuilt_tensor"]

_DTENSORS: Final = ("torch.distributed.tensor.DTensor", "torch.distributed._tensor.api.DTensor")
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"


class ShardedValue(msgspec.Struct, frozen=True):
    """The parts of one tensor that one rank holds.

    Attributes:
        dtype: torch's name of the dtype without "torch.".
        shape: shape of the whole tensor.
        parts: offsets and local tensor of each part.
        requires_grad: True if the tensor requires a gradient.
        parameter: True for a `torch.nn.Parameter`.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], StoredTensor], ...]
    requires_grad: bool = False
    parameter: bool = False


def rebuilt_tensor(function: Any, kind: object, args: Any, state: Any) -> object:
    """Return the meaning of `torch._tensor._rebuild_from_type_v2`: a tensor of a class of its own."""
    full = kind.full if type(kind) is GlobalName else ""
    if full in _DTENSORS:
        attributes, slots = state if type(state) is tuple else (None, state)
        parameter = type(attributes) is dict and attributes.get("_is_param") is True
        return _dtensor(args, slots, parameter)
    if full == _SHARDED:
        return _sharded_tensor(args, state)
    made = function.meaning(*args) if function.meaning else CallRecord(kind if full else function, args)  # type: ignore[arg-type]
    if type(made) is CallRecord:
        made.state = state
    return made


def _dtensor(args: Any, slots: Any, parameter: bool) -> ShardedValue:
    _, dtype, size, *_ = args
    local, spec = slots["_local_tensor"], slots["_spec"].state
    shape, requires_grad = shape_of(size), args[7] is True
    if type(local) is not StoredTensor or local.dtype != dtype_name(dtype):
        raise TypeError("a DTensor without a local tensor")
    mesh = spec["mesh"].state
    extents, at = _mesh_shape(mesh), mesh.get("_coordinate_on_dim")
    if at is None:
        return ShardedValue(local.dtype, shape, (), requires_grad, parameter)
    placements = [(placement.target.name, placement.state or {}) for placement in spec["placements"]]
    parts = local_parts(local, shape, zip(extents, at, strict=True), placements)
    return ShardedValue(local.dtype, shape, parts, requires_grad, parameter)


def local_parts(
    local: StoredTensor,
    shape: tuple[int, ...],
    mesh: Iterable[tuple[int, int]],
    placements: Iterable[tuple[str, Mapping[str, Any]]],
) -> tuple[tuple[tuple[int, ...], StoredTensor], ...]:
    """Return the parts of a DTensor that a local tensor holds, with their offsets.

    Args:
        local: the local tensor.
        shape: shape of the whole tensor.
        mesh: extent of each dimension of the mesh, and coordinate of the rank in it.
        placements: name and fields of the placement on each dimension of the mesh.

    Raises:
        IncompatibleCheckpointError: a placement is not supported, or the local tensor has another shape than they give it.
        ValueError: no mesh can have such placements.
    """
    splits = []
    for (extent, index), (name, fields) in zip(mesh, placements, strict=True):
        if name == "Replicate":
            continue
        if name not in {"Shard", "_StridedShard", "StridedShard"}:
            raise IncompatibleCheckpointError(f"a DTensor with the placement {name!r} is not supported")
        dim, factor = fields["dim"], fields.get("split_factor", 1)
        if not 0 <= index < extent or factor < 1 or not 0 <= dim % max(len(shape), 1) <= len(shape):
            raise ValueError("a placement that no mesh can have")
        splits.append(MeshSplit(dim % max(len(shape), 1), extent, index, factor))
    try:
        boxes = split_boxes(splits, shape, local.shape)
    except UsageError as error:
        raise IncompatibleCheckpointError(f"a DTensor cannot be placed: {error}") from None
    return tuple((box.offsets, _cut(local, box.lengths, box.slices)) for box in boxes)


def _mesh_shape(mesh: dict[str, Any]) -> tuple[int, ...]:
    """Return the extents of a mesh: those of its layout, or of the tensor of ranks that older versions of torch keep."""
    if (layout := mesh.get("_layout")) is not None:
        axes = layout.state.get("axes")
        found = [axis.state["shape"] for axis in axes] if axes is not None else layout.state["shape"]
        found = found if isinstance(found, list | tuple) else (found,)
        # An axis of one rank has the shape (), and a flattened one may have several numbers.
        extents = tuple(math.prod(n) if isinstance(n, tuple) else n for n in found)
    else:
        extents = mesh["mesh"].shape
    return shape_of(extents)


def _sharded_tensor(args: Any, state: Any) -> ShardedValue:
    shards, metadata, *_ = state
    shape, parts = shape_of(metadata.state["size"]), []
    for shard in shards:
        _, held = shard.state
        place = held["metadata"].state[1]
        tensor, offsets = held["tensor"], shape_of(place["shard_offsets"])
        if type(tensor) is not StoredTensor or tensor.shape != tuple(place["shard_sizes"]):
            raise ValueError("a shard of another size than its tensor")
        parts.append((offsets, tensor))
    properties = metadata.state["tensor_properties"].state
    return ShardedValue(dtype_name(properties[0]), shape, tuple(parts), args[7] is True)


def _cut(local: StoredTensor, lengths: tuple[int, ...], slices: tuple[slice, ...] | None) -> StoredTensor:
    """Return a box of a local tensor; without slices, all of it."""
    if slices is None:
        return local
    first = sum(s.start * step for s, step in zip(slices, local.strides, strict=True))
    return msgspec.structs.replace(local, start=local.start + first * itemsize(local.dtype), shape=lengths)
