from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.representation.decompose import flat_ranges_to_boxes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=4))
    size = int(np.prod(shape))
    start = draw(st.integers(0, size))
    return shape, start, draw(st.integers(start, size))


def decompose(items: list[tuple[list[int], int, int]]):  # type: ignore[no-untyped-def]
    width = max([1, *(len(shape) for shape, _, _ in items)])
    shapes = np.array([shape + [1] * (width - len(shape)) for shape, _, _ in items], np.int64).reshape(-1, width)
    bounds = np.array([item[1:] for item in items], np.int64).reshape(-1, 2)
    return shapes, flat_ranges_to_boxes(shapes, bounds[:, 0], bounds[:, 1])


@given(st.lists(ranges(), max_size=8))
def test_boxes_tile_their_ranges_in_order(items: list[tuple[list[int], int, int]]) -> None:
    shapes, boxes = decompose(items)
    assert (np.diff(boxes.source) >= 0).all()
    for i, (shape, start, stop) in enumerate(items):
        numbers = np.arange(int(np.prod(shape))).reshape(shapes[i])
        mine = np.flatnonzero(boxes.source == i)
        elements = [np.zeros(0, np.int64)]
        for j in mine:
            index = tuple(slice(o, o + n) for o, n in zip(boxes.offsets[j], boxes.lengths[j], strict=True))
            piece = numbers[index]
            assert piece.shape == tuple(boxes.lengths[j]), "the box reaches beyond the tensor"
            assert piece.size > 0
            assert piece.ravel()[0] == boxes.flat_start[j]
            elements.append(piece.ravel())
        assert np.concatenate(elements).tolist() == list(range(start, stop))
        assert len(mine) <= max(1, 2 * sum(n > 1 for n in shape) - 1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_whole_slices_are_one_box(shape: list[int], data: st.DataObject) -> None:
    row = int(np.prod(shape[1:]))
    first = data.draw(st.integers(0, shape[0] - 1))
    last = data.draw(st.integers(first + 1, shape[0]))
    _, boxes = decompose([(shape, first * row, last * row), (shape, 0, row * shape[0])])
    assert boxes.source.tolist() == [0, 1]
    assert boxes.offsets.tolist() == [[first] + [0] * (len(shape) - 1), [0] * len(shape)]
    assert boxes.lengths.tolist() == [[last - first, *shape[1:]], shape]


def test_figures_of_a_matrix() -> None:
    # Rows of 4: the range 2..13 is the end of row 0, rows 1 and 2, the beginning of row 3.
    _, boxes = decompose([([5, 4], 2, 13)])
    assert boxes.offsets.tolist() == [[0, 2], [1, 0], [3, 0]]
    assert boxes.lengths.tolist() == [[1, 2], [2, 4], [1, 1]]
    assert boxes.flat_start.tolist() == [2, 4, 12]


def test_huge_tensors() -> None:
    _, boxes = decompose([([2**31, 2**31], 2**61 - 1, 2**61 + 2**31 + 1)])
    assert boxes.lengths.tolist() == [[1, 1], [1, 2**31], [1, 1]]
    assert boxes.offsets.tolist() == [[2**30 - 1, 2**31 - 1], [2**30, 0], [2**30 + 1, 0]]


def test_a_range_beyond_the_tensor_is_refused() -> None:
    with pytest.raises(AssertionError):
        flat_ranges_to_boxes(np.array([[2, 3]]), np.array([0]), np.array([7]))
