"""The jobs that ranks run in test_saves.py: asynchronous saves, overwriting, plan cache, exchange, process groups."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bytecheckpoint
from bytecheckpoint.collectives.base import Collective
from tests.distributed.layouts import build
from tests.distributed.matrix_jobs import differences, source_values, target_values
from tests.support.tiny_model import fill_by_coordinates

MIB = 1 << 20


def overwrite_while_training(layout: str, path: str) -> dict[str, Any]:
    """Save asynchronously to one path several times; the last save wins, and each is a snapshot of its moment."""
    trainer = build(layout, source_values)
    handles = []
    for _ in range(4):
        trainer.train(1)
        expected = trainer.snapshot()
        handles.append(bytecheckpoint.save(path, trainer.states(), async_checkpoint=True))
    losses = trainer.train(3)
    reports = [handle.result(60) for handle in handles]
    fresh = build(layout, target_values)
    bytecheckpoint.load(path, fresh.states())
    wrong = differences(expected, fresh.snapshot())
    assert fresh.train(3) == losses
    return {"wrong": wrong, "cached": [r.plan_cached for r in reports], "written": [r.bytes_written for r in reports]}


def background_staging(layout: str, path: str) -> list[str]:
    """Save with `staging="background"`: the caller waits only for `staged` before it changes the state.

    Only the caller's thread may call state_dict of a module: under FSDP2 that reshards the parameters, even in the
    middle of a forward pass.
    """
    trainer = build(layout, source_values)
    trainer.train(1)
    threads: list[str] = []
    trainer.unwrapped.register_state_dict_pre_hook(lambda *_: threads.append(threading.current_thread().name))
    bytecheckpoint.prepare(trainer.states()).result(60)
    expected = trainer.snapshot()
    handle = bytecheckpoint.save(path, trainer.states(), async_checkpoint=True, staging="background")
    handle.staged.result(60)
    trainer.train(2)
    assert handle.result(60).plan_cached
    with_other_plan = {"model": trainer.model, "extra_states": trainer.extra}
    bytecheckpoint.save(f"{path}-model", with_other_plan, async_checkpoint=True, staging="background").result(60)
    assert set(threads) == {threading.main_thread().name}
    fresh = build(layout, target_values)
    bytecheckpoint.load(path, fresh.states())
    return differences(expected, fresh.snapshot())


class CountedSends:
    """Counts the messages that this rank sends, by step of the save."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from bytecheckpoint.collectives.process_group import TorchCollective

        self.steps: list[str] = []
        send = TorchCollective.send

        def counted(this: Collective, to: int, tag: str, payload: bytes) -> None:
            self.steps.append("/".join(tag.split("/")[2:]))
            send(this, to, tag, payload)  # type: ignore[arg-type]

        monkeypatch.setattr(TorchCollective, "send", counted)


def plan_messages(layout: str, path: str) -> list[list[str]]:
    """Return the steps in which this rank sends a message, or on rank 0 the coordinator's reply too, per save."""
    trainer = build(layout, source_values)
    trainer.train(1)
    found = []
    for number in range(3):
        with pytest.MonkeyPatch.context() as monkeypatch:
            sends = CountedSends(monkeypatch)
            report = bytecheckpoint.save(f"{path}/{number}", trainer.states()).result()
            dist.barrier()  # rank 0 sends its last messages on another thread
            found.append(sorted(set(sends.steps)))
        assert report.plan_cached == (number > 0)
        trainer.train(1)
    return found


def ranks_that_disagree(path: str) -> list[str]:
    """Add a tensor on one rank between two saves, so that its tensors do not fit the cached plan."""
    states: dict[str, Any] = {"model": {"a": torch.arange(6.0), "b": torch.arange(3.0)}}
    bytecheckpoint.save(f"{path}/1", states)
    if dist.get_rank() == 1:
        states["model"]["c"] = torch.arange(5.0)
    report = bytecheckpoint.save(f"{path}/2", states).result()
    assert report.plan_cached == (dist.get_rank() != 1)
    with bytecheckpoint.open(f"{path}/2") as checkpoint:
        assert torch.equal(checkpoint["model/c"][...], torch.arange(5.0))
        assert torch.equal(checkpoint["model/a"][...], torch.arange(6.0))
        return sorted(checkpoint)


def large_replicated(path: str, overlap: bool) -> tuple[int, int]:
    """Save and load a DDP model of 16 MiB; return (bytes read, bytes received)."""
    model = DistributedDataParallel(nn.Linear(2048, 2048, bias=False))
    with torch.no_grad():
        model.module.weight.copy_(torch.arange(2048.0 * 2048).reshape(2048, 2048))
    bytecheckpoint.save(path, {"model": model})
    with torch.no_grad():
        model.module.weight.zero_()
    report = bytecheckpoint.load(path, {"model": model}, overlap_loading=overlap)
    assert torch.equal(model.module.weight.flatten(), torch.arange(2048.0 * 2048))
    return report.bytes_read, report.bytes_received


def each_writes_its_part(path: str) -> int:
    """Return the bytes that this rank of a DDP job writes, of a state of 16 MiB."""
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16))))
    return bytecheckpoint.save(path, {"model": model}).result().bytes_written


def ended_group_before_commit(layout: str, path: str) -> list[str]:
    """Call `destroy_process_group()` during a save, which no longer needs the group."""
    trainer = build(layout, source_values)
    trainer.train(1)
    states = {**trainer.states(), "ballast": torch.ones(8 * MIB)}
    handle = bytecheckpoint.save(path, states, async_checkpoint=True)
    dist.destroy_process_group()
    assert handle.result(60).bytes_written > 0
    return sorted(path_.name for path_ in Path(path).iterdir() if path_.suffix == ".parquet")


def subgroups(path: str) -> list[str]:
    """Save and load in two halves of the world at the same time."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own_half = halves[rank // 2]
    where = f"{path}/{rank // 2}"
    states = {"model": {"w": torch.full((5,), float(rank // 2))}, "extra_states": {"half": rank // 2, "rank": rank}}
    for _ in range(2):
        bytecheckpoint.save(where, states, process_group=own_half, async_checkpoint=True).result(60)
    fresh: dict[str, Any] = {"model": {"w": torch.zeros(5)}, "extra_states": {}}
    bytecheckpoint.load(where, fresh, process_group=own_half)
    wrong = differences(states["model"], fresh["model"]) + differences(states["extra_states"], fresh["extra_states"])
    with pytest.raises(bytecheckpoint.UsageError, match="not in the process group"):
        bytecheckpoint.save(where, states, process_group=halves[1 - rank // 2])
    return wrong


def open_on_every_rank(layout: str, path: str) -> list[str]:
    """Open a checkpoint on every rank: `open` needs no process group."""
    filled = build(layout, fill_by_coordinates)
    bytecheckpoint.save(path, {"model": filled.model})
    whole = build("one", fill_by_coordinates)
    with bytecheckpoint.open(path) as checkpoint:
        return [
            name
            for name, parameter in whole.parameters().items()
            if not torch.equal(checkpoint[f"model/{name}"][...], parameter.detach())
        ]
