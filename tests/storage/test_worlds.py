"""Worlds of real processes over gloo on HDFS and S3: save, replace, load at other layouts, go on with equal losses."""

from __future__ import annotations

from typing import Any

import pytest

from bytecheckpoint.representation.names import generation_of
from bytecheckpoint.storage import resolve
from tests.storage import world_jobs
from tests.support.torch_layouts import WORLD_SIZE
from tests.support.worlds import Worlds

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

SAVED = ("ddp2", "fsdp3", "tp2-fsdp2")
LOADED = ("one", "fsdp2", "tp2-fsdp2")


def run(worlds: Worlds, layout: str, module: str, name: str, *args: Any) -> list[Any]:
    return world_jobs.run(worlds, WORLD_SIZE[layout], module, name, *args)


def test_every_layout_loads_every_layout(worlds: Worlds, root: str) -> None:
    """As in tests/distributed/test_matrix.py, by coordinates and by the losses that follow."""
    saved = {name: run(worlds, name, "distributed.matrix_jobs", "save_all", name, root) for name in SAVED}
    reference = saved["ddp2"][0]["after"]
    for layout in LOADED:
        ranks = run(worlds, layout, "distributed.matrix_jobs", "load_all", layout, SAVED, root)
        for source in SAVED:
            for rank, result in enumerate(ranks):
                assert not result[source]["problems"], (
                    f"{source} to {layout}, rank {rank}: {result[source]['problems'][:3]}"
                )
                assert result[source]["losses"] == pytest.approx(reference, abs=1e-9, rel=0)


def test_a_step_that_is_replaced_again_and_again(worlds: Worlds, root: str) -> None:
    """Only the files of the last save remain, and another layout goes on from it."""
    path = f"{root}/step"
    expected = run(worlds, "fsdp3", "storage.world_jobs", "replace", "fsdp3", path, 4)[0]
    names = [name for name, _ in resolve(path).list()]
    generations = {generation_of(name) for name in names if name != "metadata.parquet"}
    assert len(generations) == 1 and None not in generations, names
    for losses in run(worlds, "tp2", "storage.world_jobs", "resume", "tp2", path):
        assert losses == pytest.approx(expected, abs=1e-9, rel=0)
