"""Guarantees of a save and a load that other checkpointing systems break; tests/README.md has the list of those faults."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.collectives import Collective, ThreadWorld, current
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.representation.catalog_file import encode
from bytecheckpoint.representation.shards import TensorKey
from bytecheckpoint.storage import resolve
from bytecheckpoint.world import world_of
from tests.support.coded import Rows, check_rows, files_of, load_step, states
from tests.support.faulty_storage import Faults
from tests.support.ranks import outcomes

# The first step of a torch optimizer imports torch's compiler: a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)


# --- saves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replacing", [False, True])
def test_every_file_and_folder_is_durable_before_the_catalog_has_its_name(
    path: Path, monkeypatch: pytest.MonkeyPatch, replacing: bool
) -> None:
    """A save calls fsync for every file, then its folder, then the catalog, which gets its name afterwards."""
    events: list[str] = []
    real_fsync, naming = os.fsync, "replace" if replacing else "link"
    real_naming = getattr(os, naming)

    def fsync(fd: int) -> None:
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), path))
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
    for file in files_of(path):
        if file != "metadata.parquet":
            assert events.index(file) < commit
            assert os.path.dirname(file) in events[events.index(file) : commit]
    assert events[commit - 1].startswith(".publishing-")
    assert events[-1] == "." and (replacing or events.index("..") < commit), "the folder's own name is durable too"


def test_a_save_is_committed_after_its_last_file_is_durable(path: Path, faults: Faults) -> None:
    rule = faults.add("finish", delay=0.3, times=-1)
    handle = bytecheckpoint.save(faults.at(path), states(step=1), async_checkpoint=True)
    assert handle.staged.done() and not handle.committed.done()
    handle.result(20)
    assert rule.hits == 5
    order = [call for _, call, _ in faults.calls]
    assert max(i for i, c in enumerate(order) if c in ("write", "finish", "sync")) < order.index("publish")


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("staging", ["blocking", "background"])
def test_values_that_change_after_staged_are_not_saved(path: Path, staging: str, writer: str) -> None:
    bytecheckpoint.configure(writer=writer)
    for step in (1, 2, 3):
        live = states(step=step, rows=4000)
        handle = bytecheckpoint.save(path, live, async_checkpoint=True, staging=staging)
        handle.staged.result(30)
        for tensor in (live["model"]["w"].data, live["model"]["v"].data, live["model"]["bias"]):
            tensor.detach().fill_(-7.0)
        live["optimizer"]["momentum"].data.detach().fill_(-7.0)
        live["extra_states"]["own"].fill_(-7.0)
        live["extra_states"]["step"] = -7
        handle.result(60)
        assert load_step(path, rows=4000) == step


def test_asynchronous_saves_stage_into_the_same_memory(path: Path) -> None:
    pools = []
    for step in range(1, 5):
        bytecheckpoint.save(path, states(step=step), async_checkpoint=True).result(20)
        pool = world_of(current()).resources.pools.shared
        pools.append((pool.generation, pool.tensor().data_ptr()))
    assert len(set(pools[1:])) == 1, "the pool's pages are touched once"


def test_a_save_of_shards_with_a_hole_commits_nothing(path: Path) -> None:
    """Ranks 0 and 1 of three declare what they hold, so a third of the rows is nowhere."""

    def save(collective: Collective) -> None:
        bytecheckpoint.save(path, {"model": {"w": Rows(collective.rank, 3, 1, 0)}})

    for error in outcomes(ThreadWorld(2), save):
        assert type(error) is IncompatibleCheckpointError
        assert "model/w" in str(error) and "hole" in str(error)
    assert files_of(path) == []


# --- loads ------------------------------------------------------------------------------------------------------------


class Bomb:
    """An object that runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


@pytest.mark.parametrize("place", ["catalog", "values"])
def test_a_pickle_in_place_of_a_file_is_not_executed(path: Path, tmp_path: Path, place: str) -> None:
    bytecheckpoint.save(path, states(step=1))
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    for victim in [n for n in files_of(path) if ("metadata" if place == "catalog" else "values") in n]:
        old = (path / victim).read_bytes()
        (path / victim).write_bytes(bomb + old[len(bomb) :] if place == "catalog" else old[: -len(bomb)] + bomb)
    with pytest.raises(CorruptCheckpointError):
        load_step(path)
    assert not (tmp_path / "executed").exists()


def test_a_catalog_with_a_hole_is_refused(path: Path) -> None:
    """Another writer may have made it."""
    bytecheckpoint.save(path, {"model": {"w": Rows(0, 1, 1, 0)}})
    catalog, _ = read_catalog(resolve(path))
    shapes = catalog.shapes.copy()
    shapes[catalog.keys().index(TensorKey("model", "w")), 0] += 6  # rows that no box covers
    (path / "metadata.parquet").write_bytes(encode(dataclasses.replace(catalog, shapes=shapes)))
    blank = Rows(0, 1, None, 0, 30)
    with pytest.raises(CheckpointError, match=r"model/w.*hole"):
        bytecheckpoint.load(path, {"model": {"w": blank}})
    assert (blank.data == -1).all(), "a load that is refused changes nothing"


def test_a_refused_load_leaves_model_and_optimizer_untouched(path: Path) -> None:
    def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(6, 3)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = trained()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    bytecheckpoint.save(path, {"model": model, "optimizer": optimizer})
    other, empty = trained()
    other.extra = nn.Linear(2, 2)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(IncompatibleCheckpointError, match=r"model/extra\.weight"):
        bytecheckpoint.load(path, {"model": other, "optimizer": empty})
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    assert not empty.state


def test_a_64th_of_a_tensor_takes_a_64th_of_its_bytes(path: Path, faults: Faults) -> None:
    rows, world = 64 * 1024, 64
    bytecheckpoint.save(path, {"model": {"w": Rows(0, 1, 1, 0, rows)}})
    part = Rows(17, world, None, 0, rows)
    report = bytecheckpoint.load(faults.at(path), {"model": {"w": part}}, strict=False)
    check_rows(part, 1, 0)
    wanted = part.data.nbytes
    assert wanted <= report.bytes_read <= 2 * wanted + (1 << 20), report
    assert faults.bytes_read[0] == report.bytes_read, "the report is right"
    assert report.bytes_read < rows * 40 * 8 / 8
