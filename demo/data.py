"""The training text, and batches of it."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def standard_library_text() -> Tensor:
    """Return the source of the installed Python's standard library: uint8 [bytes], the same on every call."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    sources = [f.read_bytes() for f in files if skipped.isdisjoint(f.relative_to(root).parts)]
    return torch.frombuffer(bytearray(b"".join(sources)), dtype=torch.uint8)


class Batches:
    """An endless stream of batches, whose state is a position in a random order of the samples.

    All ranks share the order, and each data-parallel rank takes its rows of every *global* batch. So the state is the
    same on all ranks, and has the same meaning for any number of them.

    Args:
        text: uint8 [bytes].
        length: bytes per sample.
        batch: samples per step, over all ranks together.
        rank: this data-parallel rank.
        ranks: number of data-parallel ranks; divides `batch`.
        seed: seed of the order.
    """

    def __init__(self, text: Tensor, length: int, batch: int, *, rank: int = 0, ranks: int = 1, seed: int = 0) -> None:
        assert batch % ranks == 0, f"{ranks} data-parallel ranks do not divide a batch of {batch}"
        # One byte more than a sample: the targets are the inputs, shifted by one.
        self.samples = text.unfold(0, length + 1, length)
        self.batch, self.rank, self.ranks = batch, rank, ranks
        self.load_state_dict({"seed": seed, "epoch": 0, "position": 0})

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of this rank: int64 [batch / ranks, length] each."""
        if self.position + self.batch > len(self.order):
            self.load_state_dict({"seed": self.seed, "epoch": self.epoch + 1, "position": 0})
        rows = self.order[self.position : self.position + self.batch].chunk(self.ranks)[self.rank]
        self.position += self.batch
        samples = self.samples[rows].long()
        return samples[:, :-1], samples[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        self.order = torch.randperm(len(self.samples), generator=generator)
