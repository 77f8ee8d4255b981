"""A small transformer that can be built in every layout: attention, MLP, mixture of experts, odd sizes.

Vocabulary 29 and width 10 divide by neither 3 nor 4, so pieces are uneven or empty in FSDP 3 and 4 and under TP 2 × FSDP 3.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

VOCABULARY, WIDTH, HEADS, HIDDEN, EXPERTS, LENGTH, BLOCKS = 29, 10, 2, 14, 4, 6, 2
SEQUENCES = 12  # per step, in the whole world; divides by 1, 2, 3, 4 and by two microbatches each


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # -1: under tensor parallelism this rank has some of the heads.
        q, k, v = (m(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """The stacked weights of all experts; under expert parallelism a rank has some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        return torch.einsum("bteh,ehd,bte->btd", F.gelu(torch.einsum("btd,edh->bteh", x, up)), down, gates)


class MixtureOfExperts(nn.Module):
    """Softly gated: every token visits every expert, so no order of tokens is left to the layout."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.exchange: Any = None  # set by expert parallelism: dispatches (x, gates) to the experts, combines outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        if self.exchange is None:
            return self.experts(x, gates)
        return self.exchange.combine(self.experts(*self.exchange.dispatch(x, gates)))


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = MixtureOfExperts() if index % 2 else Mlp()
        self.register_buffer("steps_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """The whole model, or one pipeline stage of it, whose parts have the same names.

    Args:
        stage: number of this stage, of `stages`.
        tied: True if embedding and head are one parameter (of which a stage has its own copy).
    """

    def __init__(self, stage: int = 0, stages: int = 1, *, tied: bool = False) -> None:
        super().__init__()
        first, last = stage == 0, stage == stages - 1
        blocks = range(stage * BLOCKS // stages, (stage + 1) * BLOCKS // stages)
        if first:
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.register_buffer("positions", torch.empty(LENGTH, WIDTH))
        self.blocks = nn.ModuleDict({str(i): Block(i) for i in blocks})
        if last:
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.temperature = nn.Parameter(torch.empty(1), requires_grad=False)
            if tied and first:
                self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embed"):
            x = self.embed(x) + self.positions
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) * self.temperature if hasattr(self, "head") else x


def names_of(model: nn.Module, tied: bool) -> Iterable[tuple[str, torch.Tensor]]:
    """Float parameters and buffers by the name that decides their values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            yield "embed.weight" if tied and name == "head.weight" else name, tensor


@torch.no_grad()
def initialise(model: nn.Module, seed: int, *, tied: bool = False) -> None:
    """Random values that depend on seed and name only, never on the layout."""
    for name, tensor in names_of(model, tied):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.3
        if ("norm" in name and name.endswith("weight")) or name == "temperature":
            values = 1 + values / 3
        tensor.copy_(values)


#: Initial parameters of a run that saves, and of a run that loads.
source_values, target_values = partial(initialise, seed=1), partial(initialise, seed=2)


@torch.no_grad()
def fill_by_coordinates(model: nn.Module, *, tied: bool = False) -> None:
    """Give every element a value that says which element of which tensor it is. Exact in float64."""
    for name, tensor in names_of(model, tied):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 10_000 * code(name))
    for i, block in model.blocks.items():  # type: ignore[operator, union-attr]
        block.steps_seen.fill_(1000 + int(i))


def code(name: str) -> int:
    return zlib.crc32(name.encode()) % 9973


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step, for the whole world."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_rows(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train a model of six columns for some steps; return the last loss."""
    for number in range(steps):
        optimizer.zero_grad()
        loss = model(torch.arange(12.0).reshape(2, 6) + number).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def trained(module: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of a module, after a step with random gradients."""
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return optimizer
