"""Ranks that may start few threads or open few files: they work with those, or say at once which limit to raise."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint import CheckpointError
from tests.support.memory import as_on_disk
from tests.support.variants import crossed, quick
from tests.support.worlds import Worlds, on_ranks


@contextlib.contextmanager
def threads_left(count: int) -> Iterator[None]:
    """Let this process start `count` threads, as the limit of a cgroup does."""
    starts = iter(range(count))
    # Python 3.13 has renamed it.
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    start = getattr(threading, name)

    def limited(*arguments: Any, **options: Any) -> Any:
        if next(starts, None) is None:
            raise RuntimeError("can't start new thread")
        return start(*arguments, **options)

    with mock.patch.object(threading, name, limited):
        yield


@on_ranks(2)
@pytest.mark.parametrize(("call", "odd"), crossed(["first call", "save", "load"], [0, 1]))
def test_a_limit_on_threads(call: str, odd: int, tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(3 << 18), f"of rank {dist.get_rank()}": torch.ones(9)}}
    for left in range(2):
        here: Any = {"process_group": dist.new_group(timeout=timedelta(seconds=90))}
        if call != "first call":
            bytecheckpoint.save(tmp_path / "a", state, **here)
        begun, failure = time.monotonic(), ""
        with threads_left(left) if dist.get_rank() == odd else contextlib.nullcontext():
            try:
                if call == "load":
                    bytecheckpoint.load(tmp_path / "a", state, **here)
                else:
                    bytecheckpoint.save(tmp_path / "b", state, async_checkpoint=True, **here).result(60)
            except CheckpointError as error:
                failure = str(error)
        assert time.monotonic() - begun < 50, "nobody waits until the time limit"
        assert not failure or ("raise the limit on processes" in failure and "address space" in failure)
        dist.barrier()
        bytecheckpoint.save(tmp_path / "c", state, async_checkpoint=True, **here).result(60)
        bytecheckpoint.load(tmp_path / "c", state, **here)


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
