"""The jobs of the table of planning, small: they save and load at both layouts, and loads read parts of catalogs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import planning_table
from bytecheckpoint.tuning import tuned
from tests.support.variants import quick


@pytest.mark.parametrize(("job", "ranks"), quick([("c", 24), ("b", 64), ("d", 512)], every=3))
def test_a_small_job(job: str, ranks: int, tmp_path: Path) -> None:
    with tuned(catalog_group_bytes=20_000):
        saved = planning_table.save(job, ranks, tmp_path)
        loaded = planning_table.load(job, ranks, tmp_path)  # which asserts that nothing is missing
    assert loaded["groups"] > 4
    assert 0 < loaded["rows read"] < saved["rows"] / 2


def test_fragments_come_back() -> None:
    for table in (False, True):
        assert "whole save" in planning_table.fragments(100, table=table)  # which compares what comes back


def test_the_fit_finds_the_power(tmp_path: Path) -> None:
    ranks = np.array([10.0, 100.0, 1000.0])
    points = np.stack([ranks, 3 * ranks**2, 5 * ranks**0.5], axis=1)
    assert planning_table.fitted("c", points, "") == "c: a save costs ranks ** 2.00, a load ranks ** 0.50 on each rank"
