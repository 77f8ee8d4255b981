"""The first asynchronous save of a process that prepared nothing: quick, and nothing of it stays."""

from __future__ import annotations

import gc
import subprocess
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
from tests.support.processes import environment, python


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


_PROGRAM = """
import sys
import torch, torch.distributed.tensor
import bytecheckpoint

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) << 10

state = {str(i): torch.ones(1 << 20) for i in range(32)}
bytecheckpoint.save(sys.argv[1] + "/warm", {"model": {"a": torch.ones(2)}})
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
handle = bytecheckpoint.save(sys.argv[1] + "/first", {"model": state}, async_checkpoint=True)
handle.result(60)
bytecheckpoint.save(sys.argv[1] + "/second", {"model": state}, async_checkpoint=True).result(60)
print((status("VmHWM") - before) / (32 << 22))
"""


@pytest.mark.skipif(
    torch.accelerator.is_available(), reason="pages are locked there, so the shared pool is used at once"
)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory cannot be reset here")
def test_it_takes_the_memory_of_the_state_once(tmp_path: Path) -> None:
    done = subprocess.run(
        python("-c", _PROGRAM, tmp_path), env=environment(), capture_output=True, text=True, timeout=200, check=True
    )
    assert float(done.stdout) < 1.25, "the private pool and the shared one are touched at the same time"
