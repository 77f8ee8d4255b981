"""Real DTensors, FSDP2, tensor and pipeline parallelism in one world of 6 gloo processes, started once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.multiprocessing as mp

from tests.frameworks.world_cases import CASES, WORLD, run


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    mp.spawn(run, (str(folder),), nprocs=WORLD)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_in_a_real_world(world: Path, name: str) -> None:
    for rank in range(WORLD):
        report, error = world / f"rank{rank}.txt", world / f"rank{rank}.error"
        done = report.read_text().split() if report.exists() else []
        assert name in done, f"rank {rank}:\n{error.read_text() if error.exists() else 'no report'}"
