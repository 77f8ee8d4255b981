"""Scatter plans: copying the runs of a range fills the same elements as `scatter`."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.engine.peer_memory import make_segments, read_peer_memory, slice_segments
from bytecheckpoint.engine.scatter import BoxTarget, ScatterPlan
from bytecheckpoint.planning.read_plan import StoredRows, plan_reads
from bytecheckpoint.representation.boxes import BoxTable
from bytecheckpoint.tuning import tuned

_BLOCK = 64


def stored_whole(shape: list[int], itemsize: int, block: int) -> StoredRows:
    """Return the rows of a tensor that a file holds whole, from its first byte on."""
    columns = [np.array([value], np.int64) for value in (0, 0, itemsize, math.prod(shape) * itemsize, block)]
    return StoredRows(BoxTable.build([0], [[0] * len(shape)], [shape]), *columns)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int], bool, int]:
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    offsets = [draw(st.integers(0, n - 1)) for n in shape]
    lengths = [draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)]
    order = draw(st.permutations(range(len(shape))))
    return shape, offsets, lengths, list(order), draw(st.booleans()), draw(st.sampled_from([1, 2, 8]))


@given(cases())
def test_runs_are_what_scatter_does(case: tuple[list[int], list[int], list[int], list[int], bool, int]) -> None:
    shape, offsets, lengths, order, padded, size = case
    dtype = {1: torch.uint8, 2: torch.int16, 8: torch.int64}[size]
    full = torch.arange(1, int(np.prod(shape)) + 1).to(dtype).reshape(shape)
    data = torch.zeros(-(-full.nbytes // _BLOCK) * _BLOCK, dtype=torch.uint8)
    data[: full.nbytes] = full.view(-1).view(torch.uint8)

    def destination() -> torch.Tensor:
        """A tensor whose dimensions have the memory order `order`; with `padded`, with gaps between rows."""
        outer = torch.zeros([lengths[d] + padded for d in order], dtype=dtype)
        inner = outer[tuple(slice(0, lengths[d]) for d in order)]
        return inner.permute([order.index(d) for d in range(len(order))])

    stored = stored_whole(shape, size, _BLOCK)
    wanted = BoxTable.build([0], [offsets], [lengths])
    one, other = destination(), destination()
    plan = plan_reads(stored, wanted, np.array([one.is_contiguous()]), 4 * _BLOCK)
    scattered = ScatterPlan(plan, [BoxTarget(one, dtype)])
    direct = ScatterPlan(plan, [BoxTarget(other, dtype)])
    with tuned(scatter_run_bytes=1):
        for index in range(len(plan.file)):
            start, stop = int(plan.start[index]), int(plan.stop[index])
            copy = torch.empty(stop - start + 16, dtype=torch.uint8)
            copy = copy[-copy.data_ptr() % 16 :][: stop - start]
            copy.copy_(data[start:stop])
            scattered.scatter(index, copy, start)
            runs = direct.runs(index)
            assert runs is not None
            memory = make_segments([(copy.data_ptr(), copy.nbytes)])
            source = slice_segments(memory, runs.source - start, runs.segments[:, 1])
            read_peer_memory(os.getpid(), source, runs.segments)
    expected = full[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    assert torch.equal(one, expected)
    assert torch.equal(other, expected)


def test_no_runs_for_a_cast_or_for_many_short_runs() -> None:
    stored = stored_whole([64, 64], 4, 4096)
    wanted = BoxTable.build([0], [[0, 0]], [[64, 32]])
    plan = plan_reads(stored, wanted, np.array([True]), 1 << 20)
    assert ScatterPlan(plan, [BoxTarget(torch.zeros(64, 32), torch.float32)]).runs(0) is None
    plan = plan_reads(stored, BoxTable.build([0], [[0, 0]], [[64, 64]]), np.array([True]), 1 << 20)
    assert ScatterPlan(plan, [BoxTarget(torch.zeros(64, 64), torch.float32)]).runs(0) is not None
    assert ScatterPlan(plan, [BoxTarget(torch.zeros(64, 64, dtype=torch.float64), torch.float32)]).runs(0) is None


@pytest.mark.parametrize("by_kernel", [True, False])
def test_many_short_copies_go_to_memory_of_every_form(by_kernel: bool) -> None:
    count, data = 300, torch.arange(300 * 16, dtype=torch.int32)
    boxes = BoxTable.build(list(range(count)), [[0, 0]] * count, [[4, 4]] * count)
    number = np.arange(count)
    stored = StoredRows(boxes, number * 0, number * 64, number * 0 + 4, np.array([data.nbytes]), np.array([_BLOCK]))
    targets = [torch.zeros(4, 4, dtype=torch.int64 if i % 5 == 1 else torch.int32) for i in range(count)]
    targets = [target.T if i % 5 == 2 else target for i, target in enumerate(targets)]
    plan = plan_reads(stored, boxes, np.array([t.is_contiguous() for t in targets]), 1 << 20)
    with tuned(peer_memory=by_kernel):
        scattered = ScatterPlan(plan, [BoxTarget(target, torch.int32) for target in targets])
        for index in range(len(plan.file)):
            scattered.scatter(index, data.view(torch.uint8)[int(plan.start[index]) :], int(plan.start[index]))
    assert all(torch.equal(t.int(), part.view(4, 4)) for t, part in zip(targets, data.split(16), strict=True))
