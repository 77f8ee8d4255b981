"""Which elements of a DTensor a rank holds: boxes from mesh coordinates and placements.

`Shard` follows torch.chunk: pieces of ceil(size / parts), the last ones shorter or empty. `_StridedShard` marks a
dimension that was split right to left (tensor parallelism first, then FSDP over the local piece). One pair of
placements therefore describes two real layouts, which differ when sizes are uneven:

- *right to left*: what `fully_shard` builds on top of a tensor-parallel parameter. The piece of each mesh dimension
  is cut out of the piece of the one that came before, so it is always one box.
- *left to right*: what `distribute_tensor` builds from the placements themselves. A strided split interleaves, and the
  next split cuts through the interleaved piece, so a rank may hold several runs of one dimension.

The extent of the local tensor tells them apart, but for a few uneven splits over four and more tensor-parallel ranks;
there the first is taken, the only one that exists in practice, and a save of the second then shows a hole. (torch's
own compute_local_shape_and_global_offset knows the second reading only, and only its first offset.) ByteCheckpoint,
section 3.2: nD_offsets and nD_lengths of ShardMeta.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bytecheckpoint.errors import UsageError

__all__ = ["LocalBox", "boxes_of", "local_boxes"]

# A run is (first coordinate, extent) along one dimension; a list of runs is what a rank holds of it, in local order.
Run = tuple[int, int]


class LocalBox(NamedTuple):
    """A box of the global tensor and where it lies in the local one.

    Attributes:
        offsets: first global coordinate, one per dimension.
        lengths: extent, one per dimension.
        slices: position in the local tensor, or None when the box is the whole local tensor.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    slices: tuple[slice, ...] | None


def boxes_of(tensor: DTensor, name: str = "tensor") -> tuple[LocalBox, ...]:
    """The boxes of `tensor` that this rank holds: usually one; none outside the mesh or for an empty piece.

    Args:
        tensor: the distributed tensor; no communication takes place.
        name: how to call it in errors.

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
    """`boxes_of` on plain values; a pure function, remembered because the ranks of a model repeat few layouts.

    Args:
        mesh_shape: extent of each mesh dimension.
        coordinate: this rank's coordinate in the mesh.
        placements: one per mesh dimension.
        global_shape: shape of the whole tensor.
        local_shape: shape of the local tensor; decides which of the two readings of `_StridedShard` holds.
    """
    splits: dict[int, list[tuple[int, int, int]]] = {}
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
        splits.setdefault(placement.dim % max(len(global_shape), 1), []).append((parts, index, factor))

    runs: list[list[Run]] = []
    for dim, size in enumerate(global_shape):
        candidates = _readings(size, splits[dim]) if dim in splits else [[(0, size)]]
        fitting = [c for c in candidates if len(local_shape) == len(global_shape) and _total(c) == local_shape[dim]]
        runs.append((fitting or candidates)[0])
    expected = tuple(map(_total, runs))
    if expected != local_shape and prod(expected) + prod(local_shape) != 0:
        raise UsageError(
            f"its local tensor has shape {local_shape}, but placements {placements} on a mesh of shape {mesh_shape} "
            f"give {expected} at coordinate {coordinate}: it was not made by torch's chunking rule"
        )
    if prod(expected) == 0:
        return ()
    if all(len(r) <= 1 for r in runs):
        return (LocalBox(tuple(r[0][0] for r in runs), expected, None),)
    return tuple(_product(runs))


def _readings(size: int, splits: Sequence[tuple[int, int, int]]) -> list[list[Run]]:
    """The possible contents of one dimension, the more usual first; `splits` is (parts, index, split factor)."""
    left_to_right: list[Run] = [(0, size)]
    for parts, index, factor in splits:
        pieces = [_chunk(left_to_right, factor, j) for j in range(factor)]
        left_to_right = _merged(itertools.chain.from_iterable(_chunk(p, parts, index) for p in pieces))
    order = _split_order(splits)
    if order is None:
        return [left_to_right]
    right_to_left: list[Run] = [(0, size)]
    for position in order:
        parts, index, _ = splits[position]
        right_to_left = _chunk(right_to_left, parts, index)
    return [right_to_left, left_to_right]


def _split_order(splits: Sequence[tuple[int, int, int]]) -> list[int] | None:
    """In which order the splits were made: one with factor f came after splits to its right into f parts in all.

    None when no order explains the factors.
    """
    order: list[int] = []
    for position in reversed(range(len(splits))):
        factor = splits[position][2]
        place, done = 0, 1
        while done < factor and place < len(order):
            done *= splits[order[place]][0]
            place += 1
        if done != factor:
            return None
        order.insert(place, position)
    return order


def _total(runs: Sequence[Run]) -> int:
    return sum(length for _, length in runs)


def _chunk(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """Piece `index` of `parts` of the concatenated runs, by the rule of torch.chunk."""
    total = _total(runs)
    size = -(-total // parts)
    low, high = min(size * index, total), min(size * (index + 1), total)
    out: list[Run] = []
    at = 0
    for start, length in runs:
        first, last = max(low, at), min(high, at + length)
        if first < last:
            out.append((start + first - at, last - first))
        at += length
    return out


def _merged(runs: itertools.chain[Run]) -> list[Run]:
    out: list[Run] = []
    for start, length in runs:
        if out and out[-1][0] + out[-1][1] == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((start, length))
    return out


def _product(runs: Sequence[Sequence[Run]]) -> list[LocalBox]:
    """All boxes of a tensor that holds `runs[d]` along each dimension d."""
    placed: list[list[tuple[int, int, slice]]] = []
    for dim_runs in runs:
        at, row = 0, []
        for start, length in dim_runs:
            row.append((start, length, slice(at, at + length)))
            at += length
        placed.append(row)
    return [
        LocalBox(tuple(p[0] for p in pick), tuple(p[1] for p in pick), tuple(p[2] for p in pick))
        for pick in itertools.product(*placed)
    ]
