"""Jobs for the ranks of simulated machines: each machine has a name and a memory of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint import CheckpointManager
from bytecheckpoint.collectives import Collective, current
from bytecheckpoint.manager import Retention
from bytecheckpoint.storage.posix.storage import LocalStorage
from bytecheckpoint.tiers.flush import flusher
from bytecheckpoint.world import world_of
from tests.support.coded import states, step_of
from tests.support.faulty_storage import Faults
from tests.support.frozen import Training
from tests.support.memory import durable_folder, hot_folder
from tests.support.processes import wait_until


def settle(
    memory: str, machines: list[int], writer: str = "thread", one_name: bool = False, **options: Any
) -> Collective:
    """Put this rank on machine number `machines[rank]`, whose memory is `memory`/<number>, of a name of its own or not.

    Starting the helper process would take longer than the rest of most tests.
    """
    collective = current()
    machine = machines[collective.rank]
    collective.host = "a name of all" if one_name else f"machine {machine}"
    bytecheckpoint.configure(tier_hot=f"mem://{memory}/{machine}", timeout=20.0, writer=writer, **options)
    return collective


def save(
    path: str, memory: str, machines: list[int], step: int, gate: str = "", rows: int = 24, **options: Any
) -> dict[str, Any]:
    """Save; with a gate, only until the step is restorable."""
    collective = settle(memory, machines, **options)
    if gate:  # nothing is written to the durable folder before that file exists
        faults = Faults().install_in_folders(pytest.MonkeyPatch())
        faults.add("create", before=lambda: wait_until(Path(gate).exists, 60), times=-1)
    handle = bytecheckpoint.save(
        path, states(collective.rank, collective.world_size, step, rows), async_checkpoint=True
    )
    if gate:
        handle.restorable.result(60)
        return {"committed": handle.committed.done()}
    report = handle.result(60)
    world_of(collective).flusher.drain()
    return {"committed": True, "phases": dict(report.phases)}


def save_where(path: str, folders: list[str], step: int, rows: int) -> bool:
    """Save from one machine per rank, each with a hot folder of its own; whether it was durable once it was restorable."""
    collective = current()
    collective.host = f"machine {collective.rank}"
    bytecheckpoint.configure(tier_hot=folders[collective.rank], timeout=20.0)
    handle = bytecheckpoint.save(
        path, states(collective.rank, collective.world_size, step, rows), async_checkpoint=True
    )
    handle.restorable.result(60)
    durable = (durable_folder(path) / "metadata.parquet").exists()
    handle.result(60)
    world_of(collective).flusher.drain()
    return durable


def save_with_a_failing_disk(path: str, memory: str, machines: list[int], step: int, machine: int) -> bool:
    """Save; when the flush begins, nothing can be read from the hot tier of one machine any more."""
    collective = settle(memory, machines)
    failing = [False]
    real_flush, real_read = flusher.flush_together, os.preadv

    def flush(*args: Any) -> None:
        failing[0] = machines[collective.rank] == machine
        try:
            real_flush(*args)
        finally:
            failing[0] = False

    def read(fd: int, buffers: Any, offset: int) -> int:
        if failing[0] and f"/{memory}/{machine}/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(5, "Input/output error")
        return real_read(fd, buffers, offset)

    flusher.flush_together, os.preadv = flush, read  # type: ignore[assignment]
    try:
        bytecheckpoint.save(path, states(collective.rank, collective.world_size, step)).result(60)
        world_of(collective).flusher.drain()
    finally:
        flusher.flush_together, os.preadv = real_flush, real_read  # type: ignore[assignment]
    return True


def save_and_fail(path: str, memory: str, machines: list[int], step: int) -> str:
    """The error of the flush."""
    collective = settle(memory, machines)
    handle = bytecheckpoint.save(path, states(collective.rank, collective.world_size, step))
    error = handle.committed.exception(60)
    return f"{type(error).__name__}: {error}"


def save_and_die(path: str, memory: str, machines: list[int], step: int, files: int) -> None:
    """Save, and have every rank killed with SIGKILL while it writes its file number `files` to the durable storage."""
    collective = settle(memory, machines)
    begun: list[str] = []
    real = LocalStorage.create

    def create(storage: LocalStorage, request: Any) -> Any:
        writer = real(storage, request)
        begun.append(request.name)
        if len(begun) == files:
            writer.write_at(4096, [memoryview(b"half of it")])
            os.kill(os.getpid(), signal.SIGKILL)
        return writer

    LocalStorage.create = create  # type: ignore[method-assign]
    bytecheckpoint.save(path, states(collective.rank, collective.world_size, step), async_checkpoint=True).result(60)


def load(path: str, memory: str, machines: list[int], rows: int = 24) -> tuple[int, int]:
    """The step, and the bytes read."""
    collective = settle(memory, machines)
    mine = states(collective.rank, collective.world_size, rows=rows)
    report = bytecheckpoint.load(path, mine, prepare_save=False)
    if dist.is_initialized():
        dist.barrier()
    return step_of(mine), report.bytes_read


def load_and_fail(path: str, memory: str, machines: list[int]) -> str:
    """The error of a load."""
    collective = settle(memory, machines)
    try:
        bytecheckpoint.load(path, states(collective.rank, collective.world_size))
    except bytecheckpoint.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def train(path: str, memory: str, machines: list[int], steps: list[int], **options: Any) -> list[int]:
    """Save steps with a manager that keeps only the newest; return the steps that this rank sees then."""
    collective = settle(memory, machines, **options)
    mine = states(collective.rank, collective.world_size, 0)
    with CheckpointManager(path, mine, keep=Retention(1, grace=0)) as manager:
        manager.restore_latest()
        for step in steps:
            manager.save(step).result(60)  # type: ignore[union-attr]
            wait_until(lambda: len(manager.steps()) == 1 or collective.rank != 0, 30)
            world_of(collective).flusher.drain()
            dist.barrier()
    return [info.step for info in manager.steps()]


def save_frozen(path: str, memory: str, machines: list[int], steps: list[int]) -> list[dict[str, int]]:
    """Save steps of a training with frozen parameters; return the inodes of the machine's files of the model after each."""
    collective = settle(memory, machines)
    training, found = Training(), []
    for step in steps:
        training.save(f"{path}/{step}")
        world_of(collective).flusher.drain()
        found.append({file.name: file.stat().st_ino for file in hot_folder(f"{path}/{step}").glob("model/*")})
    return found
