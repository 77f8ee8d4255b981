"""Flat ranges of tensors as live shards: compared with brute force, in any memory order, and written through views."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.tensors.flat_ranges import FlatRange, FlattenedBox, flat_range_shards
from bytecheckpoint.representation.shards import LiveShard, TensorKey


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Draw (global shape, offsets, lengths, order) of a box in some memory order."""
    lengths = draw(st.lists(st.integers(0, 5), max_size=4))
    before = [draw(st.integers(0, 2)) for _ in lengths]
    shape = tuple(b + n + draw(st.integers(0, 2)) for b, n in zip(before, lengths, strict=True))
    return shape, tuple(before), tuple(lengths), tuple(draw(st.permutations(range(len(lengths)))))


def box_of(shard: LiveShard) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.lengths, strict=True))


@given(st.lists(tensors(), min_size=1, max_size=5), st.data())
def test_cut_anywhere_the_shards_tile_their_tensors(
    drawn: list[tuple[tuple[int, ...], ...]], data: st.DataObject
) -> None:
    """Join all tensors in one buffer, as ZeRO does, and cut it into ranks at arbitrary places."""
    wholes = [
        torch.arange(prod(shape), dtype=torch.float64).reshape(shape) + 1000 * i for i, (shape, *_) in enumerate(drawn)
    ]
    parts = []
    for whole, (_, offsets, lengths, order) in zip(wholes, drawn, strict=True):
        box = whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        parts.append(box.permute(order).reshape(-1))
    flat = torch.cat([*parts, torch.full((3,), -1.0, dtype=torch.float64)])  # padding behind
    stride = data.draw(st.integers(1, 2))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(flat)), max_size=4)))
    filled = [torch.zeros(shape, dtype=torch.int64) for shape, *_ in drawn]
    for low, high in zip([0, *cuts], [*cuts, len(flat)], strict=True):
        memory = torch.full((stride * (high - low) + 1,), -2.0, dtype=torch.float64)
        shard = memory[1:][::stride]
        shard[: high - low] = flat[low:high]
        ranges, at = [], 0
        for i, (shape, offsets, lengths, order) in enumerate(drawn):
            begin, end = max(low, at), min(high, at + prod(lengths))
            box = FlattenedBox(offsets, lengths, order)
            if begin <= end:
                key = TensorKey("optimizer", f"p{i}", "exp_avg")
                ranges.append(FlatRange(key, shape, begin - at, shard, begin - low, end - begin, box))
            at += prod(lengths)
        counts: dict[str, int] = {}
        for box_shard in flat_range_shards(ranges):
            i = int(box_shard.key.fqn[1:])
            assert box_shard.global_shape == drawn[i][0]
            assert tuple(box_shard.data.shape) == box_shard.lengths
            assert box_shard.dtype == "float64"
            assert torch.equal(box_shard.data, wholes[i][box_of(box_shard)])
            filled[i][box_of(box_shard)] += 1
            counts[box_shard.key.fqn] = counts.get(box_shard.key.fqn, 0) + 1
            box_shard.data.neg_()  # a view: what is written arrives in the buffer
        for name, count in counts.items():
            _, _, lengths, _ = drawn[int(name[1:])]
            assert count <= max(1, 2 * sum(n > 1 for n in lengths) - 1)
        for flat_range in ranges:
            run = shard[flat_range.offset : flat_range.offset + flat_range.count]
            assert torch.equal(run, -flat[low:high][flat_range.offset : flat_range.offset + flat_range.count])
    for i, (shape, offsets, lengths, _) in enumerate(drawn):
        expected = torch.zeros(shape, dtype=torch.int64)
        expected[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] = 1
        assert torch.equal(filled[i], expected), f"p{i} of shape {shape}"


def test_shards_of_a_flat_range_follow_each_other_in_memory() -> None:
    flat = torch.arange(60.0)
    shards = flat_range_shards([FlatRange(TensorKey("model", "w"), (3, 4, 5), 7, flat[7:53])])
    assert [s.offsets for s in shards] == [(0, 1, 2), (0, 2, 0), (1, 0, 0), (2, 0, 0), (2, 2, 0)]
    assert [s.lengths for s in shards] == [(1, 1, 3), (1, 2, 5), (1, 4, 5), (1, 2, 5), (1, 1, 3)]
    ends = [s.data.data_ptr() + s.data.nbytes for s in shards]
    assert [s.data.data_ptr() for s in shards] == [flat[7:].data_ptr(), *ends[:-1]]
    assert all(s.data.is_contiguous() for s in shards)


def test_shards_keep_aliases_and_requires_grad() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    (shard,) = flat_range_shards(
        [FlatRange(TensorKey("model", "a"), (2, 2), 0, parameter, aliases=("b",), requires_grad=True)]
    )
    assert shard.aliases == ("b",)
    assert shard.requires_grad
    assert not shard.data.requires_grad
    assert not shard.by_content
    shard.data.fill_(3)
    assert parameter.tolist() == [3, 3, 3, 3]


def test_empty_ranges_become_no_shards_but_empty_tensors_become_one() -> None:
    buffer = torch.zeros(0, dtype=torch.bfloat16)
    ranges = [
        FlatRange(TensorKey("model", "none"), (2, 3), 0, buffer),
        FlatRange(TensorKey("model", "other"), (2, 3), 9, buffer, 9, 0),
        FlatRange(TensorKey("model", "empty"), (2, 0, 3), 0, buffer),
    ]
    (shard,) = flat_range_shards(ranges)
    assert (shard.key.fqn, shard.offsets, shard.lengths, shard.dtype) == ("empty", (0, 0, 0), (2, 0, 3), "bfloat16")
    assert shard.data.shape == (2, 0, 3)
    assert flat_range_shards([]) == []


def test_scalars() -> None:
    (shard,) = flat_range_shards([FlatRange(TensorKey("model", "scale"), (), 0, torch.tensor([5.0]))])
    assert (shard.offsets, shard.lengths) == ((), ())
    assert shard.data.item() == 5


@pytest.mark.parametrize(
    ("flat_range", "match"),
    [
        (FlatRange(TensorKey("model", "w"), (2, 3), 4, torch.zeros(3)), "model/w: 3 elements from number 4"),
        (FlatRange(TensorKey("model", "w"), (2, 3), -1, torch.zeros(3)), "from number -1"),
        (FlatRange(TensorKey("model", "w"), (2, 3), 0, torch.zeros(3), 2, 2), "a buffer of 3"),
        (FlatRange(TensorKey("model", "w"), (2, 3), 0, torch.zeros(3), 4), "model/w"),
        (FlatRange(TensorKey("model", "w"), (2, 3), 0, torch.zeros(2, 3)), r"plain 1-D tensor.*\(2, 3\)"),
        (FlatRange(TensorKey("model", "w"), (2, 3), 0, torch.zeros(6, device="meta")), "meta"),
        (FlatRange(TensorKey("model", "w"), (2, 3), 0, torch.zeros(6), box=FlattenedBox((1, 0), (2, 3))), "inside"),
        (FlatRange(TensorKey("model", "w"), (2, 3), 0, torch.zeros(6), box=FlattenedBox(order=(0, 0))), "inside"),
        (FlatRange(TensorKey("model", "w"), (2, 3), 0, torch.zeros(2), box=FlattenedBox(lengths=(2,))), "inside"),
    ],
)
def test_invalid_flat_ranges_are_refused_by_name(flat_range: FlatRange, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        flat_range_shards([FlatRange(TensorKey("model", "ok"), (1,), 0, torch.zeros(1)), flat_range])
