"""The failure of one rank reaches the others while they write or read."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint import StorageUnavailableError
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.tuning import tuned
from tests.support.coded import load_step, states
from tests.support.faulty_storage import Faults
from tests.support.modes import MODES
from tests.support.ranks import load_all, outcomes, save_all, succeeded
from tests.support.variants import crossed

pytestmark = pytest.mark.timeout(100)
ROWS = 40_000


@pytest.fixture
def world(tmp_path: Path) -> ThreadWorld:
    """Three ranks that have saved once, so that they have a plan and write without a message."""
    bytecheckpoint.configure(write_threads=1, chunk_bytes=1 << 20, writer="thread")
    world = ThreadWorld(3)
    succeeded(save_all(world, tmp_path / "s", 1, rows=ROWS))
    return world


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_write_stop(tmp_path: Path, world: ThreadWorld, faults: Faults, mode: str) -> None:
    """Rank 0 fails at once, the others would write for twenty seconds."""
    faults.add("write", rank=0, error=StorageUnavailableError("no such store"), times=-1)
    for rank in (1, 2):
        faults.add("write", rank=rank, before=lambda: time.sleep(2.0), times=-1)
    begun = time.monotonic()
    errors = save_all(world, tmp_path / "s", 2, rows=ROWS, faults=faults, **MODES[mode])
    assert time.monotonic() - begun < 14
    assert all("no such store" in str(error) and "rank 0" in str(error) for error in errors), errors
    assert all(faults.bytes_written.get(rank, 0) < 4 << 20 for rank in (1, 2))
    assert load_step(tmp_path / "s", rows=ROWS) == 1
    succeeded(save_all(world, tmp_path / "s", 3, rows=ROWS, **MODES[mode]))
    assert load_step(tmp_path / "s", rows=ROWS) == 3


@pytest.mark.parametrize("call", ["create", "write", "finish"])
def test_ranks_that_wait_for_a_dead_store_stop(tmp_path: Path, world: ThreadWorld, faults: Faults, call: str) -> None:
    over = threading.Event()
    faults.add(call, rank=0, error=StorageUnavailableError("it is dead"), times=-1)
    faults.add(call, rank=1, before=lambda: over.wait(60), times=-1)
    begun = time.monotonic()
    try:
        with tuned(stopped_calls=0.2):
            errors = save_all(world, tmp_path / "s", 2, rows=ROWS, faults=faults)
        assert time.monotonic() - begun < 20
    finally:
        over.set()
    assert all("it is dead" in str(error) for error in errors), errors


def test_files_that_cannot_be_removed_are_named(
    tmp_path: Path, world: ThreadWorld, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.add("write", rank=0, error=StorageUnavailableError("no such store"), times=-1)
    faults.add("delete", error=StorageUnavailableError("not allowed"), times=-1)
    save_all(world, tmp_path / "s", 2, rows=ROWS, faults=faults)
    assert "files of a failed save may stay (model/rank-00001." in caplog.text and "not allowed" in caplog.text


def test_nothing_of_failed_calls_is_kept(tmp_path: Path, world: ThreadWorld, faults: Faults) -> None:
    """Messages that nobody waits for any more."""
    faults.add("write", rank=1, error=StorageUnavailableError("no"), times=-1)
    for step in range(2, 6):
        save_all(world, tmp_path / "s", step, rows=ROWS, faults=faults)
    for rank in (0, 1, 2):
        faults.add("read_into", rank=rank, error=StorageUnavailableError("no"), times=2)
        assert "no" in str(load_all(world, tmp_path / "s", rows=ROWS, faults=faults)[0])
        faults.clear()
    assert [rank.inbox._messages for rank in world.ranks] == [{}, {}, {}]
    assert not any(name.startswith(("save/", "load/")) for rank in world.ranks for name in rank.inbox._handlers)


def test_a_rank_that_has_written_nothing_removes_nothing(tmp_path: Path, faults: Faults) -> None:
    """Its storage may be the reason of the failure, and not answer."""

    def one(collective: Collective) -> None:
        own = states(collective.rank, 2, 1) if collective.rank == 0 else {"model": object()}
        bytecheckpoint.save(faults.at(tmp_path / "s"), own).result(60)

    assert all("UsageError" in repr(error) for error in outcomes(ThreadWorld(2), one))
    assert not [call for call in faults.calls if call[1] == "delete"]


@pytest.mark.parametrize(("failing", "overlap"), crossed([0, 2], [True, False]))
def test_ranks_that_read_stop(
    tmp_path: Path, world: ThreadWorld, faults: Faults, failing: int, *, overlap: bool
) -> None:
    """One rank fails at once, the others would read for twenty seconds."""
    bytecheckpoint.configure(read_threads=1)
    faults.add("read_into", rank=failing, error=StorageUnavailableError("no such store"), times=-1)
    for rank in {0, 1, 2} - {failing}:
        faults.add("read_into", rank=rank, before=lambda: time.sleep(2.0), times=-1)
    begun = time.monotonic()
    errors = load_all(world, tmp_path / "s", rows=ROWS, faults=faults, overlap_loading=overlap)
    assert time.monotonic() - begun < 14
    for rank, error in enumerate(map(str, errors)):
        assert "no such store" in error and (rank == failing or f"rank {failing}" in error), errors
    assert load_all(world, tmp_path / "s", rows=ROWS) == [1, 1, 1]


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_that_wait_for_reads_without_an_answer_stop(
    tmp_path: Path, world: ThreadWorld, faults: Faults, *, overlap: bool
) -> None:
    over = threading.Event()
    # Of tensors: plain values are read by one rank for all.
    faults.add("read_into", rank=2, name="rank-", error=StorageUnavailableError("it is dead"), times=-1)
    for rank in (0, 1):
        faults.add("read_into", rank=rank, name="rank-", before=lambda: over.wait(60), times=-1)
    begun = time.monotonic()
    try:
        with tuned(stopped_calls=0.2):
            errors = load_all(world, tmp_path / "s", rows=ROWS, faults=faults, overlap_loading=overlap)
        assert time.monotonic() - begun < 45, errors  # not the 60 s of the reads that get no answer
    finally:
        over.set()
    assert all("rank 2" in str(error) and "it is dead" in str(error) for error in errors[:2]), errors
    assert load_all(world, tmp_path / "s", rows=ROWS) == [1, 1, 1]
