"""Real DTensors, FSDP2, tensor and pipeline parallelism in one world of 6 gloo processes."""

from __future__ import annotations

import pytest

from tests.frameworks.world_cases import CASES, WORLD, run
from tests.support.worlds import Worlds


@pytest.mark.parametrize("name", CASES)
def test_in_a_real_world(worlds: Worlds, name: str) -> None:
    worlds.run(WORLD, run, name)
