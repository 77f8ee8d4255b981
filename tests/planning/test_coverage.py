from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.planning import intersect as module
from bytecheckpoint.planning.coverage import first_gap, missing_volume, not_tiled, overlapping
from bytecheckpoint.planning.intersect import intersect
from bytecheckpoint.representation.boxes import BoxTable

SHAPE = (5, 4, 3)


@st.composite
def boxes(draw: st.DrawFn, dims: int) -> list[tuple[list[int], list[int]]]:
    out = []
    for _ in range(draw(st.integers(0, 7))):
        lo = [draw(st.integers(0, n)) for n in SHAPE[:dims]]
        out.append((lo, [draw(st.integers(0, n - a)) for a, n in zip(lo, SHAPE, strict=False)]))
    return out


def fill(mask: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    mask[tuple(slice(int(o), int(o + n)) for o, n in zip(offsets, lengths, strict=True))] += 1
    return mask


@given(st.data(), st.integers(1, 3))
def test_first_gap_is_uncovered_and_maximal(data: st.DataObject, dims: int) -> None:
    shape = SHAPE[:dims]
    found = data.draw(boxes(dims))
    wanted = [*data.draw(boxes(dims)), ([0] * dims, list(shape))][0]
    table = BoxTable.build([0] * len(found), [b[0] for b in found], [b[1] for b in found], dims)
    taken = np.zeros(shape, np.int64)
    for o, n in zip(table.offsets, table.lengths, strict=True):
        fill(taken, o, n)
    inside = fill(np.zeros(shape, np.int64), np.array(wanted[0]), np.array(wanted[1])) > 0
    gap = first_gap(*wanted, table.offsets, table.lengths)
    free = inside & (taken == 0)
    assert (gap is not None) == free.any()
    if gap is None:
        return
    lo, lengths = np.array(gap[0]), np.array(gap[1])
    hit = fill(np.zeros(shape, np.int64), lo, lengths) > 0
    assert hit.any()
    assert not (hit & ~free).any()
    for k in range(dims):
        step = np.eye(dims, dtype=np.int64)[k]
        for offsets in (lo - step, lo):
            if (offsets >= 0).all() and (offsets + lengths + step <= shape).all():
                larger = fill(np.zeros(shape, np.int64), offsets, lengths + step) > 0
                assert (larger & ~free).any(), "the gap could be larger"


@given(st.data(), st.integers(1, 3))
def test_overlaps_and_missing_volumes_equal_brute_force(data: st.DataObject, dims: int) -> None:
    found = data.draw(boxes(dims))
    tensors = data.draw(st.lists(st.integers(0, 1), min_size=len(found), max_size=len(found)))
    table = BoxTable.build(tensors, [b[0] for b in found], [b[1] for b in found], dims)
    masks = [
        fill(np.zeros((2, *SHAPE[:dims]), np.int64), np.append(t, o), np.append(1, n))
        for t, o, n in zip(table.tensor, table.offsets, table.lengths, strict=True)
    ]
    pairs = [(i, j) for j in range(len(masks)) for i in range(j) if (masks[i] & masks[j]).any()]
    result = overlapping(table)
    assert list(zip(result.left.tolist(), result.right.tolist(), strict=True)) == pairs

    # Keep the boxes that overlap none before them: these are disjoint, as missing_volume asks.
    keep: list[int] = []
    for j in range(len(masks)):
        if not any((masks[i] & masks[j]).any() for i in keep):
            keep.append(j)
    saved = table.take(np.array(keep, np.int64))
    covered = np.sum([masks[j] for j in keep], axis=0) if keep else np.zeros((2, *SHAPE[:dims]), np.int64)
    wanted_boxes = data.draw(boxes(dims))
    wanted = BoxTable.build([1] * len(wanted_boxes), [b[0] for b in wanted_boxes], [b[1] for b in wanted_boxes], dims)
    expected = [
        int((fill(np.zeros(SHAPE[:dims], np.int64), o, n) * (covered[1] == 0)).sum())
        for o, n in zip(wanted.offsets, wanted.lengths, strict=True)
    ]
    assert missing_volume(wanted, intersect(saved, wanted)).tolist() == expected


def test_a_gap_among_many_shards_is_found_without_visiting_all() -> None:
    count = 20_000
    starts = np.delete(np.arange(count), 12_345)[:, None] * 3
    assert first_gap([0], [count * 3], starts, np.full_like(starts, 3)) == ((37_035,), (3,))
    assert overlapping(BoxTable(np.zeros(count - 1, np.int64), starts, np.full_like(starts, 3))).left.tolist() == []


def test_a_partition_has_no_overlaps_and_is_not_searched() -> None:
    starts = np.random.default_rng(0).permutation(1000)[:, None] * 5
    table = BoxTable(np.arange(1000) % 3, starts, np.full_like(starts, 5))
    hulls = module._hulls(table, np.arange(1000))
    assert len(module._Index.build(table, *module._filtered(table, hulls), hulls).crowded()) == 0
    table.lengths[7] += 1000
    found = overlapping(table)
    assert 7 in {*found.left.tolist(), *found.right.tolist()}
    assert (found.left < found.right).all()


def tiles(draw: st.DrawFn, lo: list[int], hi: list[int]) -> list[tuple[list[int], list[int]]]:
    """Boxes that tile [lo, hi), by cutting it at random."""
    wide = [k for k, (a, b) in enumerate(zip(lo, hi, strict=True)) if b - a > 1]
    if not wide or not draw(st.integers(0, 3)):
        return [(lo, [b - a for a, b in zip(lo, hi, strict=True)])]
    k = draw(st.sampled_from(wide))
    cut = draw(st.integers(lo[k] + 1, hi[k] - 1))
    below, above = [*hi], [*lo]
    below[k] = above[k] = cut
    return tiles(draw, lo, below) + tiles(draw, above, hi)


@st.composite
def nearly_tiled(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[tuple[list[int], list[int]]]]:
    """(shapes, tensor of each box, boxes): tilings, of which some boxes were moved, doubled, or left out."""
    shapes, tensor, found = [], [], []
    for number in range(draw(st.integers(1, 3))):
        shapes.append([draw(st.integers(0, n)) for n in SHAPE])
        for offsets, lengths in tiles(draw, [0, 0, 0], shapes[-1]):
            moved = draw(st.sampled_from([True] + [False] * 5))
            if moved:
                offsets = [draw(st.integers(0, s - n)) for s, n in zip(shapes[-1], lengths, strict=True)]
            for _ in range(draw(st.sampled_from([1] * 8 + [0, 2]))):
                tensor.append(number)
                found.append((offsets, lengths))
    order = draw(st.permutations(range(len(found))))
    return shapes, [tensor[i] for i in order], [found[i] for i in order]


@given(nearly_tiled())
def test_not_tiled_finds_boxes_that_only_have_the_right_volume(
    drawn: tuple[list[list[int]], list[int], list[tuple[list[int], list[int]]]],
) -> None:
    shapes, tensor, found = drawn
    table = BoxTable.build(tensor, [b[0] for b in found], [b[1] for b in found], 3)
    taken = [np.zeros(shape, np.int64) for shape in shapes]
    for number, o, n in zip(tensor, table.offsets, table.lengths, strict=True):
        fill(taken[number], o, n)
    expected = [i for i, mask in enumerate(taken) if (mask != 1).any()]
    assert not_tiled(np.array(shapes, np.int64), table).tolist() == expected
