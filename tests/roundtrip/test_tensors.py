"""Every kind of tensor goes through a save and a load bit by bit."""

from __future__ import annotations

from collections.abc import Callable
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
    destination: dict[str, Any] = {"model": {}}
    bytecheckpoint.load(path, destination)
    found: dict[str, torch.Tensor] = destination["model"]
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
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quant"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, tensor: Callable[[], torch.Tensor], word: str
) -> None:
    with pytest.raises(bytecheckpoint.UsageError, match=f"(?is)odd one.*{word}"):
        bytecheckpoint.save(tmp_path / "s", {"model": {"fine": torch.ones(3), "odd one": tensor()}})
    assert not (tmp_path / "s").exists()


def lazy_views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return conjugate and negative views, of every form."""
    base = torch.complex(torch.arange(1.0, 25.0), torch.arange(30.0, 54.0)).to(dtype).reshape(4, 6)
    large = torch.complex(torch.arange(200_000.0) % 99, torch.arange(200_000.0) % 77 + 1).to(dtype)
    return {
        "conjugate": base.clone().conj(),
        "transposed": base.clone().mH,
        "columns": base.clone().conj()[:, 1:3],
        "imaginary": base.clone().conj().imag,
        "both": torch._neg_view(base.clone().conj()),
        "expanded": base[:1].clone().conj().expand(5, 6),
        "scalar": base[1, 1].clone().conj(),
        "empty": base[:0].clone().conj(),
        "large": large.conj(),
        "large imaginary": large.clone().conj().imag,
    }


@pytest.mark.parametrize("state", ["model", "extra_states"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("mode", MODES)
def test_conjugate_and_negative_views(tmp_path: Path, mode: str, dtype: torch.dtype, state: str) -> None:
    """They are stored as the program sees them, and a load writes through them."""
    live = lazy_views(dtype)
    seen = {name: tensor.clone() for name, tensor in live.items()}
    assert all(tensor.is_conj() or tensor.is_neg() for tensor in live.values())
    bytecheckpoint.save(tmp_path / "s", {state: live}, **MODES[mode]).result(30)
    with bytecheckpoint.open(tmp_path / "s") as checkpoint:
        for name, tensor in seen.items():
            assert torch.equal(checkpoint[f"{state}/{name}"][...], tensor), name
    for tensor in live.values():
        (tensor[:1] if 0 in tensor.stride() else tensor).zero_()
    given = dict(live)
    bytecheckpoint.load(tmp_path / "s", {state: live})
    for name, tensor in seen.items():
        assert torch.equal(live[name], tensor), name
        if state == "model":
            assert torch.equal(given[name], tensor), name


def test_a_load_writes_through_a_conjugate_view_to_its_base(tmp_path: Path) -> None:
    saved = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1)
    bytecheckpoint.save(tmp_path / "s", {"model": {"w": saved}})
    for base in (torch.zeros_like(saved), inference_zeros(saved)):
        bytecheckpoint.load(tmp_path / "s", {"model": {"w": base.conj()}})
        assert torch.equal(base, saved.conj().resolve_conj())


@torch.inference_mode()
def inference_zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like)


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
