"""The states that every peer saves and loads: flat dicts of tensors."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["dense", "fresh", "same", "sharded", "size_of", "small"]

Tensors = dict[str, torch.Tensor]


def _shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of float32 tensors like a decoder's, at most `nbytes` in total."""
    hidden = 2048 if nbytes >= 512 << 20 else 512 if nbytes >= 16 << 20 else 64
    shapes: dict[str, tuple[int, ...]] = {}
    remaining, layer = nbytes // 4, 0
    while True:
        block = {
            f"layers.{layer}.attention.qkv.weight": (3 * hidden, hidden),
            f"layers.{layer}.attention.out.weight": (hidden, hidden),
            f"layers.{layer}.mlp.up.weight": (4 * hidden, hidden),
            f"layers.{layer}.mlp.down.weight": (hidden, 4 * hidden),
            f"layers.{layer}.norm1.weight": (hidden,),
            f"layers.{layer}.norm2.weight": (hidden,),
        }
        needed = sum(int(np.prod(s)) for s in block.values())
        if needed > remaining and shapes:
            return shapes
        shapes |= block
        remaining -= needed
        layer += 1


def dense(nbytes: int, seed: int = 0) -> Tensors:
    """Return about `nbytes` of float32 tensors, equal on all ranks that use the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator) for name, shape in _shapes(nbytes).items()}


def small(count: int) -> Tensors:
    """Return `count` float32 tensors of 1 to 4 KiB."""
    sizes = np.random.default_rng(0).integers(256, 1025, count).tolist()
    flat = torch.rand(int(sum(sizes)))
    # Each has its own memory, as parameters do.
    return {f"blocks.{i // 16}.p{i % 16}": part.clone() for i, part in enumerate(flat.split(sizes))}


def sharded(nbytes: int, dim: int = 0) -> Tensors:
    """Return random DTensors of the shapes of `dense`, sharded along `dim` over all ranks (vectors along 0)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    out: Tensors = {}
    for name, shape in _shapes(nbytes).items():
        cut = min(dim, len(shape) - 1)
        local = list(shape)
        local[cut] //= world
        out[name] = DTensor.from_local(torch.rand(local), mesh, [Shard(cut)], run_check=False)
    return out


def fresh(state: Tensors) -> Tensors:
    """Return zero tensors like those of `state`, their pages touched."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def same(first: Tensors, second: Tensors) -> bool:
    """Tell whether this rank's parts are equal."""
    return first.keys() == second.keys() and all(torch.equal(_local(first[k]), _local(second[k])) for k in first)


def size_of(state: Tensors, *, local: bool = False) -> int:
    """Return the bytes of the whole state, or of this rank's part of it."""
    tensors = (_local(t) if local else t for t in state.values())
    return sum(t.numel() * t.element_size() for t in tensors)
