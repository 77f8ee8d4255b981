"""Index expressions against torch itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint import CheckpointError, UsageError
from bytecheckpoint.errors import OutOfRangeError
from bytecheckpoint.opening.slices import row_major_boxes, select


@st.composite
def indexed_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    bound = st.none() | st.integers(-9, 9)
    a_slice = st.builds(slice, bound, bound, st.none() | st.integers(1, 4))
    items: list[Any] = draw(st.lists(st.integers(-7, 7) | a_slice | st.none(), max_size=5))
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), Ellipsis)
    return shape, items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)


@given(indexed_shapes())
def test_selects_what_torch_selects(case: tuple[tuple[int, ...], Any]) -> None:
    shape, index = case
    full = torch.arange(math.prod(shape)).reshape(shape)
    try:
        expected = full[index]
    except IndexError:
        with pytest.raises(IndexError) as caught:
            select(shape, index, "x")
        assert isinstance(caught.value, CheckpointError)
        return
    found = select(shape, index, "x")
    box = full[tuple(slice(s, s + n) for s, n in zip(found.starts, found.spans, strict=True))]
    picked = box[tuple(slice(None, None, step) for step in found.steps)]
    assert tuple(picked.shape) == found.counts
    assert torch.equal(picked[found.shaping], expected)


@pytest.mark.parametrize(
    "index", [[0, 1], True, "a", 1.5, torch.tensor([0]), slice(None, None, -1), slice(0.5), slice(None, None, 0)]
)
def test_other_indices_are_refused(index: Any) -> None:
    with pytest.raises(UsageError, match=r"^x: "):
        select((3, 4), index, "x")


def test_two_ellipses_and_too_many_indices_are_index_errors() -> None:
    for index in [(..., ...), (0, 0, 0)]:
        with pytest.raises(OutOfRangeError):
            select((3, 4), index, "x")


@given(st.lists(st.integers(0, 6), max_size=4).map(tuple), st.integers(1, 60))
def test_row_major_boxes_are_runs_in_order(shape: tuple[int, ...], most: int) -> None:
    full = torch.arange(math.prod(shape)).reshape(shape)
    boxes = list(row_major_boxes(shape, most))
    if 0 in shape:
        assert boxes == [((0,) * len(shape), shape)]
        return
    pieces = [full[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in boxes]
    assert all(piece.numel() <= most for piece in pieces)
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), full.reshape(-1))
