"""How much memory the staging pool may take, and when it gives memory back."""

from __future__ import annotations

import logging

import pytest

from bytecheckpoint.engine.memory import FreeMemory
from bytecheckpoint.engine.staging_pools import StagingPools
from bytecheckpoint.settings import Settings

_NAMES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
_CHUNK = 1 << 20


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)


def _pools() -> StagingPools:
    return StagingPools(lambda: FreeMemory(96 << 20, "/sys/fs/cgroup/job"))


def _reserved(pools: StagingPools) -> int:
    """Return how large the pool gets for an image that is larger than the machine."""
    pools.prewarm(1 << 40, Settings().with_changes(chunk_bytes=_CHUNK))
    capacity = pools.shared.capacity
    pools.clear()
    return capacity >> 20


@pytest.mark.parametrize(
    ("variables", "local_ranks", "ranks"),
    [
        ({}, 0, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 0, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 0, 4),
        ({"SLURM_NTASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "8"}, 0, 8),
        ({"LOCAL_WORLD_SIZE": "many", "SLURM_NTASKS_PER_NODE": "2"}, 0, 2),
        ({"LOCAL_WORLD_SIZE": "0"}, 0, 1),
        ({}, 3, 3),
        ({"LOCAL_WORLD_SIZE": "2"}, 3, 3),
        ({"LOCAL_WORLD_SIZE": "8"}, 3, 8),
    ],
)
def test_ranks_of_a_machine_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], local_ranks: int, ranks: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    pools = _pools()
    pools.local_ranks = local_ranks
    assert _reserved(pools) == 48 // ranks


def test_a_pool_shrinks_after_several_saves_that_need_much_less() -> None:
    pools = _pools()
    pools.prewarm(16 << 20, Settings())
    pools.note_need(16 << 20)
    for _ in range(7):
        pools.note_need(2 << 20)
        pools.resize()
    assert pools.shared.capacity == 16 << 20, "one of the last saves needed all of it"
    pools.note_need(3 << 20)
    pools.resize()
    assert pools.shared.capacity == 3 << 20
    pools.clear()


def test_a_pool_that_saves_nearly_fill_stays() -> None:
    pools = _pools()
    pools.prewarm(16 << 20, Settings())
    for _ in range(20):
        pools.note_need(9 << 20)
        pools.resize()
    assert pools.shared.capacity == 16 << 20
    pools.clear()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Settings(), "96 MiB of /sys/fs/cgroup/job shared by 1 rank; set staging_bytes"),
        (Settings().with_changes(staging_bytes=32 << 20), "setting staging_bytes is 33554432; raise it"),
    ],
)
def test_a_small_pool_is_explained_once(caplog: pytest.LogCaptureFixture, settings: Settings, reason: str) -> None:
    pools = _pools()
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        for _ in range(2):
            assert pools.acquire_whole(500 << 20, settings, None) is None
            pools.acquire(500 << 20, settings, None)
        pools.clear()
    (record,) = caplog.records
    assert "500.0 MiB" in record.getMessage()
    assert reason in record.getMessage()
