"""Loads of Hugging Face files through layouts: fused attention and MLPs, transposed weights, weights in blocks of fp8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.measure import Arm, peak_memory, read_bytes
from benchmarks.state import Tensors

__all__ = ["adopted"]

_WIDTH, _INNER, _GROUPS, _QUERIES = 2048, 5632, 8, 4
_HEAD = _WIDTH // (_GROUPS * _QUERIES)
_LAYER = 2 * _WIDTH * _WIDTH + 2 * _GROUPS * _HEAD * _WIDTH + 3 * _INNER * _WIDTH
_CONFIG = {
    "model_type": "llama", "num_attention_heads": _GROUPS * _QUERIES, "num_key_value_heads": _GROUPS,
    "hidden_size": _WIDTH, "tie_word_embeddings": True,
}  # fmt: skip


def adopted(bench: Bench) -> None:
    """Measure loads into other tensors beside a load of the same bytes under their own names, and torch's own way.

    `read` is what all ranks read, in shares of the files; `peak_bytes` is the memory beside the model's.
    """
    layers = max(min(bench.options.nbytes, 1 << 30) // (2 * _LAYER), 1)
    folders = [bench.folder / name for name in ("llama", "llama-fp8", "gpt2")]
    if bench.world.rank == 0:
        _write_llama(folders[0], folders[1], layers)
        _write_gpt2(folders[2], layers)
    bench.world.barrier()
    own = _sharded(bench, _llama(layers))
    fused = _sharded(bench, _fused(layers))
    blocks = _sharded(bench, _gpt2(layers, own=False))
    files = folders[0] / "model.safetensors"
    arms = [
        Arm("their own names", _load(folders[0], own, None)),
        Arm("fused, by a layout", _load(folders[0], fused, "llama")),
        Arm("fused, by safetensors and torch", lambda: _by_torch(files, fused, layers)),
        Arm("fused, of fp8", _load(folders[1], fused, "llama")),
        Arm("transposed, by a layout", _load(folders[2], blocks, "gpt2")),
    ]
    bench.measure("adopted", 2 * _LAYER * layers, arms)
    bench.clear_all()


def _llama(layers: int) -> dict[str, tuple[int, ...]]:
    each = {
        "self_attn.q_proj": (_WIDTH, _WIDTH), "self_attn.k_proj": (_GROUPS * _HEAD, _WIDTH),
        "self_attn.v_proj": (_GROUPS * _HEAD, _WIDTH), "self_attn.o_proj": (_WIDTH, _WIDTH),
        "mlp.gate_proj": (_INNER, _WIDTH), "mlp.up_proj": (_INNER, _WIDTH), "mlp.down_proj": (_WIDTH, _INNER),
    }  # fmt: skip
    return {f"model.layers.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in each.items()}


def _fused(layers: int) -> dict[str, tuple[int, ...]]:
    each = {
        "self_attention.linear_qkv": (_WIDTH + 2 * _GROUPS * _HEAD, _WIDTH), "self_attention.linear_proj": (_WIDTH, _WIDTH),
        "mlp.linear_fc1": (2 * _INNER, _WIDTH), "mlp.linear_fc2": (_WIDTH, _INNER),
    }  # fmt: skip
    return {f"decoder.layers.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in each.items()}


def _gpt2(layers: int, *, own: bool) -> dict[str, tuple[int, ...]]:
    layers = max(layers * _LAYER // (8 * _WIDTH * _WIDTH), 1)  # as many bytes
    if own:
        each, prefix = {"mlp.c_fc": (_WIDTH, 4 * _WIDTH), "mlp.c_proj": (4 * _WIDTH, _WIDTH)}, "h"
    else:
        each, prefix = (
            {"mlp.linear_fc1": (4 * _WIDTH, _WIDTH), "mlp.linear_fc2": (_WIDTH, 4 * _WIDTH)},
            "decoder.layers",
        )
    return {f"{prefix}.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in each.items()}


def _write_llama(plain: Path, quantised: Path, layers: int) -> None:
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in _llama(layers).items()}
    _write(plain, tensors, _CONFIG)
    in_blocks = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    scales = {f"{name}_scale_inv": torch.rand([-(-n // 128) for n in t.shape]) for name, t in tensors.items()}
    _write(quantised, in_blocks | scales, _CONFIG)


def _write_gpt2(folder: Path, layers: int) -> None:
    config = {"model_type": "gpt2", "n_head": _GROUPS, "n_embd": _WIDTH}
    _write(folder, {name: torch.randn(shape).bfloat16() for name, shape in _gpt2(layers, own=True).items()}, config)


def _write(folder: Path, tensors: Tensors, config: dict[str, object]) -> None:
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def _sharded(bench: Bench, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Return empty tensors, cut by rows over the ranks."""
    whole = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    if bench.world.size == 1:
        return whole
    mesh = init_device_mesh("cpu", (bench.world.size,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}


def _load(path: Path, target: Tensors, layout: str | None) -> Callable[[], dict[str, float]]:
    share = sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 1

    def run() -> dict[str, float]:
        result: dict[str, float] = {}
        before = read_bytes()
        with peak_memory(result):
            bytecheckpoint.load(path, {"model": target}, layout=layout)
        return result | {"read": (read_bytes() - before) / share}

    return run


def _by_torch(file: Path, target: Tensors, layers: int) -> dict[str, float]:
    """Fuse whole tensors as Megatron-Bridge does (merge_qkv_weights, GatedMLPMapping); each rank keeps its rows."""
    result: dict[str, float] = {}
    with peak_memory(result), safe_open(file, "pt") as opened, torch.no_grad():
        for layer in range(layers):

            def of(name: str, layer: int = layer) -> torch.Tensor:
                found: torch.Tensor = opened.get_tensor(f"model.layers.{layer}.{name}_proj.weight")
                return found

            heads = [of(f"self_attn.{name}").view(_GROUPS, -1, _HEAD, _WIDTH) for name in "qkv"]
            made = {
                "self_attention.linear_qkv": torch.cat(heads, 1).reshape(-1, _WIDTH),
                "self_attention.linear_proj": of("self_attn.o"),
                "mlp.linear_fc1": torch.cat([of("mlp.gate"), of("mlp.up")]),
                "mlp.linear_fc2": of("mlp.down"),
            }
            for name, whole in made.items():
                own = target[f"decoder.layers.{layer}.{name}.weight"]
                if isinstance(own, DTensor):
                    rank = own.device_mesh.get_local_rank()
                    rows = -(-own.shape[0] // own.device_mesh.size())
                    own, whole = own.to_local(), whole[rank * rows : (rank + 1) * rows]
                own.copy_(whole)
    return result
