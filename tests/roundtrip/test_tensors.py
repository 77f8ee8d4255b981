"""Every kind of tensor goes through a save and a load bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from tests.support.layouts import DTYPES, bits
from tests.support.modes import MODES


def elements(dtype: torch.dtype, count: int) -> torch.Tensor:
    """`count` elements of any dtype from a fixed pattern of bytes."""
    pattern = torch.arange(count * dtype.itemsize, dtype=torch.int64).mul(37).add(11).remainder(251).to(torch.uint8)
    if dtype == torch.bool:
        pattern = pattern % 2
    return pattern.view(dtype)


def save_and_load(path: Path, state: dict[str, torch.Tensor], mode: str) -> dict[str, torch.Tensor]:
    bytecheckpoint.save(path, {"model": state}, **MODES[mode]).result(60)
    into: dict[str, Any] = {"model": {}}
    bytecheckpoint.load(path, into)
    found: dict[str, torch.Tensor] = into["model"]
    return found


@pytest.mark.parametrize("mode", MODES)
def test_every_dtype_and_form(tmp_path: Path, mode: str) -> None:
    state: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        flat = elements(dtype, 24)
        state[f"{dtype}.vector"] = flat
        state[f"{dtype}.offset"] = flat[3:17]
        state[f"{dtype}.strided"] = flat.view(4, 6).t()[1:, ::2]
        state[f"{dtype}.scalar"] = flat[5].reshape(())
        state[f"{dtype}.empty"] = flat[:0].reshape(0, 3)
        state[f"{dtype}.expanded"] = flat[:3].reshape(3, 1).expand(3, 4)
        # Large enough to be copied and read in other ways than small ones.
        large = elements(dtype, (1 << 20) // dtype.itemsize)
        state[f"{dtype}.large"] = large
        state[f"{dtype}.large strided"] = large.view(2, -1).t()
    found = save_and_load(tmp_path / "s", state, mode)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.empty(3, device="meta"), "meta"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quant"),
        (torch.ones(3, dtype=torch.complex64).conj(), "conj"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, tensor: torch.Tensor, word: str
) -> None:
    with pytest.raises(bytecheckpoint.UsageError, match=f"(?is)odd one.*{word}"):
        bytecheckpoint.save(tmp_path / "s", {"model": {"fine": torch.ones(3), "odd one": tensor}})
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_tensor_larger_than_one_system_call(tmp_path: Path) -> None:
    tensor = torch.arange(251, dtype=torch.uint8).repeat((2 << 30) // 251 + 17)
    assert tensor.nbytes > 2 << 30
    found = save_and_load(tmp_path / "s", {"w": tensor}, "sync")
    assert torch.equal(found["w"], tensor)


def test_50_000_small_tensors(tmp_path: Path) -> None:
    flat = torch.arange(50_000 * 8, dtype=torch.float32)
    state = {f"layer.{i}.w": t for i, t in enumerate(flat.split(8))}
    found = save_and_load(tmp_path / "s", state, "sync")
    assert torch.equal(torch.cat(list(found.values())), flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_made_in_inference_mode(tmp_path: Path, dtype: torch.dtype) -> None:
    source = {"w": torch.randn(600, 600).to(dtype), "b": torch.randn(3).to(dtype), "e": torch.ones(3, 1).to(dtype)}
    bytecheckpoint.save(tmp_path / "s", {"model": source})
    module = torch.nn.Module()
    with torch.inference_mode():
        for name, tensor in source.items():
            module.register_buffer(name, torch.zeros_like(tensor))
    bytecheckpoint.load(tmp_path / "s", {"model": module})
    for name, tensor in source.items():
        assert module.get_buffer(name).is_inference()
        assert torch.equal(module.get_buffer(name), tensor)


def test_memory_that_is_gone_is_refused(tmp_path: Path) -> None:
    whole = torch.ones(8)
    freed = {"whole": whole, "view": whole[3:]}
    whole.untyped_storage().resize_(0)
    for name, tensor in {**freed, "zeros": torch._efficientzerotensor(4)}.items():
        with pytest.raises(bytecheckpoint.UsageError, match=f"model/{name} has no memory"):
            bytecheckpoint.save(tmp_path / "s", {"model": {name: tensor}})
    bytecheckpoint.save(tmp_path / "s", {"model": {"whole": torch.ones(8)}})
    module = torch.nn.Module()
    module.register_buffer("whole", whole)
    with pytest.raises(bytecheckpoint.UsageError, match="model/whole has no memory"):
        bytecheckpoint.load(tmp_path / "s", {"model": module})
