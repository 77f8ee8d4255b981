"""Saves and loads of several real ranks: asynchronous, overwriting, cached plans, exchange, groups."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bytecheckpoint
from bytecheckpoint.tools import verify
from tests.support.comparisons import assert_same
from tests.support.fsdp1_layouts import WORLD_SIZE, build, in_layout
from tests.support.memory import as_on_disk
from tests.support.tiny_model import fill_by_coordinates, source_values, target_values
from tests.support.variants import quick
from tests.support.worlds import Worlds, on_ranks

MIB = 1 << 20


def overwrite_while_training(layout: str, path: str) -> int:
    """Save asynchronously to one path four times: the last save wins, and is a snapshot of its moment.

    Returns:
        The bytes that the last save wrote.
    """
    trainer, fresh = build(layout, source_values), build(layout, target_values)
    trainer.train(1)
    bytecheckpoint.prepare(trainer.states()).result(60)
    handles = []
    for _ in range(4):
        trainer.train(1)
        expected = trainer.snapshot()
        handles.append(bytecheckpoint.save(path, trainer.states(), async_checkpoint=True))
    losses = trainer.train(3)
    reports = [handle.result(60) for handle in handles]
    assert all(report.plan_cached for report in reports)
    bytecheckpoint.load(path, fresh.states())
    assert_same(expected, fresh.snapshot())
    assert fresh.train(3) == losses
    return reports[-1].bytes_written


@pytest.mark.parametrize("layout", quick(["ddp2", "fsdp3", "pp2-fsdp2", "ep2-fsdp2", "full3-flat"], every=2))
def test_the_last_of_several_asynchronous_saves_is_there(worlds: Worlds, layout: str, path: str) -> None:
    written = worlds.run(WORLD_SIZE[layout], overwrite_while_training, layout, path)
    # No file of the three earlier saves is left.
    assert sum(f.stat().st_size for f in Path(path).rglob("*.safetensors")) == sum(written)


@pytest.mark.parametrize("layout", ["fsdp2", "tp2-fsdp2"])
@in_layout
def test_background_staging(layout: str, path: str) -> None:
    """The caller waits only for `staged` before it changes the state.

    Only the caller's thread may call state_dict of a module: under FSDP2 that reshards the parameters, even in the
    middle of a forward pass.
    """
    trainer, fresh = build(layout, source_values), build(layout, target_values)
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
    bytecheckpoint.load(path, fresh.states())
    assert_same(expected, fresh.snapshot())


def large_replicated(path: str, overlap: bool) -> tuple[int, int]:
    """Save and load a DDP model of 16 MiB; return (bytes read, bytes received)."""
    model = DistributedDataParallel(nn.Linear(2048, 2048, bias=False))
    values = torch.arange(2048.0 * 2048).reshape(2048, 2048)
    model.module.weight.data.copy_(values)
    bytecheckpoint.save(path, {"model": model})
    model.module.weight.data.zero_()
    report = bytecheckpoint.load(as_on_disk(path), {"model": model}, overlap_loading=overlap)
    assert torch.equal(model.module.weight, values)
    return report.bytes_read, report.bytes_received


@pytest.mark.parametrize("overlap", [True, False])
def test_replicas_read_the_checkpoint_once(worlds: Worlds, overlap: bool, path: str) -> None:
    ranks = worlds.run(4, large_replicated, path, overlap)
    read, received = (sum(r[i] for r in ranks) for i in (0, 1))
    state = 16 * MIB
    if overlap:
        assert state <= read < 1.05 * state, "storage is read once"
        assert 3 * state <= received < 3.05 * state, "the others get it from their peers"
        assert max(r[0] for r in ranks) < 0.6 * state, "and reading is shared out"
    else:
        assert 4 * state <= read < 4.05 * state
        assert received == 0


def end_group_before_commit(path: str) -> list[str]:
    """Call `destroy_process_group()` during a save, which no longer needs the group; return the catalogs."""
    trainer = build("fsdp2", source_values)
    trainer.train(1)
    states = {**trainer.states(), "ballast": torch.ones(8 * MIB)}
    handle = bytecheckpoint.save(path, states, async_checkpoint=True)
    dist.destroy_process_group()
    assert handle.result(60).bytes_written > 0
    return sorted(file.name for file in Path(path).glob("*.parquet"))


def test_the_group_may_end_before_the_save_does(worlds: Worlds, path: str) -> None:
    world = worlds.fresh(2)
    assert world.run(end_group_before_commit, path) == [["metadata.parquet"]] * 2
    assert world.close() == [0, 0]


@on_ranks(4)
def test_groups_save_by_themselves(path: str) -> None:
    """The two halves of the world save and load at the same time."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own_half = halves[rank // 2]
    where = f"{path}/{rank // 2}"
    states = {"model": {"w": torch.full((5,), float(rank // 2))}, "extra_states": {"half": rank // 2, "rank": rank}}
    for _ in range(2):
        bytecheckpoint.save(where, states, process_group=own_half, async_checkpoint=True).result(60)
    fresh: dict[str, Any] = {"model": {"w": torch.zeros(5)}, "extra_states": {}}
    bytecheckpoint.load(where, fresh, process_group=own_half)
    for state_name, state in states.items():
        assert_same(state, fresh[state_name])
    with pytest.raises(bytecheckpoint.UsageError, match="not in the process group"):
        bytecheckpoint.save(where, states, process_group=halves[1 - rank // 2])


@on_ranks(4)
def test_open_reads_other_layouts_on_every_rank(path: str) -> None:
    """`open` needs no process group."""
    bytecheckpoint.save(path, {"model": build("tp2-fsdp2", fill_by_coordinates).model})
    with bytecheckpoint.open(path) as checkpoint:
        for name, parameter in build("one", fill_by_coordinates).parameters().items():
            assert torch.equal(checkpoint[f"model/{name}"][...], parameter.detach()), name


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "tp2-fsdp2", "pp2-fsdp2", "full4-orig"])
@in_layout
def test_frozen_parameters_are_shared_in_every_layout(layout: str, path: str) -> None:
    trainer, fresh = build(layout, source_values), build(layout, target_values)
    for name, parameter in trainer.parameters().items():
        parameter.requires_grad_("norm" in name or "head" in name)
    adopted = []
    for step in (1, 2):
        report = bytecheckpoint.save(f"{path}/{step}", {"model": trainer.model}, incremental=True).result(60)
        adopted.append(torch.tensor(report.bytes_adopted))
        dist.all_reduce(adopted[-1])
    assert adopted[0] == 0 < adopted[1], adopted
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{path}/1")
        assert verify(f"{path}/2").ok
    dist.barrier()
    bytecheckpoint.load(f"{path}/2", {"model": fresh.model})
    wanted, found = ({k: v for k, v in t.snapshot().items() if k.startswith("model/")} for t in (trainer, fresh))
    assert wanted
    assert_same(wanted, found)
