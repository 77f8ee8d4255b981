"""The staging pool: it grows, it shrinks, and it does without memory that it cannot have."""

from __future__ import annotations

import os

import pytest
import torch

from bytecheckpoint.engine import pool as pool_module
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.errors import CheckpointError


@pytest.mark.parametrize("shared", [True, False])
def test_a_pool_that_could_not_grow_can_be_reserved_again(shared: bool) -> None:
    pool = StagingPool(shared=shared)
    pool.reserve(8192, touch=True)
    with pytest.raises(CheckpointError, match="cannot reserve"):
        pool.reserve(1 << 60, touch=False)
    pool.reserve(4096, touch=True)
    assert pool.tensor().numel() == len(pool.view()) == pool.capacity == 4096
    pool.release()


def test_a_pool_shrinks_in_place_and_grows_again() -> None:
    pool = StagingPool()
    pool.reserve(8 << 20, touch=True)
    pool.tensor()[:] = 7
    pool.shrink((1 << 20) - 5)
    assert pool.capacity == pool.tensor().numel() == 1 << 20
    assert os.fstat(pool.fd).st_blocks * 512 == 1 << 20, "the memory was not given back"
    assert bool((pool.tensor() == 7).all())
    pool.shrink(2 << 20)
    assert pool.capacity == 1 << 20
    generation = pool.generation
    pool.reserve(2 << 20, touch=True)
    assert pool.capacity == 2 << 20
    assert pool.generation > generation, "the helper process would keep the old mapping"
    pool.release()


def test_a_private_pool_shrinks_in_place() -> None:
    """Where a sandbox denies shared memory, the pool that saves share is private too."""
    pool = StagingPool(shared=False)
    pool.reserve(1 << 20, touch=False)
    view = pool.tensor()
    view.fill_(7)
    pool.shrink(4096)
    assert pool.capacity == 4096 and pool.tensor().tolist() == [7] * 4096
    assert not view[4096:].any(), "the rest is freed"


def test_pages_are_locked_once_for_each_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a save of device tensors, also in a pool that grew before. A failure is not tried again before the pool grows."""
    calls: list[tuple[str, int]] = []
    answers = [True, False]

    def lock(address: int, nbytes: int, device: torch.device) -> bool:
        calls.append(("lock", nbytes))
        return answers.pop(0)

    monkeypatch.setattr(pool_module, "lock_pages", lock)
    monkeypatch.setattr(pool_module, "unlock_pages", lambda address, device: calls.append(("unlock", 0)))
    pool, device = StagingPool(), torch.device("cuda", 1)
    pool.reserve(4096, touch=True)
    assert not calls
    for nbytes in (4096, 4096, 8192, 8192):
        pool.reserve(nbytes, touch=True, device=device)
    pool.release()
    assert calls == [("lock", 4096), ("unlock", 0), ("lock", 8192)]
