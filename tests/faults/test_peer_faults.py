"""Faults of other checkpointing systems (DESIGN.md, section 5), by name: each was seen there, none may be here.

Faults that need several processes are tested in test_kill.py; those of files in test_corruption.py; those of storage
in test_failing_storage.py and test_disk_full.py. Here is one test per fault, on one process or on ranks as threads.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    StorageFullError,
    UsageError,
)
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.threads import ThreadWorld
from bytecheckpoint.loading.saved import read_catalog
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.storage import resolve
from tests.faults.coded import Rows, check_rows, files_of, load_step, states, step_of, whole
from tests.faults.ranks import outcomes, save_all
from tests.support.faulty_storage import Faults


def trained(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of two layers after three steps of AdamW, its first layer frozen, in two parameter groups."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 3)).to(dtype)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [{"params": model[1].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "lr": 0.02, "betas": (0.5, 0.6)}]
    )
    optimizer.add_param_group({"params": model[3].parameters(), "weight_decay": 0.3})
    for _ in range(3):
        model(torch.randn(8, 6, dtype=dtype)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fresh(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same program before its first step."""
    model, optimizer = trained(seed=1, dtype=dtype)
    empty = torch.optim.AdamW([{k: v for k, v in group.items() if k == "params"} for group in optimizer.param_groups])
    return model, empty


# --- PyTorch DCP --------------------------------------------------------------------------------------------------


def test_dcp_a_flipped_byte_loads_silently(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bytecheckpoint.save(path, states(step=1))
    (name,) = [n for n in files_of(path) if n.startswith("model/rank")]
    with (path / name).open("r+b") as file:
        file.seek(4096 + 1000)
        file.write(b"\xff")
    with pytest.raises(CorruptCheckpointError, match="checksum mismatch"):
        load_step(path)


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/bytecheckpoint-was-unpickled",)


@pytest.mark.parametrize("place", ["catalog", "file"])
def test_dcp_pickled_metadata_executes_code(tmp_path: Path, place: str) -> None:
    path = tmp_path / "s"
    bytecheckpoint.save(path, states(step=1))
    victims = ["metadata.parquet"] if place == "catalog" else [n for n in files_of(path) if "values" in n]
    for victim in victims:
        old = (path / victim).read_bytes()
        bomb = pickle.dumps(Bomb())
        (path / victim).write_bytes(bomb + old[len(bomb) :] if place == "catalog" else old[: -len(bomb)] + bomb)
    with pytest.raises(CorruptCheckpointError):
        load_step(path)
    assert not os.path.exists("/tmp/bytecheckpoint-was-unpickled")


def test_dcp_an_object_that_only_pickle_takes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"extra_states/sampler\.state"):
        bytecheckpoint.save(tmp_path / "s", {"extra_states": {"sampler": {"state": Bomb()}}})
    assert not (tmp_path / "s").exists(), "nothing was written"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_dcp_enospc_in_a_writer_thread_reports_success(tmp_path: Path, faults: Faults, asynchronous: bool) -> None:
    bytecheckpoint.save(tmp_path / "s", states(step=1))
    rule = faults.add("write", StorageFullError("No space left on device"), skip=1)
    with pytest.raises(StorageFullError):
        bytecheckpoint.save(tmp_path / "s", states(step=2), async_checkpoint=asynchronous).result(20)
    assert rule.hits == 1 and load_step(tmp_path / "s") == 1


def test_dcp_a_coverage_hole_keeps_old_values_silently(tmp_path: Path) -> None:
    """Only ranks 0 and 1 of three say what they hold, so a third of the rows is nowhere: no such save commits."""
    path = tmp_path / "s"

    def save(collective: Collective) -> None:
        bytecheckpoint.save(path, {"model": {"w": Rows(collective.rank, 3, 1, 0)}})

    for error in outcomes(ThreadWorld(2), save):
        assert type(error) is IncompatibleCheckpointError
        assert "model/w" in str(error) and "hole" in str(error)
    assert files_of(path) == []


def test_dcp_a_coverage_hole_in_a_catalog_keeps_old_values_silently(tmp_path: Path) -> None:
    """And no load goes by a catalog of another writer that has a hole."""
    path = tmp_path / "s"
    bytecheckpoint.save(path, {"model": {"w": Rows(0, 1, 1, 0)}})
    catalog, _ = read_catalog(resolve(path))
    number = catalog.keys().index(TensorKey("model", "w"))
    shapes = catalog.shapes.copy()
    shapes[number, 0] += 6  # rows that no box covers
    (path / "metadata.parquet").write_bytes(encode(dataclasses.replace(catalog, shapes=shapes)))
    blank = Rows(0, 1, None, 0, 30)
    with pytest.raises(CheckpointError, match=r"model/w.*hole"):
        bytecheckpoint.load(path, {"model": {"w": blank}})
    assert (blank.data == -1).all(), "a load that is refused changes nothing"


def test_dcp_silent_cast(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bytecheckpoint.save(path, {"model": {"w": torch.full((4,), 1.2345678)}})
    half = torch.zeros(4, dtype=torch.float16)
    with pytest.raises(IncompatibleCheckpointError, match=r"model/w.*float32.*float16"):
        bytecheckpoint.load(path, {"model": {"w": half}})
    assert (half == 0).all()
    report = bytecheckpoint.load(path, {"model": {"w": half}}, cast=True)
    assert report.cast == ("model/w",) and half[0] == torch.tensor(1.2345678).half()


def test_dcp_a_64th_of_a_tensor_reads_all_of_it(tmp_path: Path, faults: Faults) -> None:
    path = tmp_path / "s"
    rows, world = 64 * 1024, 64
    bytecheckpoint.save(path, {"model": {"w": Rows(0, 1, 1, 0, rows)}})
    faults.bytes_read.clear()
    part = Rows(17, world, None, 0, rows)
    report = bytecheckpoint.load(path, {"model": {"w": part}}, strict=False)
    check_rows(part, 1, 0)
    wanted = part.data.nbytes
    assert wanted <= report.bytes_read <= 2 * wanted + (1 << 20), report
    assert faults.bytes_read[0] == report.bytes_read, "the report tells the truth"
    assert report.bytes_read < rows * 40 * 8 / 8


def test_dcp_a_failed_overwrite_mixes_two_steps(tmp_path: Path, faults: Faults) -> None:
    world, path = ThreadWorld(2), tmp_path / "s"
    save_all(world, path, 1)
    for step, call in enumerate(("create", "write", "finish", "sync", "publish"), 2):
        faults.add(call, StorageFullError("full"), rank=0)
        assert all(isinstance(got, StorageFullError) for got in save_all(world, path, step))
        assert load_step(path) == 1


def test_dcp_async_save_restages_from_scratch(tmp_path: Path) -> None:
    from bytecheckpoint.collectives import current
    from bytecheckpoint.saving.saver import saver_of

    bytecheckpoint.configure(writer="thread")
    plans, pools = [], []
    for step in range(1, 5):
        handle = bytecheckpoint.save(tmp_path / "s", states(step=step), async_checkpoint=True)
        plans.append(handle.result(20).plan_cached)
        pool = saver_of(current()).pool
        pools.append((pool.generation, pool.tensor().data_ptr()))
    assert plans[1:] == [True, True, True]
    assert len(set(pools[1:])) == 1, "the pool's pages are touched once"


def test_dcp_every_replica_rereads(tmp_path: Path, faults: Faults) -> None:
    """Four data-parallel ranks, 32 MiB: storage is read about once, not four times."""
    path = tmp_path / "s"
    size = 4 << 20
    bytecheckpoint.save(path, {"model": {"w": torch.arange(size, dtype=torch.float64)}})
    faults.bytes_read.clear()

    def load(collective: Collective) -> Any:
        mine = {"model": {"w": torch.zeros(size, dtype=torch.float64)}}
        report = bytecheckpoint.load(path, mine, overlap_loading=True)
        assert torch.equal(mine["model"]["w"], torch.arange(size, dtype=torch.float64))
        return report

    reports = ThreadWorld(4).run(load)
    total = sum(faults.bytes_read.values())
    assert total < 1.3 * 8 * size, f"{total / 8 / size:.1f} times the tensor was read"
    assert sum(r.bytes_read for r in reports) == total
    assert all(r.bytes_received > 0 for r in reports)


def test_dcp_every_replica_is_written(tmp_path: Path) -> None:
    """And in other systems by rank 0 alone: here each of four ranks writes about a fourth."""
    path = tmp_path / "s"
    tensors = {f"t{i}": torch.full((10_000,), float(i)) for i in range(16)}
    reports = ThreadWorld(4).run(lambda _: bytecheckpoint.save(path, {"model": tensors}).result())
    written = [report.bytes_written for report in reports]
    assert sum(written) < 1.1 * 16 * 40_000
    assert max(written) < 1.3 * min(written), written


def test_dcp_fp32_state_of_bf16_parameters_comes_back_as_bf16(tmp_path: Path) -> None:
    model, optimizer = trained(dtype=torch.bfloat16)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-6
    bytecheckpoint.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    other, empty = fresh(torch.bfloat16)
    bytecheckpoint.load(tmp_path / "s", {"model": other, "optimizer": empty})
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        if one in optimizer.state:
            assert empty.state[two]["exp_avg"].dtype == torch.float32
            assert torch.equal(empty.state[two]["exp_avg"], optimizer.state[one]["exp_avg"])
            assert empty.state[two]["exp_avg_sq"].dtype == torch.bfloat16


def test_dcp_parameters_without_optimizer_state_fail_to_load(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters())
    model[0](torch.randn(2, 3)).sum().backward()  # the second layer takes no part
    optimizer.step()
    bytecheckpoint.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    empty = torch.optim.Adam(other.parameters())
    other(torch.randn(2, 3)).sum().backward()
    empty.step()  # every parameter has some state now
    bytecheckpoint.load(tmp_path / "s", {"model": other, "optimizer": empty})
    assert set(empty.state) == set(other[0].parameters())


def test_dcp_tied_weights_fail_to_load(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model, other = tied(), tied()
    bytecheckpoint.save(tmp_path / "s", {"model": model})
    bytecheckpoint.load(tmp_path / "s", {"model": other})
    assert torch.equal(other["head"].weight, model["embed"].weight)
    assert other["head"].weight is other["embed"].weight
    untied = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
    bytecheckpoint.load(tmp_path / "s", {"model": untied})
    assert torch.equal(untied["head"].weight, model["embed"].weight)


def test_dcp_nested_extra_states_fail_to_load(tmp_path: Path) -> None:
    extra = {"a": {"b": [1, {"c": (torch.arange(3), None, b"x")}]}, 5: {"set": {1, 2}}}
    bytecheckpoint.save(tmp_path / "s", {"extra_states": extra})
    blank: dict[str, Any] = {"extra_states": {"old": 1, "a": 3}}
    bytecheckpoint.load(tmp_path / "s", blank)
    got = blank["extra_states"]
    assert list(got) == ["a", 5] and got[5] == {"set": {1, 2}}
    assert torch.equal(got["a"]["b"][1]["c"][0], torch.arange(3)) and got["a"]["b"][1]["c"][1:] == (None, b"x")


# --- torch_checkpointing --------------------------------------------------------------------------------------------


def test_torch_checkpointing_does_not_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file, the catalog before its rename, and every folder are fsynced, in this order."""
    path = tmp_path / "s"
    events: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def name_of(fd: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), path)

    def fsync(fd: int) -> None:
        events.append(name_of(fd))
        real_fsync(fd)

    def replace(source: str, target: str) -> None:
        events.append(f"rename {os.path.relpath(target, path)}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    bytecheckpoint.save(path, states(step=1))
    commit = events.index("rename metadata.parquet")
    for name in files_of(path):
        if name != "metadata.parquet":
            assert events.index(name) < commit
            assert os.path.dirname(name) in events[events.index(name) : commit]
    assert events[commit - 1].startswith(".publishing-")
    assert events[-1] == "." and events.index("..") < commit, "the folder's own name is durable too"


# --- Megatron-Core ----------------------------------------------------------------------------------------------------


def test_megatron_one_step_tensor_is_aliased_to_all_parameters(tmp_path: Path) -> None:
    model, optimizer = trained()
    for number, state in enumerate(optimizer.state.values()):
        state["step"] = torch.tensor(float(10 + number))
    bytecheckpoint.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    other, empty = fresh()
    bytecheckpoint.load(tmp_path / "s", {"model": other, "optimizer": empty})
    steps = [empty.state[p]["step"] for group in empty.param_groups for p in group["params"]]
    assert [float(s) for s in steps] == [10.0 + n for n in range(len(steps))]
    assert len({s.data_ptr() for s in steps}) == len(steps), "every parameter has a tensor of its own"
    steps[0] += 5
    assert float(steps[1]) == 11.0


def test_megatron_flattened_ranges_are_gone(tmp_path: Path) -> None:
    """Boxes from another split of the same tensor: 3 ranks save, 5, 2 and 1 load, nothing is gathered."""
    path = tmp_path / "s"
    reports = ThreadWorld(3).run(lambda c: bytecheckpoint.save(path, states(c.rank, 3, 4)).result())
    assert max(r.bytes_written for r in reports) < 0.6 * sum(r.bytes_written for r in reports)
    for world in (5, 2, 1):

        def load(collective: Collective, world: int = world) -> int:
            mine = states(collective.rank, world)
            bytecheckpoint.load(path, mine)
            return step_of(mine)

        assert ThreadWorld(world).run(load) == [4] * world


# --- DeepSpeed universal checkpoints --------------------------------------------------------------------------------


def test_deepspeed_every_group_gets_the_hyperparameters_of_group_0(tmp_path: Path) -> None:
    model, optimizer = trained()
    optimizer.param_groups[2]["initial_lr"] = 0.7
    bytecheckpoint.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    other, empty = fresh()
    bytecheckpoint.load(tmp_path / "s", {"model": other, "optimizer": empty})
    for ours, theirs in zip(empty.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    assert [group["lr"] for group in empty.param_groups] == [0.01, 0.02, 0.001]


def test_deepspeed_frozen_parameters_and_buffers_are_not_restored(tmp_path: Path) -> None:
    model, optimizer = trained()
    bytecheckpoint.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    other, empty = fresh()
    bytecheckpoint.load(tmp_path / "s", {"model": other, "optimizer": empty})
    assert not other[0].weight.requires_grad
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    assert int(other[1].num_batches_tracked) == 3


@pytest.mark.parametrize("kind", ["SGD", "Adafactor", "RMSprop", "LBFGS"])
def test_deepspeed_only_adam_shaped_optimizers(tmp_path: Path, kind: str) -> None:
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
    bytecheckpoint.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    other, empty = make()
    bytecheckpoint.load(tmp_path / "s", {"model": other, "optimizer": empty})
    for _ in range(3):
        step(model, optimizer)
        step(other, empty)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# --- ByteCheckpoint's public release ---------------------------------------------------------------------------------


def test_bytecheckpoint_a_truncated_file_loads_uninitialised_memory(tmp_path: Path) -> None:
    path = tmp_path / "s"
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


def test_bytecheckpoint_the_plan_cache_never_hits(tmp_path: Path) -> None:
    world = ThreadWorld(3)
    got = [[r.plan_cached for r in save_all(world, tmp_path / "s", step)] for step in (1, 2, 3)]
    assert got == [[False] * 3, [True] * 3, [True] * 3]


def test_bytecheckpoint_a_plan_that_is_used_often_outlives_many_others(tmp_path: Path) -> None:
    for number in range(40):
        bytecheckpoint.save(tmp_path / "s", states(step=number))
        bytecheckpoint.save(tmp_path / "t", {"model": {f"t{number}": torch.zeros(1)}})
    assert bytecheckpoint.save(tmp_path / "s", states(step=77)).result().plan_cached
    assert load_step(tmp_path / "s") == 77


def test_bytecheckpoint_no_plan_is_used_for_states_that_changed(tmp_path: Path) -> None:
    world, path = ThreadWorld(2), tmp_path / "s"
    for step, rows in ((1, 24), (2, 24), (3, 48), (4, 24)):
        world.run(lambda c, step=step, rows=rows: bytecheckpoint.save(path, states(c.rank, 2, step, rows)))
        assert load_step(path, rows=rows) == step


# --- DataStates-LLM ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_datastates_live_memory_is_written_unfenced(tmp_path: Path, staging: str, writer: str) -> None:
    """Values that change right after `staged` are not in the checkpoint."""
    bytecheckpoint.configure(writer=writer)
    for step in (1, 2, 3):
        live = states(step=step, rows=4000)
        handle = bytecheckpoint.save(tmp_path / "s", live, async_checkpoint=True, staging=staging)
        handle.staged.result(30)
        for tensor in (live["model"]["w"].data, live["model"]["v"].data, live["model"]["bias"]):
            tensor.fill_(-7.0)
        live["optimizer"]["momentum"].data.fill_(-7.0)
        live["extra_states"]["own"].fill_(-7.0)
        live["extra_states"]["step"] = -7
        handle.result(60)
        assert load_step(tmp_path / "s", rows=4000) == step


def test_datastates_committed_before_it_is_durable(tmp_path: Path, faults: Faults) -> None:
    rule = faults.add("finish", delay=0.3, times=-1)
    handle = bytecheckpoint.save(tmp_path / "s", states(step=1), async_checkpoint=True)
    assert handle.staged.done() and not handle.committed.done()
    handle.result(20)
    assert rule.hits == 5
    order = [call for _, call, _ in faults.calls]
    assert max(i for i, c in enumerate(order) if c in ("write", "finish", "sync")) < order.index("publish")


# --- all of them -----------------------------------------------------------------------------------------------------


def test_a_refused_load_leaves_the_destination_untouched(tmp_path: Path) -> None:
    path = tmp_path / "s"
    model, optimizer = trained()
    bytecheckpoint.save(path, {"model": model, "optimizer": optimizer})
    other, empty = fresh()
    other.extra = nn.Linear(2, 2)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(IncompatibleCheckpointError, match=r"model/extra\.weight"):
        bytecheckpoint.load(path, {"model": other, "optimizer": empty})
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    assert not empty.state


def test_an_unverified_checkpoint_is_never_loaded_by_any_rank(tmp_path: Path) -> None:
    """One rank's damaged bytes fail the load of all, by the name of the file."""
    path = tmp_path / "s"
    ThreadWorld(2).run(lambda c: bytecheckpoint.save(path, states(c.rank, 2, 1)))
    catalog, _ = read_catalog(resolve(path))
    entry = next(f for f in catalog.files if f.rank == 1 and f.kind == "model")
    with (path / entry.name).open("r+b") as file:
        file.seek(entry.data_offset)
        file.write(struct.pack("<d", 1e300))

    def load(collective: Collective) -> None:
        bytecheckpoint.load(path, states(collective.rank, 2), overlap_loading=False)

    for error in outcomes(ThreadWorld(2), load):
        assert isinstance(error, CheckpointError) and entry.name in str(error)
