"""The job of the ranks of test_kill.py: they save to one path again and again until a rank is killed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.storage import resolve
from bytecheckpoint.world import world_of
from tests.support.coded import files_of, states
from tests.support.modes import MODES

ROWS = 3000
#: Seconds that a rank waits for the others in one step; generous, because test machines are busy.
TIMEOUT = 8.0


def report_of(folder: Path, rank: int) -> dict[str, Any]:
    """Return the last report of a rank."""
    try:
        facts: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    except FileNotFoundError:
        return {"committed": 0}
    return facts


def save_until_failure(folder: Path, path: Path, first: int, mode: str, writer: str) -> None:
    """Save steps to one path until a save fails; keep a report in `folder`, which outlives a killed rank."""
    rank, world, step = dist.get_rank(), dist.get_world_size(), first
    bytecheckpoint.configure(timeout=TIMEOUT, writer=writer)
    facts: dict[str, Any] = {"committed": 0}

    def report(**news: Any) -> None:
        facts.update(news)
        (folder / f"{rank}.tmp").write_text(json.dumps(facts))
        os.replace(folder / f"{rank}.tmp", folder / f"{rank}.json")

    try:
        while True:
            bytecheckpoint.save(path, states(rank, world, step, ROWS), **MODES[mode]).result(30)
            if step == first:
                helper = world_of(current()).resources.running_helper
                if rank == 0:
                    catalog, _ = read_catalog(resolve(path))
                    named = {f.name for f in catalog.files} | {"metadata.parquet"}
                    report(leftovers=[name for name in files_of(path) if name not in named])
                dist.barrier()
                report(helper=helper.pid if helper else 0)
            report(committed=step)
            step += 1
    except bytecheckpoint.CheckpointError as error:
        report(error=type(error).__name__, message=str(error), when=time.monotonic())
    except RuntimeError as error:  # of torch's barrier
        report(error="gloo", message=str(error)[:100], when=time.monotonic())
