"""Metrics of processes that end, are killed, or fork."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.monitoring.background import Background
from tests.support.metrics import collecting, tables, wait_for_operations
from tests.support.processes import wait_until
from tests.support.programs import forked
from tests.support.worlds import Worlds, on_ranks

_PROGRAM = """
import os, signal, sys, torch, bytecheckpoint
bytecheckpoint.configure(metrics="files")
states = {"model": torch.nn.Linear(4, 4)}
for step in (1, 2):
    bytecheckpoint.save(f"{sys.argv[1]}/step_{step}", states, async_checkpoint=sys.argv[2] == "async")
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["async", "kill"])
def test_a_process_that_ends_delivers_what_it_has(tmp_path: Path, end: str) -> None:
    command = forked("-c", _PROGRAM, tmp_path, end)
    program = subprocess.run(command, capture_output=True, timeout=100, check=False)
    assert program.returncode == (-signal.SIGKILL if end == "kill" else 0), program.stderr
    assert not program.stderr
    # What a killed process has written is whole.
    found = [table["step"][0].as_py() for table in tables(tmp_path).values()]
    assert end == "kill" or sorted(found) == [1, 2]


@on_ranks(4)
def test_the_ranks_of_a_mesh_are_known(tmp_path: Path) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    tensor = dist.tensor.distribute_tensor(
        torch.arange(64.0).view(8, 8), mesh, [dist.tensor.Shard(0), dist.tensor.Shard(1)]
    )
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(tensor)
    with collecting():
        bytecheckpoint.save(tmp_path / "step_1", {"model": module})
        if dist.get_rank() == 0:
            (table,) = wait_for_operations(tmp_path, 1)
            places = [(row["rank"], row["dp"], row["tp"]) for row in table.to_pylist() if row["level"] == "rank"]
            assert places == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    dist.barrier()


def save_and_leave(path: str) -> bool:
    with collecting():
        bytecheckpoint.save(path, {"model": torch.nn.Linear(4, 4)})
    collective = weakref.ref(current())
    dist.destroy_process_group()

    def is_gone() -> bool:
        gc.collect()
        return collective() is None

    return wait_until(is_gone, 20)


def test_a_world_ends_with_its_process_group(worlds: Worlds, tmp_path: Path) -> None:
    """So a process that continues with another group keeps no threads, connections and memory of this one."""
    world = worlds.fresh(2)
    try:
        assert world.run(save_and_leave, str(tmp_path / "step_1")) == [True, True]
    finally:
        world.close()


def test_a_model_without_a_mesh_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr("bytecheckpoint.world.mesh_coordinates", lambda *arguments: calls.append(arguments) or {})
    states = {"model": torch.nn.Linear(4, 4)}
    for metrics in ("files", "files", "off"):
        with collecting(metrics):
            bytecheckpoint.save(tmp_path / "step_1", states)
    assert len(calls) == 1


def test_a_job_that_calls_exit_ends_no_other_one(caplog: pytest.LogCaptureFixture) -> None:
    """As a sink or an alert of the program may."""
    background, done = Background("test"), threading.Event()
    background.submit(lambda: sys.exit("enough"))
    background.submit(done.set)
    assert done.wait(20) and "enough" in caplog.text
    background.end()
