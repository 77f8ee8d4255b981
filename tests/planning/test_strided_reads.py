"""Rows with any strides from any byte on, as foreign files have them: plans and copies equal numpy's views."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from bytecheckpoint.engine.scatter import BoxTarget, ScatterPlan
from bytecheckpoint.planning.read_plan import StoredRows, plan_reads
from bytecheckpoint.representation.boxes import BoxTable

_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@st.composite
def boxes(draw: st.DrawFn, shape: list[int]) -> tuple[list[int], list[int]]:
    offsets = [draw(st.integers(0, n - 1)) for n in shape]
    return offsets, [draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A tensor in two rows, each with its dimensions in any order and gaps between them, and boxes that are wanted."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    half = draw(st.integers(0, shape[0]))
    rows = [([at, *[0] * (len(shape) - 1)], [n, *shape[1:]]) for at, n in ((0, half), (half, shape[0] - half)) if n]
    strides = []
    for _, lengths in rows:
        step, own = 1, [0] * len(shape)
        for dim in draw(st.permutations(range(len(shape)))):
            own[dim] = step * draw(st.integers(1, 3))
            step = own[dim] * lengths[dim]
        strides.append(own)
    return {
        "shape": shape, "rows": rows, "strides": strides, "size": draw(st.sampled_from([1, 2, 4, 8])),
        "starts": [draw(st.integers(0, 40)) for _ in rows],
        "wanted": draw(st.lists(st.tuples(boxes(shape), st.booleans()), min_size=1, max_size=3)),
        "cast": draw(st.booleans()), "block": draw(st.sampled_from([1, 16, 64])), "chunk": draw(st.sampled_from([64, 192])),
    }  # fmt: skip


def check(case: dict[str, Any]) -> None:
    size, rows = case["size"], case["rows"]
    dtype = _DTYPES[size]
    element, tensor = np.dtype(f"i{size}" if size > 1 else "u1"), np.zeros(case["shape"], f"i{size}")
    files, ends = [], []
    for (offsets, lengths), strides, start in zip(rows, case["strides"], case["starts"], strict=True):
        span = sum((n - 1) * s for n, s in zip(lengths, strides, strict=True)) + 1
        data = np.random.default_rng(span).integers(0, 256, start + span * size + 5, np.uint8)
        elements = np.ascontiguousarray(data[start : start + span * size]).view(element)
        view = as_strided(elements, lengths, [s * size for s in strides])
        tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] = view
        files.append(data)
        ends.append(len(data))
    count = len(rows)
    stored = StoredRows(
        BoxTable.build([0] * count, [o for o, _ in rows], [n for _, n in rows]),
        file=np.arange(count), start=np.array(case["starts"]), element=np.full(count, size),
        data_bytes=np.array(ends), block_bytes=np.full(count, case["block"]), strides=np.array(case["strides"]),
    )  # fmt: skip
    wanted = BoxTable.build([0] * len(case["wanted"]), *zip(*(box for box, _ in case["wanted"]), strict=True))
    targets = []
    for (_, lengths), transposed in case["wanted"]:
        memory = torch.full(
            lengths[::-1] if transposed else lengths, 77, dtype=torch.float64 if case["cast"] else dtype
        )
        targets.append(BoxTarget(memory.permute(*reversed(range(len(lengths)))) if transposed else memory, dtype))
    plan = plan_reads(stored, wanted, np.array([t.contiguous for t in targets]), case["chunk"])
    assert not plan.missing.any()
    scatter = ScatterPlan(plan, targets)
    for index, (file, start, stop) in enumerate(
        zip(plan.file.tolist(), plan.start.tolist(), plan.stop.tolist(), strict=True)
    ):
        assert stop <= -(-(start + 1) // case["chunk"]) * case["chunk"] + case["chunk"] // 4 + 2 * max(
            case["block"], 16
        )
        assert start % case["block"] == 0 and (stop % case["block"] == 0 or stop == ends[file])
        scatter.scatter(index, torch.from_numpy(files[file][start:stop].copy()), start)
    for ((offsets, lengths), _), target in zip(case["wanted"], targets, strict=True):
        expected = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        expected = expected.view("u1") if size == 1 else expected
        assert math.prod(lengths) == target.data.numel() and np.array_equal(target.data.numpy(), expected)


@given(cases())
def test_rows_with_strides(case: dict[str, Any]) -> None:
    check(case)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_large_row_is_read_in_parts(order: tuple[int, int]) -> None:
    """A transposed row, of which a rank wants a part, is read in ranges of little more than a chunk."""
    shape = [600, 500]
    strides = [[500, 1], [1, 600]][order[0]]
    check({
        "shape": shape, "rows": [([0, 0], shape)], "strides": [strides], "size": 2, "starts": [7], "block": 64,
        "wanted": [(([100, 3], [400, 490]), False)], "cast": False, "chunk": 1 << 16,
    })  # fmt: skip


def test_elements_across_chunks_are_read_with_the_first() -> None:
    check({
        "shape": [500], "rows": [([0], [500])], "strides": [[1]], "size": 8, "starts": [3], "block": 16,
        "wanted": [(([1], [450]), False)], "cast": False, "chunk": 192,
    })  # fmt: skip
