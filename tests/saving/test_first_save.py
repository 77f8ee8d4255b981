"""The first asynchronous save of a process that prepared nothing: quick, and nothing of it stays."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import SingleProcess, use
from bytecheckpoint.engine import staging_pools
from bytecheckpoint.engine.pool import StagingPool
from bytecheckpoint.world import world_of
from tests.support.layouts import coded


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    class Recorded(StagingPool):
        def __init__(self, *, shared: bool = True) -> None:
            super().__init__(shared=shared)
            made.append(weakref.ref(self) if not shared else self)

    monkeypatch.setattr(staging_pools, "StagingPool", Recorded)
    return made


@pytest.mark.skipif(torch.accelerator.is_available(), reason="pages are locked there, which touches them in any case")
@pytest.mark.parametrize("fails", [False, True], ids=["committed", "failed"])
def test_the_quick_pool_is_used_once(tmp_path: Path, pools: list[Any], fails: bool) -> None:
    collective = SingleProcess()
    state = {"w": coded((700, 1024), torch.float32), "small": torch.arange(5)}
    with use(collective):
        path = tmp_path / "file" if fails else tmp_path / "first"
        if fails:
            path.write_text("in the way")
        handle = bytecheckpoint.save(path, {"model": state}, async_checkpoint=True)
        if fails:
            with pytest.raises(bytecheckpoint.CheckpointError):
                handle.result(60)
        else:
            handle.result(60)
        world = world_of(collective)
        world.saves.drain()
        quick = [p for p in pools if isinstance(p, weakref.ref)]
        assert len(quick) == 1
        del handle
        gc.collect()
        assert (left := quick[0]()) is None or not left.capacity, "the memory of the first save is still held"
        assert world.resources.pools.shared.capacity >= 700 * 1024 * 4, "the next save would have to touch its pages"
        state["w"] += 1
        bytecheckpoint.save(tmp_path / "second", {"model": state}, async_checkpoint=True).result(60)
        assert len([p for p in pools if isinstance(p, weakref.ref)]) == 1
        destination = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        bytecheckpoint.load(tmp_path / "second", {"model": destination})
        assert all(torch.equal(destination[name], state[name]) for name in state)
        world.close()
