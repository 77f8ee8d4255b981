"""Boxes of DTensors, compared with a brute-force index simulation without processes (test_world.py uses real DTensors)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.tensors.placements import local_boxes
from bytecheckpoint.representation.placements import LocalBox


def chunk(tensor: torch.Tensor, parts: int, index: int, dim: int) -> torch.Tensor:
    pieces = torch.chunk(tensor, parts, dim)
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, 0, 0)


def distributed(whole: torch.Tensor, mesh: tuple[int, ...], at: tuple[int, ...], placements: Any) -> torch.Tensor:
    """Cut the local tensor left to right, as distribute_tensor does."""
    for parts, index, placement in zip(mesh, at, placements, strict=True):
        if isinstance(placement, _StridedShard):
            factor = int(placement.split_factor)
            pieces = [chunk(chunk(whole, factor, j, placement.dim), parts, index, placement.dim) for j in range(factor)]
            whole = torch.cat(pieces, placement.dim)
        elif isinstance(placement, Shard):
            whole = chunk(whole, parts, index, placement.dim)
    return whole


def fully_sharded(
    whole: torch.Tensor, mesh: tuple[int, ...], at: tuple[int, ...], dims: tuple[int, ...]
) -> torch.Tensor:
    """Cut the local tensor right to left, as fully_shard over tensor parallelism does."""
    for parts, index, dim in reversed(list(zip(mesh, at, dims, strict=True))):
        whole = chunk(whole, parts, index, dim)
    return whole


def rebuilt(boxes: tuple[LocalBox, ...], whole: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Rebuild the local tensor from the boxes, which must cover every element exactly once."""
    out = torch.full_like(local, -1)
    for offsets, lengths, slices in boxes:
        box = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        target = out if slices is None else out[slices]
        assert tuple(target.shape) == lengths
        assert bool((target == -1).all())
        target.copy_(whole[box])
    return out


def arange(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dim = st.integers(0, len(shape) - 1)
    placement = st.one_of(
        st.builds(Replicate),
        st.builds(Shard, dim),
        st.builds(lambda d, f: _StridedShard(d, split_factor=f), dim, st.integers(1, 4)),
    )
    return shape, mesh, tuple(draw(placement) for _ in mesh)


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_left_to_right_layouts_match_a_brute_force_simulation(layout: Any) -> None:
    shape, mesh, placements = layout
    whole = arange(shape)
    for at in product(*map(range, mesh)):
        local = distributed(whole, mesh, at, placements)
        boxes = local_boxes(mesh, at, placements, shape, tuple(local.shape))
        made = rebuilt(boxes, whole, local)
        if torch.equal(made, local):
            continue
        # The same placements also describe a right-to-left split. Where a rank cannot tell the two apart, it assumes
        # right to left, which is the layout that exists in practice.
        assert any(isinstance(p, _StridedShard) for p in placements)
        assert len(boxes) == 1


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=2, max_size=3),
    st.data(),
)
def test_fsdp_over_tensor_parallelism_is_always_one_box(shape: Any, mesh: Any, data: Any) -> None:
    shape, mesh = tuple(shape), tuple(mesh)
    dims = tuple(data.draw(st.integers(0, len(shape) - 1)) for _ in mesh)
    whole = arange(shape)
    placements: list[Any] = []
    for i, dim in enumerate(dims):
        factor = torch.Size([m for m, d in list(zip(mesh, dims, strict=True))[i + 1 :] if d == dim]).numel()
        placements.append(_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
    for at in product(*map(range, mesh)):
        local = fully_sharded(whole, mesh, at, dims)
        boxes = local_boxes(mesh, at, tuple(placements), shape, tuple(local.shape))
        assert len(boxes) == (1 if local.numel() else 0)
        assert torch.equal(rebuilt(boxes, whole, local), local)


def test_a_zero_dimensional_and_an_unsharded_tensor_are_one_box() -> None:
    assert local_boxes((2,), (1,), (Replicate(),), (), ()) == (LocalBox((), (), None),)
    assert local_boxes((2,), (1,), (Replicate(),), (3, 2), (3, 2)) == (LocalBox((0, 0), (3, 2), None),)


def test_an_empty_part_has_no_box() -> None:
    assert local_boxes((4,), (3,), (Shard(0),), (5, 2), (0, 2)) == ()


def test_partial_placements_are_refused() -> None:
    with pytest.raises(UsageError, match="unreduced"):
        local_boxes((2,), (0,), (Partial(),), (4,), (4,))


def test_a_local_tensor_that_torch_would_not_make_is_refused() -> None:
    with pytest.raises(UsageError, match="chunking"):
        local_boxes((2,), (0,), (Shard(0),), (5,), (4,))


def test_uneven_tensor_parallel_2_fsdp_3() -> None:
    # torch's compute_local_shape_and_global_offset gets this one wrong.
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    seen = [
        local_boxes((3, 2), (d, t), placements, (7,), ((2, 2, 0)[d] if t == 0 else 1,))
        for d in range(3)
        for t in range(2)
    ]
    assert [[(b.offsets[0], b.lengths[0]) for b in boxes] for boxes in seen] == [
        [(0, 2)], [(4, 1)], [(2, 2)], [(5, 1)], [], [(6, 1)],
    ]  # fmt: skip
