"""The progress of an engine, saves within gradient accumulation, and rare configurations of ZeRO."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.deepspeed import progress_jobs as jobs
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["z1x3", "b2x2", "b3x2"])
def test_within_an_accumulation_nothing_is_saved_or_loaded(worlds: Worlds, name: str, tmp_path: Path) -> None:
    size = int(name[-1])
    assert worlds.run(size, jobs.accumulation, name, str(tmp_path)) == [[]] * size


@pytest.mark.parametrize("name", ["z0x2", "z2x2", "z3x2"])
def test_the_scaler_of_torch_autocast(worlds: Worlds, name: str, tmp_path: Path) -> None:
    for saved, loaded, after, resumed in worlds.run(2, jobs.autocast, name, str(tmp_path)):
        assert saved["scale"] == 512 and saved["_growth_tracker"] == 7
        assert loaded == saved
        assert resumed == after
    worlds.close()  # DeepSpeed leaves autocast switched on in its processes


def test_random_layer_token_dropping_and_curricula(worlds: Worlds, tmp_path: Path) -> None:
    for found in worlds.run(2, jobs.data_efficiency, str(tmp_path)):
        for saved, loaded in found:
            assert saved == loaded


def test_partial_offload(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, jobs.partial_offload, str(tmp_path)) == [[], []]


def test_secondary_partitions(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(4, jobs.hierarchical, str(tmp_path)) == [[]] * 4
