"""Partitions that begin in the middle of parameters, ranks with only padding, several optimizers, at 1 to 5 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.deepspeed import uneven_partition_jobs as jobs
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)


def test_every_stage_at_any_size(worlds: Worlds, tmp_path: Path) -> None:
    """Each world loads what plain runs, and engines of other sizes and stages, have saved."""
    folder, every, few = str(tmp_path), list(jobs.OPTIMIZERS), ["adamw", "lion"]
    reference = worlds.run(1, jobs.save_plain, folder)[0]
    saved = []
    for size, kinds, stages, sources in (
        (2, every, (1, 2, 3), ["plain"]),
        (5, few, (2, 3), ["1x2", "3x2"]),
        (3, few, (2, 3), ["2x5", "3x5"]),
        (1, few, (2, 3), ["2x3", "3x3"]),
        (4, few, (2, 3), ["2x1", "3x1"]),
    ):
        found = worlds.run(size, jobs.save_and_load_stages, folder, kinds, stages, sources, reference, timeout=200)
        for rank, problems in enumerate(found):
            assert problems == [], f"rank {rank} of {size}"
        saved += [f"{kind}-{stage}x{size}" for kind in kinds for stage in stages]
    assert worlds.run(1, jobs.load_plain, folder, saved, reference) == [[]]
