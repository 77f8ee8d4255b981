"""Worlds of real processes over gloo on HDFS and S3: save, replace, load at other layouts, continue with equal losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytecheckpoint.representation.names import generation_of
from bytecheckpoint.storage import resolve
from tests.storage.world_jobs import check_members, run
from tests.support.interchange.families import FAMILIES
from tests.support.worlds import Worlds

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

MEMBERS = ("one", "ddp2", "fsdp3", "tp2-fsdp2")
#: An object store and HDFS; all kinds of storage with the slow tests.
ROOTS = ["s3", "hdfs", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("az", "mem", "minio"))]


@pytest.mark.parametrize("root", ROOTS, indirect=True)
def test_every_layout_loads_every_layout(worlds: Worlds, root: str, tmp_path: Path) -> None:
    """Whole states are right, and the losses that follow are equal."""
    check_members(worlds, root, tmp_path, FAMILIES["torch"], MEMBERS)


def test_a_step_that_is_replaced_again_and_again(worlds: Worlds, root: str) -> None:
    """Only the files of the last save remain, and another layout continues from it."""
    path = f"{root}/step"
    expected = run(worlds, 3, "storage.world_jobs", "replace", "fsdp3", path, 4)[0]
    names = [name for name, _ in resolve(path).list()]
    generations = {generation_of(name) for name in names if name != "metadata.parquet"}
    assert len(generations) == 1 and None not in generations, names
    for losses in run(worlds, 2, "storage.world_jobs", "resume", "tp2", path):
        assert losses == pytest.approx(expected, abs=1e-9, rel=0)
