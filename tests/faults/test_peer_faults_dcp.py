"""Faults of PyTorch DCP, one test for each, by name: each was seen there, none may be here. See test_peer_faults.py."""

from __future__ import annotations

import dataclasses
import os
import pickle
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
from bytecheckpoint.collectives import current
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.storage import resolve
from bytecheckpoint.world import world_of
from tests.faults.training import restored, trained
from tests.support.coded import Rows, check_rows, files_of, load_step, states
from tests.support.damage import flip_bit
from tests.support.faulty_storage import Faults
from tests.support.ranks import outcomes, save_all

# The first step of a torch optimizer imports torch's compiler: a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)


def test_dcp_a_flipped_byte_loads_silently(path: Path) -> None:
    bytecheckpoint.save(path, states(step=1))
    (name,) = [n for n in files_of(path) if n.startswith("model/rank")]
    flip_bit(path / name, 4096 + 1000)
    with pytest.raises(CorruptCheckpointError, match="checksum mismatch"):
        load_step(path)


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/bytecheckpoint-was-unpickled",)


@pytest.mark.parametrize("place", ["catalog", "file"])
def test_dcp_pickled_metadata_executes_code(path: Path, place: str) -> None:
    bytecheckpoint.save(path, states(step=1))
    victims = ["metadata.parquet"] if place == "catalog" else [n for n in files_of(path) if "values" in n]
    for victim in victims:
        old = (path / victim).read_bytes()
        bomb = pickle.dumps(Bomb())
        (path / victim).write_bytes(bomb + old[len(bomb) :] if place == "catalog" else old[: -len(bomb)] + bomb)
    with pytest.raises(CorruptCheckpointError):
        load_step(path)
    assert not os.path.exists("/tmp/bytecheckpoint-was-unpickled")


def test_dcp_an_object_that_only_pickle_takes_is_refused_by_name(path: Path) -> None:
    with pytest.raises(UsageError, match=r"extra_states/sampler\.state"):
        bytecheckpoint.save(path, {"extra_states": {"sampler": {"state": Bomb()}}})
    assert not path.exists(), "nothing was written"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_dcp_enospc_in_a_writer_thread_reports_success(path: Path, faults: Faults, asynchronous: bool) -> None:
    bytecheckpoint.save(path, states(step=1))
    rule = faults.add("write", StorageFullError("No space left on device"), skip=1)
    with pytest.raises(StorageFullError):
        bytecheckpoint.save(path, states(step=2), async_checkpoint=asynchronous).result(20)
    assert rule.hits == 1 and load_step(path) == 1


def test_dcp_a_coverage_hole_keeps_old_values_silently(path: Path) -> None:
    """Only ranks 0 and 1 of three say what they hold, so a third of the rows is nowhere: no such save commits."""

    def save(collective: Collective) -> None:
        bytecheckpoint.save(path, {"model": {"w": Rows(collective.rank, 3, 1, 0)}})

    for error in outcomes(ThreadWorld(2), save):
        assert type(error) is IncompatibleCheckpointError
        assert "model/w" in str(error) and "hole" in str(error)
    assert files_of(path) == []


def test_dcp_a_coverage_hole_in_a_catalog_keeps_old_values_silently(path: Path) -> None:
    """A load refuses the catalog of another writer if it has a hole."""
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


def test_dcp_silent_cast(path: Path) -> None:
    bytecheckpoint.save(path, {"model": {"w": torch.full((4,), 1.2345678)}})
    half = torch.zeros(4, dtype=torch.float16)
    with pytest.raises(IncompatibleCheckpointError, match=r"model/w.*float32.*float16"):
        bytecheckpoint.load(path, {"model": {"w": half}})
    assert (half == 0).all()
    report = bytecheckpoint.load(path, {"model": {"w": half}}, cast=True)
    assert report.cast == ("model/w",) and half[0] == torch.tensor(1.2345678).half()


def test_dcp_a_64th_of_a_tensor_reads_all_of_it(path: Path, faults: Faults) -> None:
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


def test_dcp_a_failed_overwrite_mixes_two_steps(path: Path, faults: Faults) -> None:
    world = ThreadWorld(2)
    save_all(world, path, 1)
    for step, call in enumerate(("create", "write", "finish", "sync", "publish"), 2):
        faults.add(call, StorageFullError("full"), rank=0)
        assert all(isinstance(got, StorageFullError) for got in save_all(world, path, step))
        assert load_step(path) == 1


def test_dcp_async_save_restages_from_scratch(path: Path) -> None:
    bytecheckpoint.configure(writer="thread")
    plans, pools = [], []
    for step in range(1, 5):
        handle = bytecheckpoint.save(path, states(step=step), async_checkpoint=True)
        plans.append(handle.result(20).plan_cached)
        pool = world_of(current()).resources.pools.shared
        pools.append((pool.generation, pool.tensor().data_ptr()))
    assert plans[1:] == [True, True, True]
    assert len(set(pools[1:])) == 1, "the pool's pages are touched once"


def test_dcp_every_replica_rereads(path: Path, faults: Faults) -> None:
    """Four data-parallel ranks, 32 MiB: storage is read about once, not four times."""
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


def test_dcp_every_replica_is_written(path: Path) -> None:
    """Each of four ranks writes about a fourth. In other systems rank 0 writes everything."""
    tensors = {f"t{i}": torch.full((10_000 + 100 * i,), float(i)) for i in range(16)}
    total = sum(tensor.nbytes for tensor in tensors.values())
    reports = ThreadWorld(4).run(lambda _: bytecheckpoint.save(path, {"model": tensors}).result())
    written = [report.bytes_written for report in reports]
    assert sum(written) < 1.1 * total
    assert max(written) < 1.3 * min(written) and max(written) < 1.1 * total / 4 + 3 * 8192, written


def test_dcp_fp32_state_of_bf16_parameters_comes_back_as_bf16(path: Path) -> None:
    model, optimizer = trained(dtype=torch.bfloat16)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-6
    other, empty = restored(path, model, optimizer, torch.bfloat16)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        if one in optimizer.state:
            assert empty.state[two]["exp_avg"].dtype == torch.float32
            assert torch.equal(empty.state[two]["exp_avg"], optimizer.state[one]["exp_avg"])
            assert empty.state[two]["exp_avg_sq"].dtype == torch.bfloat16


def test_dcp_parameters_without_optimizer_state_fail_to_load(path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters())
    model[0](torch.randn(2, 3)).sum().backward()  # the second layer takes no part
    optimizer.step()
    bytecheckpoint.save(path, {"model": model, "optimizer": optimizer})
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    empty = torch.optim.Adam(other.parameters())
    other(torch.randn(2, 3)).sum().backward()
    empty.step()  # every parameter has some state now
    bytecheckpoint.load(path, {"model": other, "optimizer": empty})
    assert set(empty.state) == set(other[0].parameters())


def test_dcp_tied_weights_fail_to_load(path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model, other = tied(), tied()
    bytecheckpoint.save(path, {"model": model})
    bytecheckpoint.load(path, {"model": other})
    assert torch.equal(other["head"].weight, model["embed"].weight)
    assert other["head"].weight is other["embed"].weight
    untied = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
    bytecheckpoint.load(path, {"model": untied})
    assert torch.equal(untied["head"].weight, model["embed"].weight)


def test_dcp_nested_extra_states_fail_to_load(path: Path) -> None:
    extra = {"a": {"b": [1, {"c": (torch.arange(3), None, b"x")}]}, 5: {"set": {1, 2}}}
    bytecheckpoint.save(path, {"extra_states": extra})
    blank: dict[str, Any] = {"extra_states": {"old": 1, "a": 3}}
    bytecheckpoint.load(path, blank)
    got = blank["extra_states"]
    assert list(got) == ["a", 5] and got[5] == {"set": {1, 2}}
    assert torch.equal(got["a"]["b"][1]["c"][0], torch.arange(3)) and got["a"]["b"][1]["c"][1:] == (None, b"x")
