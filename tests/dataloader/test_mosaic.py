"""MosaicML Streaming goes on at any number of ranks and workers, through a checkpoint of real processes.

mosaicml-streaming wants an older numpy than the other tools, so the usual environment lacks it: `make test-mosaic`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from bytecheckpoint.dataloader.mosaic import MosaicLoader
from bytecheckpoint.errors import UsageError
from tests.support.processes import environment, python

if os.environ.get("BYTECHECKPOINT_REQUIRE_MOSAIC"):
    import streaming
else:
    streaming = pytest.importorskip(
        "streaming", reason="NOT TESTED HERE: needs mosaicml-streaming (`make test-mosaic`)"
    )


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """48 samples, which are four batches of 12."""
    with streaming.MDSWriter(out=str(tmp_path / "shards"), columns={"id": "int"}, size_limit=200) as out:
        for number in range(48):
            out.write({"id": number})
    return tmp_path / "shards"


def run(shards: Path, checkpoint: str, ranks: int, steps: int, **options: Any) -> tuple[list[list[int]], str]:
    """Run a job; return the ids of each global batch, sorted, and what the ranks said."""
    meeting = shards.parent / "meeting"
    meeting.unlink(missing_ok=True)
    arguments = {"shards": str(shards), "meeting": str(meeting), "checkpoint": str(shards.parent / checkpoint)}
    text = json.dumps({"finish": False, "workers": 0} | arguments | {"steps": steps} | options)
    common = environment() | {"PYTHONPATH": os.pathsep.join(sys.path), "WORLD_SIZE": str(ranks)}
    jobs = [
        subprocess.Popen(
            python(Path(__file__).parent / "mosaic_program.py", text),
            env=common | {"LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [job.communicate(timeout=110) for job in jobs]
    said = "".join(chain(*outputs))
    if any(job.returncode for job in jobs):
        return [], said
    parts = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    return [sorted(chain(*batch)) for batch in zip(*parts, strict=True)], said


@pytest.mark.timeout(600)
def test_any_number_of_ranks_and_workers_goes_on(shards: Path) -> None:
    reference, said = run(shards, "reference", 1, 12)
    assert len(reference) == 12, said
    assert sorted(chain(*reference[:4])) == [*range(48)] and reference[:4] != reference[4:8]
    fed: list[list[int]] = []
    for ranks, workers, steps, finish in ((2, 1, 3, False), (1, 2, 3, False), (3, 0, 2, True), (2, 0, 4, False)):
        batches, said = run(shards, "c", ranks, steps, workers=workers, finish=finish)
        assert batches, said
        fed += batches
    assert fed == reference


@pytest.mark.timeout(600)
def test_another_order_is_refused(shards: Path) -> None:
    assert run(shards, "c", 1, 2)[0]
    for other, message in (
        ({"global_batch": 6}, "global_batch was 12 and is 6"),
        ({"shuffle_seed": 8}, "shuffle_seed was 7 and is 8"),
        ({"num_canonical_nodes": 4}, "num_canonical_nodes was 2 and is 4"),
    ):
        assert message in run(shards, "c", 1, 2, **other)[1]


def test_other_loaders_are_refused() -> None:
    with pytest.raises(UsageError, match="not a list over a NoneType"):
        MosaicLoader([])
