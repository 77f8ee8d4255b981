"""The staging pool: how much memory it may take, and what it does without."""

from __future__ import annotations

import pytest
import torch

from bytecheckpoint.engine import pool as pool_module
from bytecheckpoint.engine.pool import StagingPool, available_memory
from bytecheckpoint.errors import CheckpointError

_NAMES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "many", "SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_ranks_of_a_machine_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], ranks: int
) -> None:
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    whole = available_memory()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert available_memory() == pytest.approx(whole / ranks, rel=0.2)


@pytest.mark.parametrize("shared", [True, False])
def test_a_pool_that_could_not_grow_can_be_reserved_again(shared: bool) -> None:
    pool = StagingPool(shared=shared)
    pool.reserve(8192, touch=True)
    with pytest.raises(CheckpointError, match="cannot reserve"):
        pool.reserve(1 << 60, touch=False)
    pool.reserve(4096, touch=True)
    assert pool.tensor().numel() == len(pool.view()) == pool.capacity == 4096
    pool.release()


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
