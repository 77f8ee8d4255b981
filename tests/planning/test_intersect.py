from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.planning import intersect as module
from bytecheckpoint.planning.intersect import Intersections, intersect
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.tuning import tuned

Row = tuple[int, list[int], list[int]]


def table(rows: list[Row], ndim: int = 0) -> BoxTable:
    return BoxTable.build([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], ndim)


def brute(left: BoxTable, right: BoxTable) -> list[tuple[int, int, list[int], list[int]]]:
    width = max(left.ndim, right.ndim)
    left, right = left.widened(width), right.widened(width)
    out = []
    for r in range(len(right)):
        for i in range(len(left)):
            lo = np.maximum(left.offsets[i], right.offsets[r])
            hi = np.minimum(left.offsets[i] + left.lengths[i], right.offsets[r] + right.lengths[r])
            if left.tensor[i] == right.tensor[r] and (lo < hi).all():
                out.append((i, r, lo.tolist(), (hi - lo).tolist()))
    return out


def listed(found: Intersections) -> list[tuple[int, int, list[int], list[int]]]:
    columns = (found.left, found.right, found.offsets, found.lengths)
    return list(zip(*(c.tolist() for c in columns), strict=True))


@st.composite
def rows(draw: st.DrawFn, tensors: dict[int, int], scale: int) -> list[Row]:
    out: list[Row] = []
    for _ in range(draw(st.integers(0, 12))):
        tensor = draw(st.sampled_from(sorted(tensors)))
        dims = tensors[tensor]
        offsets = draw(st.lists(st.integers(0, 5), min_size=dims, max_size=dims))
        lengths = draw(st.lists(st.integers(0, 4), min_size=dims, max_size=dims))
        out.append((tensor, [x * scale for x in offsets], [x * scale for x in lengths]))
    return out


@given(st.data())
def test_equals_brute_force(data: st.DataObject) -> None:
    numbers = st.sampled_from([-7, 0, 1, 2, 3, 90, 10**12, 2**62])
    tensors = data.draw(st.dictionaries(numbers, st.integers(0, 3), min_size=1, max_size=4))
    scale = data.draw(st.sampled_from([1, 3, 2**37]))
    left, right = table(data.draw(rows(tensors, scale))), table(data.draw(rows(tensors, scale)))
    pairs, rows_at_once = data.draw(st.sampled_from([1, 3, 1 << 18])), data.draw(st.sampled_from([2, 1 << 20]))
    with tuned(intersect_pairs=pairs, intersect_rows=rows_at_once):
        found = intersect(left, right)
        upper = intersect(left, left, ascending=True)
    assert listed(found) == brute(left, right)
    assert listed(upper) == [x for x in brute(left, left) if x[0] < x[1]]
    assert found.volumes().tolist() == [int(np.prod(x[3])) for x in listed(found)]


def test_no_rows_on_either_side() -> None:
    one, none = table([(0, [0, 0], [2, 2])]), BoxTable.concat([])
    for left, right in ((one, none), (none, one), (none, none)):
        found = intersect(left, right)
        assert len(found) == 0
        assert found.offsets.shape == (0, max(left.ndim, right.ndim))


def test_zero_dimensional_tensors() -> None:
    found = intersect(table([(5, [], []), (4, [], [])]), table([(4, [], [])], ndim=3))
    assert listed(found) == [(1, 0, [0, 0, 0], [1, 1, 1])]


def candidates(left: BoxTable, right: BoxTable) -> int:
    """Return the number of pairs that the sweep looks at."""
    wanted = np.arange(len(right))
    hulls = module._hulls(right, wanted)
    first, last = module._Index.build(left, *module._filtered(left, hulls), hulls).windows(right, wanted)
    return int((last - first).sum())


@pytest.mark.parametrize("dim", [0, 1])
def test_a_partition_leaves_only_candidates_that_match(dim: int) -> None:
    # 64 tensors, each cut unevenly (one shard as large as all others together) along one of two dimensions.
    rng = np.random.default_rng(0)
    tensors, shards = 64, 200

    def cut(pieces: int) -> BoxTable:
        lengths = rng.integers(1, 9, (tensors, pieces))
        lengths[:, pieces // 2] = 9 * shards - np.delete(lengths, pieces // 2, 1).sum(1)
        starts = np.cumsum(lengths, axis=1) - lengths
        offsets = np.zeros((tensors * pieces, 2), np.int64)
        extents = np.full((tensors * pieces, 2), 16, np.int64)
        offsets[:, dim], extents[:, dim] = starts.ravel(), lengths.ravel()
        order = rng.permutation(len(offsets))
        return BoxTable(np.repeat(np.arange(tensors), pieces)[order], offsets[order], extents[order])

    left, right = cut(shards), cut(150)
    found = intersect(left, right)
    assert candidates(left, right) == len(found) <= tensors * (shards + 150)
    assert found.volumes().sum() == tensors * 9 * shards * 16


def test_the_sweep_follows_the_dimension_that_is_cut_finest() -> None:
    # Tensor 0 is 2 x 300 pieces, tensor 1 is 300 x 2: a sweep along the wrong dimension would look at 150 times more.
    grids = [np.indices((2, 300)).reshape(2, -1).T, np.indices((300, 2)).reshape(2, -1).T]
    offsets = np.concatenate(grids).astype(np.int64)
    left = BoxTable(np.repeat([0, 1], 600), offsets, np.ones_like(offsets))
    assert len(intersect(left, left)) == 1200
    assert candidates(left, left) == 2400
