"""Find the boxes of a DTensor that a rank holds, from its mesh coordinates and placements (`representation.placements`)."""

from __future__ import annotations

from functools import lru_cache

from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bytecheckpoint.errors import UsageError
from bytecheckpoint.representation.placements import LocalBox, MeshSplit, split_boxes

__all__ = ["LocalBox", "boxes_of", "local_boxes"]


def boxes_of(tensor: DTensor, name: str = "tensor") -> tuple[LocalBox, ...]:
    """Return the boxes of `tensor` that this rank holds: usually one; none outside the mesh or for an empty part.

    Args:
        tensor: the distributed tensor; no communication takes place.
        name: the tensor's name in errors.

    Raises:
        UsageError: a placement is `Partial` or unknown, or the local tensor does not have the extent that the
            placements give it.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    try:
        return local_boxes(
            tuple(mesh.shape),
            tuple(coordinate),
            tensor.placements,
            tuple(tensor.shape),
            tuple(tensor._local_tensor.shape),
        )
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


@lru_cache(maxsize=1 << 16)
def local_boxes(
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    global_shape: tuple[int, ...],
    local_shape: tuple[int, ...],
) -> tuple[LocalBox, ...]:
    """Compute `boxes_of` from plain values; cached, because the tensors of a model share few layouts.

    Args:
        mesh_shape: extent of each mesh dimension.
        coordinate: this rank's coordinate in the mesh.
        placements: one per mesh dimension.
        global_shape: shape of the whole tensor.
        local_shape: shape of the local tensor, which distinguishes the two layouts of `_StridedShard`.
    """
    splits: list[MeshSplit] = []
    for parts, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.is_partial():
            raise UsageError(
                f"holds unreduced partial values ({placement}): redistribute it to Replicate or Shard first"
            )
        if placement.is_replicate():
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise UsageError(f"has a placement that is not supported: {placement}")
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        splits.append(MeshSplit(placement.dim % max(len(global_shape), 1), parts, index, factor))
    layout = f"placements {placements} on a mesh of shape {mesh_shape} at coordinate {coordinate}"
    return split_boxes(splits, global_shape, local_shape, layout)
