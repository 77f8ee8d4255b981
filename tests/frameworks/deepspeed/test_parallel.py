"""Pipelines and mixtures of experts: any number of stages, any number of ranks that share the experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.deepspeed import parallel_jobs as jobs
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(400)

#: (ranks, stages). The last stage has its own copy of the tied embedding, and partitions it in its own way.
PIPELINES = [(4, 2), (2, 2), (2, 1), (3, 3)]


@pytest.mark.parametrize(("zero", "low"), [(1, True), (1, False), (0, False)])
def test_pipelines(worlds: Worlds, zero: int, low: bool, tmp_path: Path) -> None:
    chosen = PIPELINES if zero else PIPELINES[1:3]
    for ranks, stages in chosen:
        path = f"{tmp_path}/{ranks}x{stages}"
        saved = worlds.run(ranks, jobs.save_pipeline, stages, zero, low, path, timeout=200)
        for other_ranks, other_stages in chosen:
            loaded = worlds.run(other_ranks, jobs.load_pipeline, other_stages, zero, low, path, timeout=200)
            for rank in loaded:
                assert rank["problems"] == []
                tolerance = 0.02 if low else 1e-5
                assert rank["losses"] == pytest.approx(saved[0]["losses"], abs=tolerance, rel=0)
            if (ranks, stages) == (other_ranks, other_stages):
                assert loaded[0]["losses"] == saved[0]["losses"]


@pytest.mark.parametrize(("zero", "low"), [(1, False), (2, True), (2, False), (0, False)])
def test_mixtures_of_experts(worlds: Worlds, zero: int, low: bool, tmp_path: Path) -> None:
    chosen = [(2, 2), (2, 1), (4, 2), (1, 1)]  # (ranks, size of the expert-parallel groups)
    for ranks, sharing in chosen:
        path = f"{tmp_path}/{ranks}x{sharing}"
        saved = worlds.run(ranks, jobs.save_mixture, sharing, zero, low, path, timeout=200)
        experts = {name.split("deepspeed_experts.")[1].partition(".")[0] for name in saved[0]["names"]}
        assert experts == {"0", "1", "2", "3"} and len(saved[0]["names"]) == 32
        for other_ranks, other_sharing in chosen:
            loaded = worlds.run(other_ranks, jobs.load_mixture, other_sharing, zero, low, path, timeout=200)
            for rank in loaded:
                assert rank["problems"] == []
                assert rank["losses"] == pytest.approx(saved[0]["losses"], abs=0.03 if low else 1e-4, rel=0)
            if (ranks, sharing) == (other_ranks, other_sharing):
                assert loaded[0]["losses"] == saved[0]["losses"]
