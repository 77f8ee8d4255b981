"""Checkpoints whose catalogs are in groups: loads, `open` and tools read those they need, and no damage is silent."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CorruptCheckpointError, IncompatibleCheckpointError, StorageError
from bytecheckpoint.cli.main import run as run_command
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.concurrency import parallel_map
from bytecheckpoint.engine.catalogs import CatalogHead, CatalogReader
from bytecheckpoint.representation.catalog import Catalog
from bytecheckpoint.representation.catalog_groups import CatalogGroups
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.objects.bucket import Bucket, BucketClients
from bytecheckpoint.storage.objects.storage import ObjectStorage
from bytecheckpoint.tuning import tuned
from tests.support.large_catalogs import NAMES, RANKS, SHAPE, FarStorage, load, save, states
from tests.support.layouts import coded
from tests.support.ranks import outcomes


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "step")
    return tmp_path / "step"


@pytest.mark.parametrize("world", [1, 5, RANKS, 16])
def test_other_layouts_load(saved: Path, world: int) -> None:
    for rank, found in enumerate(load(saved, world)):
        assert found == {"all": {"x": [1, 2]}, "own": rank if rank < RANKS else 0}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Catalog]:
    """What is decoded of catalogs in groups."""
    found: list[Catalog] = []
    lock = threading.Lock()
    catalog = CatalogGroups.catalog

    def noted(self: CatalogGroups, groups: Any = None, near: Any = None) -> Catalog:
        decoded = catalog(self, groups, near)
        with lock:
            found.append(decoded)
        return decoded

    monkeypatch.setattr(CatalogGroups, "catalog", noted)
    return found


def test_each_rank_reads_the_groups_that_it_needs(saved: Path, reads: list[Catalog]) -> None:
    load(saved, RANKS)
    assert len(reads) == 2 * RANKS  # the plain values, then what the rank wants
    assert all({*NAMES} <= {*read.fqn.to_list()} for read in reads)
    rows = sorted(int((read.boxes.lengths[:, 1] == SHAPE[1]).sum()) for read in reads)
    assert rows == [0] * RANKS + [len(NAMES)] * RANKS


def test_ranks_read_parts_from_an_object_store(reads: list[Catalog]) -> None:
    storage = ObjectStorage(
        "s3://bucket/step", Bucket("memory", BucketClients(*[obstore.store.MemoryStore()] * 3), 1.0)
    )
    save(storage)
    reads.clear()
    assert [found["own"] for found in load(storage, 3)] == [*range(3)]
    assert all(read.files_read is not None for read in reads)


def test_a_catalog_that_is_replaced_between_two_reads_is_read_whole(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(size: int, read_into: Any) -> None:
        raise CorruptCheckpointError("its bytes are those of two catalogs")

    monkeypatch.setattr(CatalogGroups, "open", torn)
    assert [found["own"] for found in load(saved, 2)] == [0, 1]


def test_a_damaged_group_fails_the_load_and_is_named(saved: Path) -> None:
    file = saved / CATALOG_NAME
    data = bytearray(file.read_bytes())
    data[30] ^= 1  # in the first group, which the first rank alone needs
    file.write_bytes(data)
    found = load(saved, RANKS)
    assert all(isinstance(error, CorruptCheckpointError) for error in found), found
    assert all(CATALOG_NAME in str(error) and "row group 0" in str(error) for error in found)


def test_a_small_catalog_is_read_by_one_rank(tmp_path: Path) -> None:
    save(tmp_path / "step", group_bytes=1 << 22)
    storage = FarStorage(resolve(tmp_path / "step"))
    assert [found["all"] for found in load(storage, 64, group_bytes=1 << 22)] == [{"x": [1, 2]}] * 64
    assert storage.count() == {"open": 1, "read_into": 1}


@pytest.mark.parametrize("machines", [1, 3])
def test_the_groups_of_a_large_catalog_are_read_once_per_machine(
    saved: Path, machines: int, reads: list[Catalog]
) -> None:
    storage = FarStorage(resolve(saved))
    hosts = [f"m{rank * machines // 24}" for rank in range(24)]
    found = load(storage, 24, hosts)
    assert [each["own"] for each in found] == [*range(RANKS), *[RANKS - RANKS] * (24 - RANKS)]
    # Rank 0: tail, index and the groups of values; then each machine: the groups that its ranks want.
    (head,) = [reads[0]]
    values = len(np.unique(head.file))
    assert storage.count()["read_into"] <= 2 + values + RANKS + machines - 1
    assert storage.count()["read"] == 0


@pytest.mark.parametrize("before", [0, 3 + RANKS], ids=["head", "groups"])
def test_a_rank_that_cannot_read_fails_all_by_name(saved: Path, before: int) -> None:
    """The head is one rank's; the groups of values have a file for each rank, which the head's reader reads too."""
    storage = FarStorage(resolve(saved))

    def refuse(operation: str) -> None:
        if len(storage.calls) >= before:
            raise StorageError("cannot read: permission denied")

    storage.before = refuse
    found = load(storage, RANKS)
    assert all(isinstance(error, StorageError) and "permission denied" in str(error) for error in found), found


def test_a_catalog_that_is_replaced_between_head_and_groups(saved: Path, tmp_path: Path) -> None:
    """Another save to the same path comes in between: the load starts again, with that one."""
    save(tmp_path / "other", world=5)
    storage = FarStorage(resolve(saved))
    storage.before = lambda operation: (
        None if len(storage.calls) != 3 + RANKS else shutil.copytree(tmp_path / "other", saved, dirs_exist_ok=True)
    )
    assert [found["own"] for found in load(storage, RANKS)] == [*range(5), *[0] * (RANKS - 5)]


def test_a_large_catalog_is_read_in_parts(saved: Path, reads: list[Catalog]) -> None:
    storage = FarStorage(resolve(saved))
    with tuned(catalog_group_bytes=1), bytecheckpoint.open(storage) as checkpoint:
        assert {*NAMES} <= {key.removeprefix("model/") for key in checkpoint}
        assert checkpoint["extra_states/own"] == 0
        before = storage.count()["read_into"]
        coded_values = [coded(SHAPE, torch.float32, i) for i in range(len(NAMES))]
        assert torch.equal(checkpoint["model/w0"][0:2], coded_values[0][0:2])
        assert storage.count()["read_into"] - before < RANKS / 2 + RANKS, "of the first rank, and as many again"
        for i, name in enumerate(NAMES):
            assert torch.equal(checkpoint[f"model/{name}"][...], coded_values[i])
    assert storage.count()["read"] == 0
    assert len(reads) < 6, "each step doubles what is here"


def test_an_open_checkpoint_that_is_replaced(saved: Path, tmp_path: Path) -> None:
    save(tmp_path / "other", world=5)
    with tuned(catalog_group_bytes=1), bytecheckpoint.open(saved) as checkpoint:
        shutil.copytree(tmp_path / "other", saved, dirs_exist_ok=True)
        with pytest.raises(CorruptCheckpointError, match=r"was replaced by another save.* open it again"):
            checkpoint["model/w0"][...]


def test_tools_read_what_they_need(saved: Path, reads: list[Catalog], capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_command(["ls", str(saved)]), capsys.readouterr().out
    reads.clear()
    with tuned(catalog_group_bytes=1):
        assert (run_command(["ls", str(saved)]), capsys.readouterr().out) == whole
        assert all(read.files_read is not None for read in reads)
        for command in ("inspect", "verify"):
            assert run_command([command, str(saved)]) == 0


def test_a_head_that_changes_on_its_way_is_refused(saved: Path) -> None:
    with tuned(catalog_group_bytes=1):
        head = CatalogReader(resolve(saved)).head()
        assert CatalogReader(resolve(saved), head).catalog.keys() == CatalogReader(resolve(saved)).catalog.keys()
        offset = max(head.pieces)
        for place in range(0, len(head.pieces[offset]), 97):
            changed = bytearray(head.pieces[offset])
            changed[place] ^= 1
            pieces = {**head.pieces, offset: bytes(changed)}
            with pytest.raises(CorruptCheckpointError, match="cannot be trusted"):
                CatalogReader(resolve(saved), CatalogHead(size=head.size, pieces=pieces))


@pytest.mark.parametrize("left", [0, 10, 5000, -1])
def test_a_catalog_that_is_cut(saved: Path, left: int) -> None:
    file = saved / CATALOG_NAME
    file.write_bytes(file.read_bytes()[:left])
    for storage in (resolve(saved), FarStorage(resolve(saved))):
        for error in load(storage, 3):
            assert isinstance(error, CorruptCheckpointError) and CATALOG_NAME in str(error)


def test_threads_and_a_forked_child_read_groups(saved: Path) -> None:
    expected = [coded(SHAPE, torch.float32, i) for i in range(len(NAMES))]
    with tuned(catalog_group_bytes=1), bytecheckpoint.open(saved) as checkpoint:

        def read(number: int) -> bool:
            row, name = number % SHAPE[0], number % len(NAMES)
            return torch.equal(checkpoint[f"model/w{name}"][row], expected[name][row])

        assert read(0)
        child = os.fork()
        if not child:
            os._exit(int(not read(1)))
        assert os.waitpid(child, 0)[1] == 0
        assert all(parallel_map(read, range(200), 8, "read"))


def test_a_failure_ends_reads_of_groups_that_hang(saved: Path) -> None:
    storage = FarStorage(resolve(saved))
    over = threading.Event()
    head = 3 + RANKS  # calls of rank 0, before the decision

    def hang(operation: str) -> None:
        if len(storage.calls) > head:
            over.wait(60)

    storage.before = hang

    def run(collective: Collective) -> Any:
        destination = states(collective.rank, RANKS, fresh=True)
        if collective.rank == 5:
            destination["model"]["absent"] = destination["model"].pop("w0")
        bytecheckpoint.load(storage, destination, timeout=60)

    begun = time.monotonic()
    try:
        with tuned(catalog_group_bytes=1):
            found = outcomes(ThreadWorld(RANKS), run)
        assert time.monotonic() - begun < 30
    finally:
        over.set()
    assert all(isinstance(error, IncompatibleCheckpointError) and "absent" in str(error) for error in found), found
