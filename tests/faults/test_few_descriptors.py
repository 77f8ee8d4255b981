"""Ranks that may open few files: enough for what they do, or an error that says how many it takes."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from tests.support.memory import as_on_disk
from tests.support.variants import quick
from tests.support.worlds import Worlds


def save_and_load(path: str, limit: int) -> str:
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 64), limit))  # the soft limit can be raised
    values = torch.arange(3_000_000) + dist.get_rank()
    state = {"model": {f"rank {dist.get_rank()}": values, "all": torch.arange(3_000_000)}}
    loaded = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    try:
        bytecheckpoint.save(path, state, async_checkpoint=True).result()
        bytecheckpoint.load(as_on_disk(path), loaded)
    except bytecheckpoint.UsageError as error:
        return str(error)
    assert all(torch.equal(loaded["model"][name], value) for name, value in state["model"].items())
    return ""


@pytest.mark.parametrize("limit", quick([40, 256], every=2))
def test_few_descriptors(tmp_path: Path, worlds: Worlds, limit: int) -> None:
    world = worlds.fresh(4)
    try:
        for told in world.run(save_and_load, str(tmp_path / "s"), limit):
            assert ("open descriptors" in told and f"hard limit of this process is {limit}" in told) == (limit < 100)
    finally:
        world.close()
