"""Faults of other checkpointing systems, one test for each, by name: each was seen there, none may be here.

These tests run in one process, some with ranks as threads. test_kill.py tests faults that need several processes,
test_corruption.py those of files, test_failing_storage.py and test_disk_full.py those of storage.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.collectives.testing import ThreadWorld
from tests.faults.training import fresh, restored, trained
from tests.support.coded import files_of, load_step, states
from tests.support.faulty_storage import Faults
from tests.support.ranks import load_all, save_all

# The first step of a torch optimizer imports torch's compiler: a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)

# --- torch_checkpointing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replacing", [False, True])
def test_torch_checkpointing_does_not_fsync(path: Path, monkeypatch: pytest.MonkeyPatch, replacing: bool) -> None:
    """A save calls fsync for every file, then its folder, then the catalog, which gets its name afterwards."""
    events: list[str] = []
    real_fsync, naming = os.fsync, "replace" if replacing else "link"
    real_naming = getattr(os, naming)

    def name_of(fd: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), path)

    def fsync(fd: int) -> None:
        events.append(name_of(fd))
        real_fsync(fd)

    def name(source: str, target: str) -> None:
        events.append(f"name {os.path.relpath(target, path)}")
        real_naming(source, target)

    if replacing:
        bytecheckpoint.save(path, states(step=0))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, naming, name)
    bytecheckpoint.save(path, states(step=1))
    commit = events.index("name metadata.parquet")
    for name in files_of(path):
        if name != "metadata.parquet":
            assert events.index(name) < commit
            assert os.path.dirname(name) in events[events.index(name) : commit]
    assert events[commit - 1].startswith(".publishing-")
    assert events[-1] == "." and (replacing or events.index("..") < commit), "the folder's own name is durable too"


# --- Megatron-Core ----------------------------------------------------------------------------------------------------


def test_megatron_one_step_tensor_is_aliased_to_all_parameters(path: Path) -> None:
    model, optimizer = trained()
    for number, state in enumerate(optimizer.state.values()):
        state["step"] = torch.tensor(float(10 + number))
    _, empty = restored(path, model, optimizer)
    steps = [empty.state[p]["step"] for group in empty.param_groups for p in group["params"]]
    assert [float(s) for s in steps] == [10.0 + n for n in range(len(steps))]
    assert len({s.data_ptr() for s in steps}) == len(steps), "every parameter has a tensor of its own"
    steps[0] += 5
    assert float(steps[1]) == 11.0


def test_megatron_flattened_ranges_are_gone(path: Path) -> None:
    """Three ranks save and 5, 2 and 1 load, each with its own split of the tensors; nothing is gathered."""
    reports = ThreadWorld(3).run(lambda c: bytecheckpoint.save(path, states(c.rank, 3, 4)).result())
    assert max(r.bytes_written for r in reports) < 0.6 * sum(r.bytes_written for r in reports)
    for world in (5, 2, 1):
        assert load_all(ThreadWorld(world), path, prepare_save=False) == [4] * world


# --- DeepSpeed universal checkpoints --------------------------------------------------------------------------------


def test_deepspeed_every_group_gets_the_hyperparameters_of_group_0(path: Path) -> None:
    model, optimizer = trained()
    optimizer.param_groups[2]["initial_lr"] = 0.7
    _, empty = restored(path, model, optimizer)
    for ours, theirs in zip(empty.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    assert [group["lr"] for group in empty.param_groups] == [0.01, 0.02, 0.001]


def test_deepspeed_frozen_parameters_and_buffers_are_not_restored(path: Path) -> None:
    model, optimizer = trained()
    other, _ = restored(path, model, optimizer)
    assert not other[0].weight.requires_grad
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    assert int(other[1].num_batches_tracked) == 3


@pytest.mark.parametrize("kind", ["SGD", "Adafactor", "RMSprop", "LBFGS"])
def test_deepspeed_only_adam_shaped_optimizers(path: Path, kind: str) -> None:
    torch.manual_seed(0)
    options = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(5, 4)
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.linspace(0, 1, 15).view(3, 5)).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = make()
    for _ in range(3):
        step(model, optimizer)
    bytecheckpoint.save(path, {"model": model, "optimizer": optimizer})
    other, empty = make()
    bytecheckpoint.load(path, {"model": other, "optimizer": empty})
    for _ in range(3):
        step(model, optimizer)
        step(other, empty)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# --- ByteCheckpoint's public release ---------------------------------------------------------------------------------


def test_bytecheckpoint_a_truncated_file_loads_uninitialised_memory(path: Path) -> None:
    bytecheckpoint.save(path, states(step=1))
    for name in [n for n in files_of(path) if n != "metadata.parquet"]:
        size = (path / name).stat().st_size
        kept = (path / name).read_bytes()
        for left in (size - 1, 4096, 0):
            os.truncate(path / name, left)
            with pytest.raises(CorruptCheckpointError, match="cut, extended or replaced") as caught:
                load_step(path)
            assert caught.value.file == name
            (path / name).write_bytes(kept)


def test_bytecheckpoint_the_plan_cache_never_hits(path: Path) -> None:
    world = ThreadWorld(3)
    got = [[r.plan_cached for r in save_all(world, path, step)] for step in (1, 2, 3)]
    assert got == [[False] * 3, [True] * 3, [True] * 3]


def test_bytecheckpoint_a_plan_that_is_used_often_outlives_many_others(tmp_path: Path) -> None:
    for number in range(40):
        bytecheckpoint.save(tmp_path / "s", states(step=number))
        bytecheckpoint.save(tmp_path / "t", {"model": {f"t{number}": torch.zeros(1)}})
    assert bytecheckpoint.save(tmp_path / "s", states(step=77)).result().plan_cached
    assert load_step(tmp_path / "s") == 77


def test_bytecheckpoint_no_plan_is_used_for_states_that_changed(path: Path) -> None:
    world = ThreadWorld(2)
    for step, rows in ((1, 24), (2, 24), (3, 48), (4, 24)):
        world.run(lambda c, step=step, rows=rows: bytecheckpoint.save(path, states(c.rank, 2, step, rows)))
        assert load_step(path, rows=rows) == step


# --- DataStates-LLM ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_datastates_live_memory_is_written_unfenced(path: Path, staging: str, writer: str) -> None:
    """Values that change right after `staged` are not in the checkpoint."""
    bytecheckpoint.configure(writer=writer)
    for step in (1, 2, 3):
        live = states(step=step, rows=4000)
        handle = bytecheckpoint.save(path, live, async_checkpoint=True, staging=staging)
        handle.staged.result(30)
        for tensor in (live["model"]["w"].data, live["model"]["v"].data, live["model"]["bias"]):
            tensor.fill_(-7.0)
        live["optimizer"]["momentum"].data.fill_(-7.0)
        live["extra_states"]["own"].fill_(-7.0)
        live["extra_states"]["step"] = -7
        handle.result(60)
        assert load_step(path, rows=4000) == step


def test_datastates_committed_before_it_is_durable(path: Path, faults: Faults) -> None:
    rule = faults.add("finish", delay=0.3, times=-1)
    handle = bytecheckpoint.save(path, states(step=1), async_checkpoint=True)
    assert handle.staged.done() and not handle.committed.done()
    handle.result(20)
    assert rule.hits == 5
    order = [call for _, call, _ in faults.calls]
    assert max(i for i, c in enumerate(order) if c in ("write", "finish", "sync")) < order.index("publish")


# --- all of them -----------------------------------------------------------------------------------------------------


def test_a_refused_load_leaves_the_destination_untouched(path: Path) -> None:
    model, optimizer = trained()
    bytecheckpoint.save(path, {"model": model, "optimizer": optimizer})
    other, empty = fresh()
    other.extra = nn.Linear(2, 2)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(IncompatibleCheckpointError, match=r"model/extra\.weight"):
        bytecheckpoint.load(path, {"model": other, "optimizer": empty})
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    assert not empty.state
