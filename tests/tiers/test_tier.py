"""`tier+URL`: saves are in memory first and in the durable storage soon; loads take the nearest sound copy."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageConflictError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    UsageError,
)
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.collectives import current
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.posix.storage import PosixStorage
from bytecheckpoint.storage.testing import StorageTests
from bytecheckpoint.storage.testing.wrappers import FaultRule, MeteredStorage
from bytecheckpoint.tiers.hot_folder import HotFolder
from bytecheckpoint.tiers.storage import hot_part
from bytecheckpoint.tuning import tuned
from bytecheckpoint.world import world_of
from tests.support.coded import check_steps, files_of, load_step, save_steps, states
from tests.support.damage import damage, storage_file
from tests.support.faulty_storage import Faults
from tests.support.memory import as_of_a_new_job, durable_folder, hot_folder
from tests.support.modes import MODES
from tests.support.mounts import small_tmpfs
from tests.support.processes import wait_until
from tests.support.ranks import succeeded
from tests.support.saves import load, save
from tests.support.variants import crossed


class TestConformance(StorageTests):
    @pytest.fixture
    def storage(self, run: str) -> Storage:
        return resolve(f"{run}/step")


def hot_steps(run: str) -> list[str]:
    return sorted(os.listdir(hot_folder(f"{run}/1").parent))


def away(run: str) -> StorageUnavailableError:
    """Return the error of a durable storage that does not answer."""
    return StorageUnavailableError(f"cannot reach {durable_folder(run)}: Transport endpoint is not connected")


def drain() -> None:
    """Wait for flushes and the cleanup after them."""
    world_of(current()).flusher.drain()


@pytest.fixture
def gate(faults: Faults) -> Iterator[FaultRule]:
    """A rule that holds writes to the durable folders until it is released, and lets them fail if it has an error."""
    gate = faults.add(lambda call: call in ("create", "publish"), hold=threading.Event(), times=-1)
    yield gate
    gate.error = None
    gate.release()


@pytest.mark.parametrize("writer", ["process", "thread"])
@pytest.mark.parametrize("mode", MODES)
def test_a_save_is_restorable_first_and_durable_later(run: str, gate: FaultRule, mode: str, writer: str) -> None:
    bytecheckpoint.configure(writer=writer)
    handle = bytecheckpoint.save(f"{run}/1", states(step=1), **MODES[mode])
    handle.restorable.result(60)
    assert wait_until(lambda: gate.hits > 0, 60)
    assert not handle.committed.done() and not handle.done()
    assert not (durable_folder(run) / "1" / "metadata.parquet").exists()
    assert load_step(f"{run}/1") == 1, "from memory"
    with pytest.raises(CheckpointNotFoundError):
        load_step(durable_folder(run) / "1")
    gate.release()
    report = handle.result(60)
    assert report.path == f"{run}/1" and report.phases["flush"] > 0
    assert load_step(durable_folder(run) / "1") == 1, "a checkpoint like any other"
    assert load_step(f"{run}/1") == 1
    assert command(["verify", str(durable_folder(run) / "1")]) == 0
    assert command(["verify", f"{run}/1"]) == 0


def test_other_paths_are_restorable_when_they_are_committed(tmp_path: Path) -> None:
    for options in MODES.values():
        handle = bytecheckpoint.save(tmp_path / "step", states(step=1), **options)
        handle.result(60)
        assert handle.restorable.done()


def test_a_tier_in_a_wrapper_is_flushed_too(run: str) -> None:
    storage = MeteredStorage(resolve(f"{run}/1"))
    bytecheckpoint.save(storage, states(step=1), async_checkpoint=True).result(60)
    assert load_step(durable_folder(run) / "1") == 1
    assert storage.meter.calls("publish") == 1


@pytest.mark.parametrize("how", ["flip", "extend", "memory"])
def test_the_durable_copy_is_read_in_place_of_a_damaged_hot_one(
    run: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """test_verify.py has other damage."""
    bytecheckpoint.save(f"{run}/1", states(step=1)).result(60)
    hot = hot_folder(f"{run}/1")
    if how == "memory":
        for name in files_of(hot):
            (hot / name).unlink()
    else:
        damage(storage_file(hot), how)
    assert load_step(f"{run}/1") == 1
    with bytecheckpoint.open(f"{run}/1") as checkpoint:
        assert checkpoint["model/w"][...].sum() > 0
    if how == "flip":
        assert "checksum mismatch" in caplog.text and "another copy" in caplog.text


def test_a_damaged_hot_copy_is_not_flushed(run: str, gate: FaultRule) -> None:
    handle = bytecheckpoint.save(f"{run}/1", states(step=1))
    damage(storage_file(hot_folder(f"{run}/1"), "optimizer"))
    gate.release()
    with pytest.raises(CorruptCheckpointError, match="no machine has a sound copy"):
        handle.result(60)
    assert not (durable_folder(run) / "1" / "metadata.parquet").exists()


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_flush_stops_no_save_and_is_repeated(
    run: str, gate: FaultRule, caplog: pytest.LogCaptureFixture
) -> None:
    """Restarts can use the step. The next save whose flush succeeds flushes it too."""
    gate.error = StorageFullError("cannot write here: No space left on device; free space")
    gate.release()
    handle = bytecheckpoint.save(f"{run}/1", states(step=1), async_checkpoint=True)
    drain()
    assert handle.restorable.result() is None
    assert "No space left" in caplog.text
    assert bytecheckpoint.save(f"{run}/2", states(step=2)).restorable.result(60) is None
    drain()
    with pytest.raises(StorageFullError, match=r"flush of tier\+file.*No space left"):
        handle.result()
    assert load_step(f"{run}/1") == 1
    with pytest.raises(CheckpointNotFoundError):
        load_step(durable_folder(run) / "1")
    gate.error = None
    bytecheckpoint.save(f"{run}/3", states(step=3)).result(60)
    drain()
    check_steps(durable_folder(run), 1, 2, 3)
    assert hot_steps(run) == ["3"], "the older ones are not needed any more"
    assert command(["flush", run]) == 0


def test_a_step_that_no_flush_can_take_is_tried_once(
    run: str, gate: FaultRule, caplog: pytest.LogCaptureFixture
) -> None:
    gate.release()
    gate.error = StorageUnavailableError("cannot write here: Input/output error")
    with pytest.raises(StorageUnavailableError):
        bytecheckpoint.save(f"{run}/1", states(step=1), async_checkpoint=True).result(60)
    gate.error = None
    damage(storage_file(hot_folder(f"{run}/1")))
    save_steps(run, 2, 3, 4)
    drain()
    assert caplog.text.count("which is left in memory, cannot be flushed") == 1
    assert hot_steps(run) == ["1", "4"], "it is as many steps as may be waiting"


def test_steps_that_cannot_be_flushed_do_not_fill_the_memory(run: str, gate: FaultRule) -> None:
    gate.release()
    gate.error = StorageUnavailableError("cannot write here: Input/output error")
    for step in range(1, 7):
        handle = bytecheckpoint.save(f"{run}/{step}", states(step=step), async_checkpoint=True)
        assert isinstance(handle.committed.exception(60), StorageUnavailableError)
    drain()
    assert hot_steps(run) == ["5", "6"]
    gate.error = None
    bytecheckpoint.save(f"{run}/7", states(step=7)).result(60)
    drain()
    assert sorted(os.listdir(durable_folder(run))) == ["5", "6", "7"]


def test_the_durable_storage_is_away(run: str, faults: Faults) -> None:
    faults.add(lambda call: call in ("stat", "list"), away(run), times=-1)
    handle = bytecheckpoint.save(f"{run}/1", states(step=1), async_checkpoint=True)
    handle.restorable.result(60)
    with pytest.raises(StorageUnavailableError, match="not connected"):
        handle.result(60)
    assert load_step(f"{run}/1") == 1, "the hot copy needs no durable one"
    faults.clear()
    assert command(["flush", run]) == 0
    assert load_step(durable_folder(run) / "1") == 1


def test_credentials_of_the_durable_storage_that_expire(run: str, faults: Faults) -> None:
    """The hot tier works alone until they are renewed; a storage that has refused from the start is an error."""
    refused = StorageError(f"cannot look at {durable_folder(run)}: ExpiredToken")
    faults.add("*", refused, times=-1)
    with pytest.raises(StorageError, match="ExpiredToken"):
        bytecheckpoint.save(f"{run}/1", states(step=1))
    faults.clear()
    bytecheckpoint.save(f"{run}/1", states(step=1)).result(60)
    faults.add("*", refused, times=-1)
    for step, place in ((2, "2"), (3, "1")):
        handle = bytecheckpoint.save(f"{run}/{place}", states(step=step))
        handle.restorable.result(60)
        with pytest.raises(StorageError, match="ExpiredToken"):
            handle.result(60)
        assert load_step(f"{run}/{place}") == step
    faults.clear()
    bytecheckpoint.save(f"{run}/4", states(step=4)).result(60)
    drain()
    check_steps(durable_folder(run), 2, 4)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_restorable_although_an_earlier_flush_takes_long(run: str, gate: FaultRule, mode: str) -> None:
    """A synchronous save, too, does not wait for the flush of the one before it."""
    first = bytecheckpoint.save(f"{run}/1", states(step=1), **MODES[mode])
    assert wait_until(lambda: gate.hits > 0, 60)
    second = bytecheckpoint.save(f"{run}/2", states(step=2), **MODES[mode])
    second.restorable.result(20)
    assert not first.committed.done() and load_step(f"{run}/2") == 2
    gate.release()
    assert second.result(60).path == f"{run}/2" and first.done()


def test_waiting_steps_are_bounded(run: str, gate: FaultRule, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bytecheckpoint.configure(tier_waiting=2)
    first, _ = (bytecheckpoint.save(f"{run}/{step}", states(step=step), async_checkpoint=True) for step in (1, 2))
    first.restorable.result(60)
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(bytecheckpoint.save, f"{run}/3", states(step=3), async_checkpoint=True)
        time.sleep(0.7)
        assert not third.done(), "a third unflushed step must wait"
        assert f"the save of {run}/3 waits, because these are not durable yet: {run}/1, {run}/2" in caplog.text
        gate.release()
        report = third.result(60).result(60)
    assert report.phases["wait"] > 0.5 and report.blocking_seconds > 0.5
    check_steps(durable_folder(run), 1, 2, 3)


def test_a_path_is_replaced_only_after_its_flush(run: str, gate: FaultRule) -> None:
    bytecheckpoint.save(f"{run}/s", states(step=1), async_checkpoint=True)
    assert wait_until(lambda: gate.hits > 0, 60)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(bytecheckpoint.save, f"{run}/s", states(step=2), async_checkpoint=True)
        time.sleep(0.5)
        assert not second.done()
        gate.release()
        second.result(60)
    for step in (3, 4):
        bytecheckpoint.save(f"{run}/s", states(step=step)).result(60)
        assert load_step(f"{run}/s") == step
        assert load_step(durable_folder(run) / "s") == step
        assert len(files_of(durable_folder(run) / "s")) == 6


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_memory_is_bounded(run: str, keep: int) -> None:
    bytecheckpoint.configure(tier_keep=keep)
    for step in range(1, 6):
        handle = bytecheckpoint.save(f"{run}/{step}", states(step=step))
    handle.result(60)
    wanted = [str(step) for step in range(6 - keep, 6)]
    assert wait_until(lambda: hot_steps(run) == wanted, 20), hot_steps(run)
    check_steps(run, *range(1, 6))


def test_a_checkpoint_that_was_replaced_without_the_tier_counts(run: str) -> None:
    bytecheckpoint.save(f"{run}/s", states(step=1)).result(60)
    bytecheckpoint.save(durable_folder(run) / "s", states(step=2))
    assert load_step(f"{run}/s") == 2
    bytecheckpoint.save(f"{run}/s", states(step=3)).result(60)
    assert load_step(f"{run}/s") == 3 and load_step(durable_folder(run) / "s") == 3


@pytest.mark.parametrize("replacing", [False, True])
def test_a_flush_does_not_overwrite_what_another_job_saved_meanwhile(
    run: str, gate: FaultRule, replacing: bool
) -> None:
    gate.release()
    other = durable_folder(run) / "other"
    bytecheckpoint.save(other, states(step=9))
    if replacing:
        bytecheckpoint.save(durable_folder(run) / "s", states(step=1))
    gate.hold = threading.Event()
    gate.hits = 0
    handle = bytecheckpoint.save(f"{run}/s", states(step=2), async_checkpoint=True)
    handle.restorable.result(60)
    assert wait_until(lambda: gate.hits > 0, 60)
    shutil.copytree(other, durable_folder(run) / "s", dirs_exist_ok=True)
    gate.release()
    with pytest.raises(StorageConflictError, match="another save"):
        handle.result(60)
    assert load_step(durable_folder(run) / "s") == 9
    assert load_step(f"{run}/s") == 9, "the hot copy is void"
    bytecheckpoint.save(f"{run}/s", states(step=3)).result(60)
    assert load_step(durable_folder(run) / "s") == 3
    assert len(files_of(durable_folder(run) / "s")) == 6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_a_hot_tier_without_room(
    run: str, tmp_path: Path, mode: str, writer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that do not fit go straight to the durable storage."""
    hot = tmp_path / "hot"
    with small_tmpfs(hot, "1m"):
        bytecheckpoint.configure(tier_hot=str(hot), writer=writer)
        bytecheckpoint.save(f"{run}/1", states(step=1)).result(60)
        handle = bytecheckpoint.save(f"{run}/2", states(step=2, rows=10_000), **MODES[mode])
        handle.restorable.result(60)
        assert load_step(f"{run}/2", rows=10_000) == 2
        handle.result(60)
        drain()
        assert writer == "process" or "goes straight to the durable storage: the hot tier" in caplog.text
        assert load_step(durable_folder(run) / "2", rows=10_000) == 2
        bytecheckpoint.save(f"{run}/3", states(step=3), **MODES[mode]).result(60)
        drain()
        check_steps(durable_folder(run), 1, 3)
        assert hot_steps(run) == ["3"]


def test_flushed_steps_of_any_run_make_room(run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hot = tmp_path / "hot"
    with small_tmpfs(hot, "24m"):
        bytecheckpoint.configure(tier_hot=str(hot), writer="thread", tier_keep=9)
        for step in range(6):
            path = f"{run}-{step % 2}/{step}"
            bytecheckpoint.save(path, states(step=step, rows=10_000)).result(60)
            drain()
            assert load_step(durable_folder(path), rows=10_000) == step
        assert "straight" not in caplog.text
        assert hot_steps(f"{run}-0") == ["4"] and hot_steps(f"{run}-1") == ["5"]


def test_a_step_that_makes_room_for_its_own_replacement(run: str, tmp_path: Path) -> None:
    """The step is evicted after the save has looked which one it replaces."""
    hot, rows = tmp_path / "hot", 6_000
    with small_tmpfs(hot, "7m"):
        bytecheckpoint.configure(tier_hot=str(hot), writer="thread", tier_keep=9)
        for step in (1, 2, 3):
            bytecheckpoint.save(f"{run}/latest", states(step=step, rows=rows)).result(60)
            drain()
            assert (
                load_step(f"{run}/latest", rows=rows) == load_step(durable_folder(f"{run}/latest"), rows=rows) == step
            )


def test_a_save_that_fails_leaves_nothing_in_the_durable_storage(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = tmp_path / "hot"

    def full(*_: Any) -> Any:
        raise StorageFullError("cannot publish")

    with small_tmpfs(hot, "300k"):
        bytecheckpoint.configure(tier_hot=str(hot), writer="thread")
        bytecheckpoint.save(durable_folder(f"{run}/1"), states(step=1))
        before = files_of(durable_folder(run))
        monkeypatch.setattr(HotFolder, "write_record", full)
        with pytest.raises(StorageFullError):
            bytecheckpoint.save(f"{run}/1", states(step=2, rows=10_000))
        drain()
        assert files_of(durable_folder(run)) == before
        assert load_step(f"{run}/1") == 1


@pytest.mark.parametrize("hours", [0, 5, -5])
def test_a_clock_that_is_set_back_makes_no_step_older(
    run: str, gate: FaultRule, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage is away, so the memory holds the only copies of the newest steps; an older job's clock was ahead."""
    gate.release()
    clock = time.time
    for first, seconds in ((1, 3600 * hours), (4, 0)):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: clock() + seconds)
        as_of_a_new_job(monkeypatch)
        gate.error = StorageUnavailableError("away")
        for step in range(first, first + 3):
            bytecheckpoint.save(f"{run}/{step}", states(step=step)).committed.exception(60)
        drain()
        assert hot_steps(run) == [str(first + 1), str(first + 2)]
    as_of_a_new_job(monkeypatch)
    gate.error = None
    bytecheckpoint.save(f"{run}/7", states(step=7)).result(60)
    drain()
    assert hot_steps(run) == ["7"]
    check_steps(durable_folder(run), 5, 6, 7)


def test_flushed_steps_of_earlier_runs_are_evicted(run: str, gate: FaultRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job saves to a folder of its own. What is not durable stays."""
    gate.release()
    for job, error in enumerate([None, StorageUnavailableError("away"), None]):
        gate.error = error
        as_of_a_new_job(monkeypatch)
        bytecheckpoint.save(f"{run}-{job}/1", states(step=1)).committed.exception(60)
        drain()
    assert [hot_folder(f"{run}-{job}/1").exists() for job in range(3)] == [False, True, True]


def test_eviction_reads_no_catalogs_of_other_runs(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be many, and large ones; the records decide which steps go."""
    for job in range(3):
        bytecheckpoint.save(f"{run}-{job}/1", states(step=1)).result(60)
    drain()
    read: list[str] = []
    real = HotFolder.catalog
    monkeypatch.setattr(HotFolder, "catalog", lambda folder: read.append(folder._url) or real(folder))
    bytecheckpoint.save(f"{run}-2/2", states(step=2)).result(60)
    drain()
    assert read and not [url for url in read if f"{run.rpartition('/')[2]}-2" not in url]


def test_an_incomplete_hot_step_does_not_count(run: str, gate: FaultRule) -> None:
    """The error says that files are missing."""
    bytecheckpoint.save(f"{run}/1", states(step=1))
    for file in (hot_folder(f"{run}/1") / "optimizer").iterdir():
        file.unlink()
    with pytest.raises(
        CheckpointNotFoundError, match=r"tier\+file.* of the step in memory \d files are on other machines"
    ):
        load_step(f"{run}/1")
    assert command(["inspect", f"{run}/1"]) == 2
    gate.error = StorageUnavailableError("cannot write here")
    gate.release()


def test_what_killed_saves_leave_in_memory_is_removed_by_the_next_job(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytecheckpoint.save(f"{run}/9", states(step=9)).result(60)
    drain()
    steps = hot_folder(f"{run}/9").parent
    old_file = storage_file(steps / "9")
    remains = [
        steps / "folder only" / "model",
        steps / "publishing" / ".publishing-0123456789abcdef",
        steps / "uncommitted" / "model" / old_file.name,
        steps / "9" / "model" / f"{old_file.name.split('.')[0]}.{'0' * 24}.safetensors",  # was replaced
        steps / "9" / ".publishing-0123456789abcdef",
    ]
    for place in remains:
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.name == "model":
            place.mkdir()
        else:
            shutil.copy(old_file, place)
    for folder, _, names in os.walk(steps, topdown=False):
        for path in (*(os.path.join(folder, name) for name in names), folder):
            os.utime(path, (1e9, 1e9))
    (steps / "somebody else's").mkdir()
    os.utime(steps / "somebody else's", (1e9, 1e9))
    (steps / "somebody else's" / "notes.txt").write_text("not ours")
    bytecheckpoint.configure(tier_keep=2)
    as_of_a_new_job(monkeypatch)
    bytecheckpoint.save(f"{run}/10", states(step=10)).result(60)
    drain()
    assert sorted(os.listdir(steps)) == ["10", "9", "somebody else's"]
    assert not any(place.exists() for place in remains)
    for step in (9, 10):
        hot = hot_part(resolve(f"{run}/{step}"))
        named = {file.name for file in read_catalog(hot)[0].files}
        assert {name for name, _ in hot.list()} == {*named, "metadata.parquet"}
        shutil.rmtree(durable_folder(run) / str(step))
        assert load_step(f"{run}/{step}") == step


@tuned(tier_save_timeout=0.3, tier_load_timeout=0.3)
@pytest.mark.parametrize("lost", ["record", "catalog for a moment"])
def test_a_step_that_cannot_be_judged_is_no_leftover(
    run: str, gate: FaultRule, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The next job does not know whether it is flushed, or what it needs; the only copy stays, and `flush` takes it."""
    gate.release()
    gate.error = StorageUnavailableError("away")
    bytecheckpoint.save(f"{run}/1", states(step=1)).committed.exception(60)
    drain()
    gate.error = None
    hot = hot_folder(f"{run}/1")
    for path in hot.glob("tier-*.json" if lost == "record" else "nothing"):
        path.write_bytes(b"")
    as_of_a_new_job(monkeypatch, ahead=60)
    with monkeypatch.context() as patched:
        if lost != "record":
            real = PosixStorage.read

            def read(storage: PosixStorage, name: str) -> bytes:
                if storage.root == str(hot):
                    raise StorageUnavailableError(f"cannot reach {hot}")
                return real(storage, name)

            patched.setattr(PosixStorage, "read", read)
        bytecheckpoint.save(f"{run}/2", states(step=2)).result(60)
        drain()
    assert command(["flush", f"{run}/1"]) == 0
    check_steps(durable_folder(run), 1, 2)


def test_a_durable_storage_that_does_not_answer_is_not_waited_for(run: str, faults: Faults) -> None:
    bytecheckpoint.save(f"{run}/1", states(step=1)).result(60)
    hang = faults.add("stat", hold=threading.Event(), times=-1)
    begun = time.monotonic()
    assert load_step(f"{run}/1") == 1
    handle = bytecheckpoint.save(f"{run}/2", states(step=2), async_checkpoint=True)
    handle.restorable.result(60)
    assert time.monotonic() - begun < 20
    hang.release()
    handle.result(60)


def test_a_step_that_is_removed_leaves_nothing(run: str) -> None:
    bytecheckpoint.save(f"{run}/1", states(step=1)).result(60)
    storage = resolve(f"{run}/1")
    storage.delete([name for name, _ in storage.list()])
    assert not hot_folder(f"{run}/1").exists()
    assert files_of(durable_folder(run) / "1") == []


@pytest.mark.parametrize("name", ["run 7 %20", "a:b", "100%41", "ünï-文" * 20, "#x?y=z&", "back\\slash"])
def test_steps_of_odd_names(run: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        bytecheckpoint.save(f"{run}/{name}{step}", states(step=step)).result(60)
    drain()
    assert resolve(run).folders() == sorted(f"{name}{step}" for step in (1, 2))
    assert command(["ls", run]) == 0
    assert capsys.readouterr().out.count("committed") == 2
    for step in (1, 2):
        assert load_step(f"{run}/{name}{step}") == step
    assert len(hot_steps(run)) == 1


# --- several ranks on one machine, other world sizes ----------------------------------------------------------------


@pytest.mark.parametrize(("worlds", "mode"), crossed([(3, 2), (2, 4), (4, 1)], list(MODES)))
def test_another_world_size(run: str, worlds: tuple[int, int], mode: str) -> None:
    ranks, others = worlds
    succeeded(save(f"{run}/1", 1, ranks, rows=24, **MODES[mode]))
    assert load(f"{run}/1", others, rows=24) == {1}
    assert load_step(durable_folder(run) / "1") == 1
    for file in (durable_folder(run) / "1" / "model").iterdir():
        file.unlink()
    assert load(f"{run}/1", others, rows=24) == {1}, "memory alone"


# --- the command line ----------------------------------------------------------------------------------------------


def test_ls_inspect_and_open(run: str, gate: FaultRule, capsys: pytest.CaptureFixture[str]) -> None:
    bytecheckpoint.save(f"{run}/1", states(step=1))
    assert command(["ls", run]) == 0
    out = capsys.readouterr().out
    assert "committed" in out and " 1 " in f" {out} ".replace("\n", " ")
    assert command(["inspect", f"{run}/1"]) == 0
    with bytecheckpoint.open(f"{run}/1") as checkpoint:
        assert checkpoint["extra_states/step"] == 1
    gate.release()


def test_ls_while_the_durable_storage_is_away(
    run: str, gate: FaultRule, faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps of this machine are listed, and the error of the durable storage is printed."""
    bytecheckpoint.save(f"{run}/1", states(step=1))
    faults.add(lambda call: call in ("read", "list", "stat"), away(run), times=-1)
    hang = faults.add("folders", away(run), hold=threading.Event(), times=-1)
    capsys.readouterr()
    with tuned(tier_load_timeout=0.3):
        assert command(["ls", run]) == 1
    assert f"{run}: no answer within 0.3 s" in capsys.readouterr().err
    hang.release()
    assert command(["ls", run]) == 1
    said = capsys.readouterr()
    assert "committed" in said.out
    assert "only this machine's hot tier is listed" in said.err
    assert f"{run}: cannot reach {durable_folder(run)}: Transport endpoint" in said.err
    assert command(["ls", run, "--json"]) == 1
    listed = json.loads(capsys.readouterr().out)
    assert [(step["name"], step["status"]) for step in listed["checkpoints"]] == [("1", "committed")]
    assert "cannot reach" in listed["unreachable"] and listed["path"] == run
    assert command(["ls", f"{run}/1", "--json"]) == 1, "it is hot, but may have been replaced"
    listed = json.loads(capsys.readouterr().out)
    assert listed["status"] == "committed" and "cannot reach" in listed["unreachable"]
    for path in (f"{run}/nothing", str(durable_folder(run))):
        assert command(["ls", path]) == 2
        assert "not connected" in capsys.readouterr().err
    gate.error = StorageUnavailableError("cannot write here")
    gate.release()


def test_the_hot_tier_must_be_local(tmp_path: Path) -> None:
    bytecheckpoint.configure(tier_hot="fsspec+memory://x")
    with pytest.raises(UsageError, match="tier_hot"):
        resolve(f"tier+file://{tmp_path}")
    bytecheckpoint.configure(tier_hot=str(tmp_path / "nvme"))
    bytecheckpoint.save(f"tier+file://{tmp_path}/durable/1", states(step=1)).result(60)
    assert (tmp_path / "nvme" / "file").is_dir()
    assert load_step(tmp_path / "durable" / "1") == 1


def test_errors_name_the_tier(run: str) -> None:
    with pytest.raises(CheckpointError, match=r"tier\+file"):
        load_step(f"{run}/nothing")
