"""Tensors as bytes, whatever their strides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.dataloader.sources.fingerprint import value_fingerprint
from bytecheckpoint.engine.tensor_bytes import dense, dense_bytes, flat_bytes
from bytecheckpoint.representation.values.equality import equal

_STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.reshape(60, 40).T,
    "steps": lambda t: t[::3],
    "columns": lambda t: t.reshape(20, 120)[:, 5:90],
    "one-long-row": lambda t: t.reshape(40, 60).T.unsqueeze(0),
    "permuted": lambda t: t.reshape(3, 4, 10, 20).permute(2, 0, 3, 1),
    "expanded": lambda t: t[:7, None].expand(7, 30),
    "one": lambda t: t[3::5][:1],
    "none": lambda t: t[::5][:0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.complex64], ids=str)
@pytest.mark.parametrize("strides", _STRIDED)
def test_bytes_of_a_part(strides: str, dtype: torch.dtype) -> None:
    tensor = _STRIDED[strides](torch.arange(2400).to(torch.float32).to(dtype))
    whole = flat_bytes(dense(tensor))
    size = tensor.element_size()
    for first in range(0, whole.numel(), 37 * size):
        for length in (size, 64 * size, whole.numel()):
            last = min(first + length, whole.numel())
            assert torch.equal(dense_bytes(tensor, first, last), whole[first:last])


@pytest.mark.parametrize("strides", ["transposed", "one-long-row"])
def test_a_small_part_is_not_cut_from_a_copy_of_all(strides: str) -> None:
    tensor = _STRIDED[strides](torch.arange(2400))
    part = dense_bytes(tensor, 800, 1600)
    assert part.untyped_storage().nbytes() < tensor.nbytes // 4


def test_one_element_with_any_stride_is_saved_and_compared(tmp_path: Path) -> None:
    odd = torch.arange(8)[3::5][:1]
    states: dict[str, Any] = {"extra": {"one": odd, "none": torch.from_numpy(np.empty(0))}}
    bytecheckpoint.save(tmp_path, states)
    fresh: dict[str, Any] = {"extra": {"one": torch.zeros(1, dtype=torch.int64), "none": torch.empty(0).double()}}
    bytecheckpoint.load(tmp_path, fresh)
    assert torch.equal(fresh["extra"]["one"], odd)
    assert equal(odd, torch.tensor([3])) and value_fingerprint(odd) == value_fingerprint(torch.tensor([3]))
