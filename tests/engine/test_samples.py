"""Samples of tensors: equal to an exact copy, and different from one that differs at the ends of its pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bytecheckpoint.engine.pieces import PIECE_BYTES
from bytecheckpoint.engine.runs import Runs
from bytecheckpoint.engine.samples import CopiedRanges, SamplePlaces, TensorSamples
from bytecheckpoint.engine.tensor_bytes import dense, flat_bytes

TENSORS: list[torch.Tensor | Runs] = [
    torch.randn(1000), torch.randn(()), torch.zeros(3, dtype=torch.uint8), torch.randn(0), torch.ones(5, dtype=torch.bool),
    torch.randn(70, 50).t(), torch.randn(40, 3)[:, 1], torch.randn(1).expand(9), torch.randn(77, dtype=torch.complex128),
    torch.randn(300, dtype=torch.complex64).imag, torch.randn(50).bfloat16(), torch.arange(2**21 + 5, dtype=torch.float64),
    torch.randn(400).to(torch.float8_e4m3fn), torch.randn(2**22)[1:],
    torch.randn(4, 6, 5, 5).to(memory_format=torch.channels_last),
    Runs(torch.randn(1000), np.array([3, 500, 40]), np.array([7, 300, 1])),
]  # fmt: skip


def read(tensors: list[Any]) -> TensorSamples:
    return SamplePlaces.of(tensors).read(tensors)


def copied(tensors: list[torch.Tensor | Runs]) -> tuple[CopiedRanges, np.ndarray]:
    """All tensors, in the opposite order, in one memory with holes of odd lengths."""
    begin = np.cumsum([0, *(t.nbytes for t in tensors)])
    memory = np.zeros(int(begin[-1]) + 13 * len(tensors), np.uint8)
    at, end, columns = 5, 0, []
    for number in reversed(range(len(tensors))):
        tensor = tensors[number]
        end = at + tensor.nbytes
        if isinstance(tensor, Runs):
            tensor.copy_bytes(0, tensor.nbytes, torch.from_numpy(memory[at:end]))
        elif tensor.nbytes:
            memory[at:end] = flat_bytes(dense(tensor)).numpy()
        columns.append((begin[number], begin[number + 1], at))
        at = end + number % 13
    return CopiedRanges(*np.array(sorted(columns), np.int64).T), memory


@pytest.mark.parametrize("number", [n for n, tensor in enumerate(TENSORS) if tensor.nbytes])
def test_a_copy_that_differs_at_an_end(number: int) -> None:
    samples, (ranges, memory) = read(TENSORS), copied(TENSORS)
    assert samples.differing(ranges, memory).tolist() == []
    tensor = TENSORS[number]
    whole = isinstance(tensor, torch.Tensor) and tensor.is_contiguous()
    begin = int(ranges.at[number])
    places = [
        *range(PIECE_BYTES - 1, tensor.nbytes, PIECE_BYTES),
        tensor.nbytes - 1,
        *([0, PIECE_BYTES] if whole else []),
    ]
    for place in places:
        if place < tensor.nbytes:
            memory[begin + place] ^= 1
            assert samples.differing(ranges, memory).tolist() == [number], place
            memory[begin + place] ^= 1


def test_parts_that_were_not_copied_are_not_compared() -> None:
    tensors: list[torch.Tensor | Runs] = [torch.zeros(1000), torch.zeros(1000)]
    samples = read(tensors)
    columns = np.array([4000 + 400]), np.array([8000]), np.array([0])
    assert samples.differing(CopiedRanges(*columns), np.ones(3600, np.uint8)).tolist() == [1]
    assert samples.differing(CopiedRanges(*columns), np.zeros(3600, np.uint8)).tolist() == []
    assert samples.differing(CopiedRanges(*np.zeros((3, 0), np.int64)), np.zeros(0, np.uint8)).tolist() == []


def test_two_moments() -> None:
    tensors = [torch.zeros(100), torch.zeros(30, 4).t(), torch.zeros(2)]
    before = read(tensors)
    tensors[1].fill_(1)
    tensors[2][1] = 1
    assert before.differing_from(read(tensors)).tolist() == [1, 2]
