"""How much memory the staging pool may take."""

from __future__ import annotations

import pytest

from bytecheckpoint.engine.pool import available_memory

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
