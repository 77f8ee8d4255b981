"""Transpositions of boxes, for each width of elements and each order of dimensions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.engine import tensor_bytes
from bytecheckpoint.engine.tensor_bytes import same_bits, transpose

DTYPES = (torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.uint16, torch.float32, torch.int32, torch.float64)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return elements of all bits, also those of nan."""
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    count = torch.Size(shape).numel()
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


@given(
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.sampled_from([1, 2, 3, 8, 17, 33, 64]), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
    wider=st.booleans(),
    turned=st.booleans(),
)
def test_each_element_arrives_bit_for_bit(
    dtype: torch.dtype, lengths: list[int], order: object, wider: bool, turned: bool
) -> None:
    """The target's dimensions lie in any order in memory, perhaps as columns of a wider tensor."""
    shape = (4096 // torch.Size(lengths).numel() + 1, *lengths)
    dims = list(range(len(shape)))
    order.shuffle(dims)  # type: ignore[attr-defined]
    memory = random_bits(tuple(shape[dim] * (2 if wider and dim == dims[-1] else 1) for dim in dims), dtype)
    target = memory.narrow(-1, 0, shape[dims[-1]]).permute([dims.index(dim) for dim in range(len(dims))])
    before = memory.clone()
    source = random_bits(shape[::-1] if turned else shape, dtype)
    source = source.permute(*range(source.ndim)[::-1]) if turned else source
    if (left := transpose(source, target)) is not None:
        found, place = left
        same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        place.view(same).copy_(found.view(same))
    assert same_bits(target, source)
    beside = memory.narrow(-1, shape[dims[-1]], memory.shape[-1] - shape[dims[-1]])
    assert same_bits(beside, before.narrow(-1, shape[dims[-1]], beside.shape[-1]))


@pytest.mark.parametrize("dtype", DTYPES[:-1])
@pytest.mark.parametrize(("rows", "columns"), itertools.product((64, 65), (64, 66)))
def test_matrices_go_by_vectors(dtype: torch.dtype, rows: int, columns: int) -> None:
    target = random_bits((columns, rows + 9), dtype)[:, :rows].t()
    source = random_bits((rows, columns), dtype)
    assert transpose(source, target) is None
    assert same_bits(target, source)


@pytest.mark.parametrize("dtype", DTYPES[:-1])
@pytest.mark.parametrize(("rows", "columns"), [(65, 128), (200, 4096), (2, 9000), (130, 1025)])
def test_blocks_of_a_matrix_that_begins_anywhere(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, columns: int
) -> None:
    """The last block may be one row or column; the matrix begins at an odd element, and its rows are parts of rows."""
    monkeypatch.setattr(tensor_bytes, "_CACHED_BYTES", 1 << 16)
    for first, beside in ((0, 0), (1, 0), (1, 3)):
        wide = random_bits((rows * (columns + beside) + first,), dtype)[first:].view(rows, columns + beside)
        source, target = wide[:, :columns], random_bits((columns, rows + 9), dtype)[:, :rows].t()
        if (left := transpose(source, target)) is not None:
            assert dtype.itemsize == 2 and columns % 2, "only they make no pairs"
            left[1].view(torch.int16).copy_(left[0].view(torch.int16))
        assert same_bits(target, source)


def test_what_needs_no_transposition_is_left() -> None:
    few = random_bits((63, 65), torch.bfloat16)
    place = torch.empty(65, 63, dtype=torch.bfloat16).t()
    left = transpose(few, place)
    assert left is not None and left[0] is few and left[1] is place
    many = random_bits((64, 64), torch.bfloat16)
    place = torch.empty_like(many)
    left = transpose(many, place)
    assert left is not None and left[0] is many and left[1] is place


def test_rows_that_make_no_pairs_are_left_in_the_order_of_the_target() -> None:
    odd, memory = random_bits((64, 65), torch.bfloat16), torch.zeros(65, 64, dtype=torch.bfloat16)
    left = transpose(odd, memory.t())
    assert left is not None and left[0].is_contiguous() and left[1].data_ptr() == memory.data_ptr()
    assert same_bits(left[0], odd.t()) and not memory.any()
