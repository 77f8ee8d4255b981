"""A small GPT over bytes, and the three parallel layouts of the demo."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

LAYOUTS = ("plain", "fsdp2", "tp2_fsdp2")


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    context: int  # bytes of text that one sample spans


SIZES = {
    "10M": Size(layers=6, width=384, heads=6, context=64),
    "1M": Size(layers=4, width=128, heads=4, context=64),
}


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.q = nn.Linear(size.width, size.width, bias=False)
        self.k = nn.Linear(size.width, size.width, bias=False)
        self.v = nn.Linear(size.width, size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # -1: under tensor parallelism this rank has only some of the heads.
        q, k, v = (f(x).view(batch, length, -1, self.head_width).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next byte: `forward` takes int64 [batch, length] inputs and targets, and returns the mean loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # The last matrix of a residual branch starts smaller, so that depth does not enlarge the sum (GPT-2).
                ends_branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * size.layers) ** 0.5 if ends_branch else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotate(x: Tensor) -> Tensor:
    """Apply rotary position embedding to [batch, heads, length, width]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


def parallelize(model: GPT, layout: str, world_size: int) -> DeviceMesh:
    """Distribute `model` over all ranks, in place.

    Args:
        model: the same on every rank.
        layout: "plain" (one rank, every parameter whole), "fsdp2" (parameters sharded over all ranks), or "tp2_fsdp2"
            (pairs of ranks share each layer's work, tensor parallel; their shards are sharded again over the pairs).
        world_size: number of ranks.

    Returns:
        The ranks in a data-parallel dimension "dp" and a tensor-parallel one "tp".
    """
    assert layout != "plain" or world_size == 1, "the plain layout is for one rank"
    tp_size = 2 if layout == "tp2_fsdp2" else 1
    mesh = init_device_mesh("cpu", (world_size // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
    if tp_size > 1:
        tensor_parallel(model, mesh["tp"])
    if layout != "plain":
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return mesh


def tensor_parallel(model: GPT, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism with sequence-parallel norms: between blocks each rank holds a part of the positions."""
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    inner = {
        "norm1": SequenceParallel(),
        "attention": gather,
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "feed_forward": gather,
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, outer)
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
