"""A storage that fails or is slow on any rank at any stage: the save fails on every rank, and nothing is lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import (
    CheckpointError,
    CheckpointTimeoutError,
    PeerLostError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from tests.support.coded import files_of, load_step, states
from tests.support.faulty_storage import Faults
from tests.support.modes import MODES
from tests.support.ranks import check_recovery, load_all, outcomes, save_all, saved, succeeded
from tests.support.variants import crossed, quick

#: Call of the storage -> the stage in the error of the other ranks.
STAGES = {"create": "write", "write": "write", "finish": "finish", "sync": "finish", "publish": "commit"}
ERRORS = {
    StorageFullError: "cannot write here: No space left on device",
    StorageUnavailableError: "cannot reach the device",
    StorageError: "Permission denied",
}


def expect_failure(got: list[Any], error: type[CheckpointError], rank: int, stage: str, cause: str) -> None:
    """Fail unless every rank raised `error` with the rank, the stage and the cause of the failure."""
    for who, raised in enumerate(got):
        assert type(raised) is error, f"rank {who}: {raised!r}"
        assert cause in str(raised)
        assert f"rank {rank}, {stage}" in str(raised), f"on rank {who}: {raised}"
        assert "\n" not in str(raised)


@pytest.mark.parametrize(
    ("where", "mode"),
    crossed([(call, rank) for call in STAGES for rank in (0, 2) if call != "publish" or rank == 0], list(MODES)),
)
def test_a_failure_on_one_rank_fails_the_save_on_every_rank(
    path: Path, faults: Faults, where: tuple[str, int], mode: str
) -> None:
    call, rank = where
    world = saved(path, 3, **MODES[mode])
    before = files_of(path)
    error = list(ERRORS)[len(call) % 3]
    rule = faults.add(call, error(ERRORS[error]), rank=rank)
    got = save_all(world, path, 2, faults=faults, **MODES[mode])
    assert rule.hits == 1
    expect_failure(got, error, rank, STAGES[call], ERRORS[error])
    assert files_of(path) == before, "nothing of the failed save is left"
    assert load_step(path) == 1
    check_recovery(world, path, mode)
    assert len(files_of(path)) == len(before)


@pytest.mark.parametrize(("mode", "skip"), crossed(list(MODES), [0, 3]))
def test_a_write_that_stops_half_way(path: Path, faults: Faults, skip: int, mode: str) -> None:
    world = saved(path)
    faults.add("write", StorageFullError("disk full"), rank=1, skip=skip, partial=True)
    got = save_all(world, path, 2, faults=faults, **MODES[mode])
    expect_failure(got, StorageFullError, 1, "write" if not skip else "", "disk full")
    assert load_step(path) == 1


@pytest.mark.parametrize("mode", MODES)
def test_the_first_save_of_a_path_fails_and_leaves_no_checkpoint(path: Path, faults: Faults, mode: str) -> None:
    world = ThreadWorld(2)
    faults.add("finish", StorageFullError("disk full"), rank=1)
    got = save_all(world, path, 1, faults=faults, **MODES[mode])
    expect_failure(got, StorageFullError, 1, "finish", "disk full")
    assert files_of(path) == []
    with pytest.raises(bytecheckpoint.CheckpointNotFoundError):
        load_step(path)


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_fail_at_once(path: Path, faults: Faults, mode: str) -> None:
    world = saved(path, 3)
    faults.add("write", StorageFullError("disk full"), times=-1)
    got = save_all(world, path, 2, faults=faults, **MODES[mode])
    assert all(type(raised) is StorageFullError for raised in got), got
    assert load_step(path) == 1
    check_recovery(world, path, mode)


@pytest.mark.parametrize("mode", MODES)
def test_an_error_that_no_backend_should_raise(path: Path, faults: Faults, mode: str) -> None:
    world = saved(path)
    faults.add("write", RuntimeError("a bug in the backend"), rank=1)
    got = save_all(world, path, 2, faults=faults, **MODES[mode])
    assert type(got[0]) is CheckpointError and "rank 1, write: RuntimeError: a bug in the backend" in str(got[0])
    assert "a bug in the backend" in str(got[1])
    assert load_step(path) == 1
    check_recovery(world, path, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_publish_that_fails_after_the_catalog_has_its_name(path: Path, faults: Faults, mode: str) -> None:
    """The storage replaces the catalog and reports an error. The files stay, because the catalog names them."""
    world = saved(path)
    rule = faults.add("publish", StorageUnavailableError("cannot sync the folder: Input/output error"), lose=True)
    got = save_all(world, path, 2, faults=faults, **MODES[mode])
    assert rule.hits == 1
    assert all(type(raised) is StorageUnavailableError for raised in got), got
    assert load_step(path) == 2
    check_recovery(world, path, mode)
    assert len([name for name in files_of(path) if "model/rank" in name]) == 2


@pytest.mark.parametrize("mode", quick(MODES, every=2))
def test_a_commit_that_comes_after_the_time_limit_keeps_its_files(path: Path, faults: Faults, mode: str) -> None:
    world = saved(path)
    gate = threading.Event()
    rule = faults.add("publish", hold=gate)
    got = save_all(world, path, 2, timeout=1.5, faults=faults, **MODES[mode])
    assert all(type(raised) is CheckpointTimeoutError for raised in got), got
    assert load_step(path) == 1
    gate.set()
    while load_step(path) != 2:
        time.sleep(0.02)
    assert rule.hits == 1


@pytest.mark.parametrize(
    ("error", "call"),
    crossed([StorageUnavailableError("gone"), RuntimeError("a bug"), OSError("raw")], ["list", "delete"]),
)
def test_old_files_that_cannot_be_removed_do_not_fail_the_save(
    path: Path, faults: Faults, call: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    world = saved(path)
    before = files_of(path)
    faults.add(call, error)
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        succeeded(save_all(world, path, 2, faults=faults))
    assert any("old files could not be removed" in record.getMessage() for record in caplog.records)
    assert load_step(path) == 2
    succeeded(save_all(world, path, 3))
    assert len(files_of(path)) == len(before), "the next save removes them"


@pytest.mark.parametrize("look", ["nothing", "result", "restorable", "asyncio"])
def test_a_failed_asynchronous_save_is_logged_and_raised_once(
    path: Path, faults: Faults, caplog: pytest.LogCaptureFixture, look: str
) -> None:
    """By the handle, or, if nobody has asked the handle, by the next save."""
    faults.add("write", StorageFullError("disk full"))
    with caplog.at_level(logging.ERROR, "bytecheckpoint"):
        handle = bytecheckpoint.save(faults.at(path), states(step=1), async_checkpoint=True)
        assert handle.staged.result(20) is None, "a success that was seen is no failure that was seen"
        concurrent.futures.wait([handle.committed], 20)
    assert any("disk full" in record.getMessage() and record.levelno == logging.ERROR for record in caplog.records)
    if look == "result":
        with pytest.raises(StorageFullError):
            handle.result(20)
    elif look == "restorable":
        assert isinstance(handle.restorable.exception(), StorageFullError)
    elif look == "asyncio":

        async def wait() -> None:
            await asyncio.wrap_future(handle.committed)

        with pytest.raises(StorageFullError):
            asyncio.run(wait())
    if look == "nothing":
        with pytest.raises(StorageFullError, match="earlier asynchronous save failed"):
            bytecheckpoint.save(path, states(step=2))
    bytecheckpoint.save(path, states(step=3))
    assert load_step(path) == 3


@pytest.mark.parametrize("mode", ["async", "background"])
def test_slow_storage_does_not_lengthen_the_call(path: Path, faults: Faults, mode: str) -> None:
    bytecheckpoint.save(path, states(step=1), **MODES[mode]).result(20)
    gate = threading.Event()
    rule = faults.add("write", hold=gate, times=-1)
    handle = bytecheckpoint.save(faults.at(path), states(step=2), **MODES[mode])
    handle.staged.result(20)
    assert not handle.done(), "the call returned, and the state was staged, before storage took a byte"
    time.sleep(0.2)
    gate.set()
    report = handle.result(30)
    assert rule.hits >= 5
    assert report.blocking_seconds <= report.total_seconds - 0.2


def test_saves_queue_behind_a_slow_one_and_all_commit(path: Path, faults: Faults) -> None:
    faults.add("publish", delay=0.2, times=-1)
    handles = [
        bytecheckpoint.save(faults.at(path), states(step=step), async_checkpoint=True, staging="background")
        for step in range(1, 4)
    ]
    generations = [handle.result(20).generation for handle in handles]
    assert load_step(path) == 3
    assert {name.split(".")[1] for name in files_of(path) if "-" in name} == {generations[-1]}


def test_result_with_a_time_limit_leaves_the_save_running(path: Path, faults: Faults) -> None:
    gate = threading.Event()
    faults.add("publish", hold=gate)
    handle = bytecheckpoint.save(faults.at(path), states(step=1), async_checkpoint=True)
    with pytest.raises(CheckpointTimeoutError, match="still running"):
        handle.result(0.1)
    assert handle.staged.done() and not handle.done()
    gate.set()
    assert handle.result(20).bytes_written > 0
    assert load_step(path) == 1


@pytest.mark.parametrize(("mode", "loss"), crossed(list(MODES), [(0, "hangs"), (2, "dies"), (0, "dies"), (2, "hangs")]))
def test_a_rank_that_hangs_or_dies_is_named_in_time(path: Path, loss: tuple[int, str], mode: str) -> None:
    victim, silent = loss[0], loss[1] == "hangs"
    world = saved(path, 3)
    begun = time.monotonic()

    def one(collective: Collective) -> Any:
        if collective.rank == victim:
            world.kill(victim, silent=silent)
            return None
        return bytecheckpoint.save(path, states(collective.rank, 3, 2), timeout=1.0, **MODES[mode]).result(30)

    got = outcomes(world, one)
    took = time.monotonic() - begun
    for rank in {0, 1, 2} - {victim}:
        assert type(got[rank]) in (PeerLostError, CheckpointTimeoutError), got[rank]
        # Others may be late too on a busy machine.
        assert re.search(rf"ranks? ([\d, ]*\b)?{victim}\b", str(got[rank])), got[rank]
    assert took < 40, f"survivors needed {took:.1f} s"
    assert load_step(path) == 1
    # A new world, as a restarted job is.
    succeeded(save_all(ThreadWorld(2), path, 5))
    assert load_step(path) == 5
    assert len([name for name in files_of(path) if "model/rank" in name]) == 2


@pytest.mark.parametrize("call", ["open", "read_into"])
@pytest.mark.parametrize(("rank", "overlap"), crossed([0, 1], [True, False]))
def test_a_read_that_fails_on_one_rank_fails_the_load_on_every_rank(
    path: Path, faults: Faults, call: str, rank: int, overlap: bool
) -> None:
    world = saved(path)
    rule = faults.add(call, StorageUnavailableError("the device is gone"), rank=rank)

    got = load_all(world, path, overlap_loading=overlap, faults=faults)
    assert rule.hits == 1
    for who, raised in enumerate(got):
        assert type(raised) is StorageUnavailableError, f"rank {who}: {raised!r}"
        assert "the device is gone" in str(raised)
        if who != rank:
            assert f"rank {rank}" in str(raised)
    assert load_all(world, path, overlap_loading=overlap) == [1, 1], "the next load works"


def test_a_load_that_waits_for_a_hung_rank_ends(path: Path) -> None:
    world = saved(path, 3)

    def one(collective: Collective) -> Any:
        if collective.rank == 2:
            world.kill(2)
            return None
        return bytecheckpoint.load(path, states(collective.rank, 3), timeout=1.0)

    begun = time.monotonic()
    got = outcomes(world, one)
    assert time.monotonic() - begun < 40
    assert type(got[0]) is CheckpointTimeoutError and "rank 2" in str(got[0])
    assert type(got[1]) in (CheckpointTimeoutError, PeerLostError)


@pytest.mark.parametrize("error", [StorageFullError("disk full"), RuntimeError("a bug")])
def test_wrong_states_on_one_rank_fail_the_save_everywhere(path: Path, error: Exception) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise error

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    world = saved(path)

    def one(collective: Collective) -> Any:
        mine = states(collective.rank, 2, 2)
        if collective.rank == 1:
            mine["scheduler"] = Broken()
        return bytecheckpoint.save(path, mine).result(20)

    got = outcomes(world, one)
    assert got[1] is error
    assert isinstance(got[0], CheckpointError) and "rank 1" in str(got[0]) and str(error) in str(got[0])
    assert load_step(path) == 1
    succeeded(save_all(world, path, 3))
