"""Random numbers of ranks that are threads: torch has one generator for all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]

_turn = threading.Lock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let the block draw the same random numbers on every rank: they take turns."""
    with _turn:
        torch.manual_seed(seed)
        yield
