"""FSDP1 worlds in one process: one rank after the other, over a process group that does not communicate.

Construction, captures and loads need no communication, so every rank's shards are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from bytecheckpoint.frameworks.base import Destination
from bytecheckpoint.frameworks.fsdp1.adapter import FSDP1Framework
from tests.frameworks.memory import MemoryCheckpoint, detached
from tests.support import comparisons

Build = Callable[[], MutableMapping[str, Any]]
CPU = torch.device("cpu")


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Make the process group of one rank; it does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def unit(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    """Wrap `module` as an FSDP1 unit on the CPU."""
    return FullyShardedDataParallel(module, **({"device_id": CPU} | options))


def save(build: Build, size: int) -> MemoryCheckpoint:
    """Save the states that `build` makes on each rank of a world of `size`."""
    ranks = []
    for rank in range(size):
        with as_rank(rank, size):
            ranks.append(detached(FSDP1Framework().capture(build())))
    return MemoryCheckpoint(ranks)


def load(build: Build, size: int, saved: MemoryCheckpoint, **options: Any) -> MemoryCheckpoint:
    """Load on every rank of a world of `size`, and save again."""
    ranks = []
    for rank in range(size):
        with as_rank(rank, size):
            states = build()
            fill(states, saved, rank, **options)
            ranks.append(detached(FSDP1Framework().capture(states)))
    return MemoryCheckpoint(ranks)


def fill(states: MutableMapping[str, Any], saved: MemoryCheckpoint, rank: int = 0, **options: Any) -> Destination:
    """Load on one rank."""
    saved.rank = rank
    return saved.load(states, FSDP1Framework(), **options)


def differences(want: MemoryCheckpoint, got: MemoryCheckpoint) -> list[str]:
    """Return the differences of the tensors of two checkpoints."""
    return comparisons.differences(want.whole, got.whole)
