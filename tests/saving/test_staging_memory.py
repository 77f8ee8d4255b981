"""The memory that saves keep: no more than there is, explained where it is too little, given back when it is not needed."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, SingleProcess, use
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.world import world_of
from tests.support.cgroups import limited_cgroup
from tests.support.processes import run_program, running, wait_until
from tests.support.settings import using

_SAVE_WITH_LITTLE_MEMORY = """
import logging, os, sys
import torch, bytecheckpoint
logging.basicConfig(format="%(message)s")
state = {"w": torch.arange(48 << 20, dtype=torch.int32)}  # 192 MiB
bytecheckpoint.save(sys.argv[1], {"model": {"w": torch.zeros(1)}})
open(sys.argv[2], "w").write(str(os.getpid()))
for _ in range(2):
    bytecheckpoint.save(sys.argv[1], {"model": state}, async_checkpoint=True).result(120)
assert torch.equal(bytecheckpoint.open(sys.argv[1])["model/w"][-1000:], state["w"][-1000:])
"""


def test_a_save_survives_in_a_cgroup_with_little_memory(tmp_path: Path) -> None:
    with limited_cgroup(160 << 20) as processes:
        done = run_program(_SAVE_WITH_LITTLE_MEMORY, tmp_path, processes, fresh=True)
    assert done.returncode == 0, (
        f"exit code {done.returncode}; -9 is the kernel's, which ran out of memory\n{done.stderr}"
    )
    assert done.stderr.count("passes through a staging pool") == 1
    assert str(processes.parent) in done.stderr


_SAVE_BESIDE_PAGE_CACHE = """
import os, sys
import torch, bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.world import world_of
state = {"w": torch.zeros(12 << 20)}  # 48 MiB
open(sys.argv[2], "w").write(str(os.getpid()))
with open(f"{sys.argv[1]}/data", "wb") as file:
    for _ in range(300):
        file.write(bytes(1 << 20))
    os.fsync(file.fileno())
for _ in range(2):
    bytecheckpoint.save(f"{sys.argv[1]}/step", {"model": state}, async_checkpoint=True).result(120)
world = world_of(current())
assert world.resources.pools.shared.capacity >= 48 << 20, world.resources.pools.shared.capacity
"""


def test_page_cache_does_not_make_the_pool_small(tmp_path: Path) -> None:
    with limited_cgroup(320 << 20) as processes:
        done = run_program(_SAVE_BESIDE_PAGE_CACHE, tmp_path, processes, fresh=True)
    assert done.returncode == 0, done.stderr
    assert "staging pool" not in done.stderr


def test_a_save_through_a_small_pool_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.zeros(1 << 20)}
    collective = SingleProcess()
    with use(collective), using(staging_bytes=2 << 20, chunk_bytes=1 << 20), caplog.at_level(logging.WARNING):
        for step in range(3):
            bytecheckpoint.save(tmp_path / str(step), {"model": state}, async_checkpoint=True).result(60)
        world_of(collective).close()
    assert [r.getMessage() for r in caplog.records if "staging pool" in r.getMessage()] == [
        "an asynchronous save of 4.0 MiB passes through a staging pool of 2.0 MiB, so its caller waits while most of it is "
        "written. The pool is that small because setting staging_bytes is 2097152; raise it"
    ]


def mapped_pools() -> int:
    """The number of pools that this process maps."""
    gc.collect()
    return Path(f"/proc/{os.getpid()}/maps").read_text().count("bytecheckpoint-staging")


@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_release_memory_waits_for_saves_and_frees_what_they_used(tmp_path: Path, staging: str) -> None:
    collective = SingleProcess()
    state = {"w": torch.arange(1 << 20), "small": torch.ones(3)}
    before = mapped_pools()  # errors that other tests keep hold worlds
    with use(collective):
        for step in range(2):
            handle = bytecheckpoint.save(tmp_path / str(step), {"model": state}, async_checkpoint=True, staging=staging)
        resources = world_of(collective).resources
        bytecheckpoint.release_memory()
        assert handle.committed.done()
        helper = resources.running_helper
        assert helper is not None
        assert wait_until(lambda: not running(helper.pid), 10)
        assert resources.pools.shared.capacity == 0
        assert mapped_pools() <= before, "something keeps the memory of the pool"
        bytecheckpoint.release_memory()
        state["w"] += 1
        for step in range(2, 4):
            bytecheckpoint.save(tmp_path / str(step), {"model": state}, async_checkpoint=True).result(60)
        destination = {"w": torch.zeros(1 << 20, dtype=torch.int64), "small": torch.zeros(3)}
        bytecheckpoint.load(tmp_path / "3", {"model": destination})
        assert all(torch.equal(destination[name], state[name]) for name in state)
        world_of(collective).close()


def test_the_pool_shrinks_when_saves_need_much_less(tmp_path: Path) -> None:
    collective = SingleProcess()
    large, small = {"w": torch.arange(1 << 20)}, {"w": torch.arange(1 << 17)}
    with use(collective):
        pool = world_of(collective).resources.pools.shared

        def save(state: dict[str, torch.Tensor]) -> None:
            bytecheckpoint.save(tmp_path / "step", {"model": state}, async_checkpoint=True).result(60)
            world_of(collective).saves.drain()
            destination = {"w": torch.zeros_like(state["w"])}
            bytecheckpoint.load(tmp_path / "step", {"model": destination})
            assert torch.equal(destination["w"], state["w"])

        for _ in range(2):
            save(large)
        whole = pool.capacity
        assert whole > 8 << 20
        for _ in range(9):
            save(small)
        assert 1 << 20 < pool.capacity < 2 << 20
        for _ in range(3):
            save(large)
        assert pool.capacity == whole
        world_of(collective).close()


def test_ranks_learn_how_many_share_their_machine(tmp_path: Path) -> None:
    def save(collective: Collective) -> list[int]:
        collective.host = "ab"[collective.rank == 1]
        seen = []
        for extra in (1, 1, 2):  # a plan, the cached one, and one that the last rank alone asks for
            size = extra if collective.rank == 3 else 1
            state = {f"w{collective.rank}": torch.zeros(size)}
            bytecheckpoint.save(tmp_path / "step", {"model": state}).result(60)
            seen.append(world_of(collective).resources.pools.local_ranks)
        return seen

    world = ThreadWorld(4)
    assert world.run(save) == [[3] * 3, [1] * 3, [3] * 3, [3] * 3]
