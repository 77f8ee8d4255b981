from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.planning.replicas import all_distinct, group_equal, repeated_rows
from bytecheckpoint.representation.boxes import BoxTable

# Few values, near and far: ties are frequent, and the far ones make the packed key overflow.
values = st.sampled_from([0, 1, 2, 7, 2**40, 2**61, 2**62])


@given(st.integers(1, 4), st.data())
def test_numbers_equal_sorted_distinct_rows(dims: int, data: st.DataObject) -> None:
    width = 1 + 2 * dims
    drawn = data.draw(st.lists(st.lists(values, min_size=width, max_size=width), max_size=12))
    drawn += drawn[::2]
    matrix = np.array(drawn, np.int64).reshape(len(drawn), width)
    table = BoxTable(matrix[:, 0], matrix[:, 1 : 1 + dims], matrix[:, 1 + dims :])
    result = group_equal(table)
    assert all_distinct(table) == (len({tuple(row) for row in drawn}) == len(drawn))
    order = sorted({tuple(row) for row in drawn})
    assert result.tolist() == [order.index(tuple(row)) for row in drawn]
    assert result.dtype == np.int64


def test_the_argument_is_not_changed() -> None:
    table = BoxTable.build([3, 1, 3], [[0], [0], [0]], [[2], [2], [2]])
    assert group_equal(table).tolist() == [1, 0, 1]
    assert not all_distinct(table)
    assert all_distinct(table.take(np.array([0, 1])))
    assert table.tensor.tolist() == [3, 1, 3]


def test_repeated_rows_name_the_first_row_of_their_box() -> None:
    assert repeated_rows(np.array([1, 0, 1, 2, 0, 1])) == [(0, 2), (1, 4), (0, 5)]
    assert repeated_rows(np.array([2, 0, 1])) == [] == repeated_rows(np.zeros(0, np.int64))
