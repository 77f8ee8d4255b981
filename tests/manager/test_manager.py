"""`CheckpointManager`: what a run saves, keeps and goes on from, on one rank and on several."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint import CheckpointManager
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageConflictError,
    UsageError,
)
from bytecheckpoint.manager import (
    AtSteps,
    Best,
    Cadence,
    Every,
    Interval,
    Latest,
    Preemption,
    Retention,
    SaveOptions,
)
from bytecheckpoint.manager.run_folder import RunFolder, step_folder
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.tools.removal import collect_garbage
from tests.support.damage import damage, storage_file
from tests.support.faulty_storage import Faults
from tests.support.memory import hot_tier
from tests.support.runs import Run, eventually, numbers, save_steps
from tests.support.worlds import Worlds


def test_a_run_that_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("of a person")
    (tmp_path / "step_old").mkdir()
    run = Run()
    with CheckpointManager(tmp_path, run.states(), every=10, keep=[Latest(2), Every(40), Best("loss")]) as manager:
        assert manager.restore_latest() is None and manager.restored is None and manager.latest() is None
        for _ in range(95):
            step = run.step()
            handle = manager.maybe_save(step, {"loss": abs(step - 20), "seen": torch.tensor(step)})
            assert (handle is not None) == (step % 10 == 0)
        eventually(manager, [20, 40, 80, 90])
        best, latest = manager.best("loss"), manager.latest()
        assert best is not None and best.step == 20 and best.metrics == {"loss": 0.0, "seen": 20.0}
        assert latest is not None and latest.path == step_folder(str(tmp_path), 90)
        assert abs(latest.created - time.time()) < 600 and not latest.pinned
    assert {path.name for path in tmp_path.iterdir()} >= {"notes.txt", "step_old"}

    again = Run()
    with CheckpointManager(tmp_path, again.states(), every=Cadence(10, at_end=True)) as manager:
        assert manager.restore_latest() == manager.restored and manager.step == 90
        again.check(90)
        assert manager.maybe_save(again.step()) is None
    assert numbers(manager) == [20, 40, 80, 90, 91]
    with CheckpointManager(tmp_path, again.states()) as manager:
        assert manager.restore(40).path == step_folder(str(tmp_path), 40) and manager.step == 40
        again.check(40)
        with pytest.raises(CheckpointNotFoundError):
            manager.restore(41)


def rank_run(collective: Collective, root: Path, steps: int, **options: Any) -> tuple[int, list[int]]:
    """Go on with a run for some steps; return where it began, and the steps that were saved."""
    run = Run(collective)
    saved = []
    with CheckpointManager(root, run.states(), **options) as manager:
        manager.restore_latest()
        start = manager.step
        run.check(start)
        for _ in range(steps):
            step = run.step()
            time.sleep(0.01)
            saved += [step] if manager.maybe_save(step) is not None else []
            collective.barrier(f"{id(root)}/{start}/{step}", timeout=60)
    return start, saved


@pytest.mark.parametrize("asynchronous", [True, False])
def test_ranks(tmp_path: Path, asynchronous: bool) -> None:
    save_options = SaveOptions(async_checkpoint=asynchronous)
    options: dict[str, Any] = {"every": 4, "keep": 2, "save_options": save_options}
    assert ThreadWorld(3).run(rank_run, tmp_path, 10, **options, timeout=60) == [(0, [4, 8])] * 3
    assert ThreadWorld(3).run(rank_run, tmp_path, 9, **options, timeout=60) == [(8, [12, 16])] * 3


def test_the_clock_of_rank_0_counts(tmp_path: Path) -> None:
    begun = time.monotonic()
    found = ThreadWorld(3).run(rank_run, tmp_path, 60, every=timedelta(seconds=0.1), timeout=60)
    assert found[0] == found[1] == found[2]
    assert 2 <= len(found[0][1]) <= (time.monotonic() - begun) / 0.1 + 1


# --- what cannot be loaded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flip", "cut", "remove", "catalog", "uncommitted"])
def test_a_damaged_step_is_passed_over(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1, 2, 3)
    newest = Path(step_folder(str(tmp_path), 3))
    if how == "catalog":
        (newest / "metadata.parquet").write_bytes(b"PAR1 nonsense")
    elif how == "uncommitted":
        (newest / "metadata.parquet").unlink()
    else:
        damage(storage_file(newest), how)
    run = Run()
    with CheckpointManager(tmp_path, run.states()) as manager:
        restored = manager.restore_latest()
        assert restored is not None and restored.step == 2 and restored.report.bytes_read > 0
        assert list(restored.skipped) == ([] if how == "uncommitted" else [3])
        run.check(2)
    assert ("step 3 cannot be loaded, trying an older one" in caplog.text) == (how != "uncommitted")


def test_a_run_does_not_begin_anew_because_all_steps_are_damaged(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        damage(storage_file(Path(step_folder(str(tmp_path), step))), "cut")
    with (
        CheckpointManager(tmp_path, Run().states()) as manager,
        pytest.raises(CorruptCheckpointError, match=r"none of the 2 steps.* can be loaded: step 2: .*; step 1: "),
    ):
        manager.restore_latest()


def test_ranks_pass_over_a_step_together(tmp_path: Path) -> None:
    ThreadWorld(3).run(rank_run, tmp_path, 8, every=4, timeout=60)
    damage(storage_file(Path(step_folder(str(tmp_path), 8)), rank="00001"))
    assert ThreadWorld(3).run(rank_run, tmp_path, 5, every=4, timeout=60) == [(4, [8])] * 3


def test_a_step_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    with (
        CheckpointManager(tmp_path, {"model": {"other": torch.zeros(3)}}) as manager,
        pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match="other"),
    ):
        manager.restore_latest()


# --- deletion -------------------------------------------------------------------------------------------------------------


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_readers_may_end_before_the_files_go(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    doomed = Path(step_folder(str(tmp_path), 1))
    before = files(doomed)
    reader = bytecheckpoint.open(doomed)
    run = Run()
    with CheckpointManager(tmp_path, run.states(), keep=Retention(1, grace=600)) as manager:
        manager.save(2).result(60)
        eventually(manager, [2])
        assert {*files(doomed)} > {*before} - {"metadata.parquet"}
        assert torch.equal(reader["model/part_0"][:], torch.ones(50))
        with pytest.raises(CheckpointNotFoundError):
            bytecheckpoint.load(doomed, Run().states())
    # The job ends before the second phase, and the next one is not in a hurry either.
    with CheckpointManager(tmp_path, run.states(), keep=Retention(1, grace=600)) as manager:
        manager.save(3).result(60)
        eventually(manager, [3])
    assert files(doomed)
    for path in doomed.rglob("*"):
        os.utime(path, (1, 1))
    with CheckpointManager(tmp_path, run.states(), keep=Retention(1, grace=600)) as manager:
        manager.save(4).result(60)
        eventually(manager, [4])
    assert not doomed.exists(), files(doomed)


def test_a_deletion_that_was_begun_does_not_touch_a_newer_save_of_the_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, keep=1)
    folder = Path(step_folder(str(tmp_path), 1))
    run = Run()
    with CheckpointManager(tmp_path, run.states(), keep=Retention(1, grace=600)) as manager:
        manager.save(1).result(60)
        manager.save(3).result(60)
        eventually(manager, [2, 3])
    with CheckpointManager(tmp_path, run.states(), keep=Retention(grace=600)) as manager:
        manager.save(1).result(60)
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    collect_garbage(str(folder), older_than=600)
    bytecheckpoint.load(folder, Run().states())


def test_pins_stay(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    with CheckpointManager(tmp_path, Run().states()) as manager:
        manager.pin(1)
        with pytest.raises(CheckpointNotFoundError, match="only those can be pinned"):
            manager.pin(7)
    save_steps(tmp_path, 3, 4, keep=1)
    assert [(info.step, info.pinned) for info in manager.steps()] == [(1, True), (4, False)]
    manager.unpin(1)
    save_steps(tmp_path, 5, keep=1)
    assert numbers(manager) == [5] and not (tmp_path / "step_00000001").exists()


def test_the_end_waits_for_the_last_deletion(tmp_path: Path) -> None:
    """The thread that ends a save wakes waiting threads before it begins the work that follows a commit."""

    class Late(Interval):
        def learn(self, stall: float, write: float) -> None:
            time.sleep(0.5)

    save_steps(tmp_path, 1, 2, keep=1, every=Late(timedelta(hours=1)))
    assert [info.step for info in RunFolder(tmp_path).steps()] == [2]


def test_nothing_is_deleted_unless_something_whole_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1, 2)
    folder = RunFolder(tmp_path)
    folder.take_over()
    damage(storage_file(Path(step_folder(str(tmp_path), 2))), "cut")
    assert folder.clean([Latest(1)], 0) == []
    assert "no step of" in caplog.text and "is whole: none is deleted" in caplog.text
    assert [info.step for info in folder.steps()] == [1, 2]
    assert folder.clean([Latest(1), Every(1)], 0) == []


def test_a_metric_that_is_no_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step, loss in enumerate((3.0, math.nan, math.inf, "low", torch.zeros(2), 10**400, 4.0), 1):
        save_steps(tmp_path, step, metrics={"loss": loss}, keep=[Best("loss")])
    assert [info.step for info in RunFolder(tmp_path).steps()] == [1, 7]
    assert caplog.text.count("is no candidate for the best") == 5 and "the metric loss is nan at step 2" in caplog.text


def test_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    """Of a run that begins from a step of another one."""
    save_steps(tmp_path / "other", 1)
    linked, killed = tmp_path / "other" / "step_00000001", tmp_path / "other" / "step_00000002"
    shutil.copytree(linked, killed, ignore=shutil.ignore_patterns("metadata.parquet", "extra*"))
    for path in killed.rglob("*"):
        os.utime(path, (1, 1))
    (tmp_path / "run").mkdir()
    for folder in (linked, killed):
        (tmp_path / "run" / folder.name).symlink_to(folder)
    before = files(tmp_path / "other")
    save_steps(tmp_path / "run", 3, 4, keep=1, restore=True)
    assert [info.step for info in RunFolder(tmp_path / "run").steps()] == [1, 4]
    assert files(tmp_path / "other") == before


def test_a_step_of_the_run_that_a_link_leads_to_stays(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    (tmp_path / "best").symlink_to("step_00000001")
    (tmp_path / "step_00000009").symlink_to(tmp_path / "best")
    (tmp_path / "weights").symlink_to(tmp_path / "step_00000003" / "model")
    (tmp_path / "nowhere").symlink_to("gone")
    for step in (5, 6):
        save_steps(tmp_path, step, keep=1)
    (tmp_path / "step_00000009").unlink()
    assert [info.step for info in RunFolder(tmp_path).steps()] == [1, 3, 6]
    bytecheckpoint.load(tmp_path / "best", Run().states())
    (tmp_path / "best").unlink()
    save_steps(tmp_path, 7, keep=1)
    assert [info.step for info in RunFolder(tmp_path).steps()] == [3, 7]


# --- two managers ---------------------------------------------------------------------------------------------------------


def test_the_older_of_two_managers_gives_up(tmp_path: Path) -> None:
    def run(collective: Collective) -> str:
        run = Run(collective)
        with CheckpointManager(tmp_path, run.states(), keep=2, every=5) as manager:
            for _ in range(2000):
                step = run.step()
                if step == 7 and collective.rank == 0:
                    thread = threading.Thread(target=save_steps, args=(tmp_path, 1))
                    thread.start()
                    thread.join()
                try:
                    manager.maybe_save(step)
                except StorageConflictError as error:
                    return f"{step} {error}"
                collective.barrier(f"step {step}", timeout=60)
        return ""

    first, second = ThreadWorld(2).run(run, timeout=120)
    assert first == second and f"another job manages {tmp_path}: process {os.getpid()} on " in first


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_of_two_jobs_that_begin_at_once_one_goes_on(
    tmp_path: Path, on_error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is the other one's step that is committed where both save one."""
    together = threading.Barrier(2)
    faults = Faults().install(monkeypatch)
    faults.add("publish", name=CATALOG_NAME, times=2, before=lambda: together.wait(30))

    def run(collective: Collective) -> str:
        run = Run(collective)
        try:
            with CheckpointManager(
                tmp_path, run.states(), every=4, keep=3, save_options=SaveOptions(on_error=on_error)
            ) as manager:
                for _ in range(100):
                    manager.maybe_save(run.step())
                    time.sleep(0.01)
        except StorageConflictError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        ended = [*pool.map(lambda _: ThreadWorld(2).run(run, timeout=120), range(2))]
    (loser,) = [job for job in ended if any(job)]
    assert all(f"another job manages {tmp_path}: process " in told for told in loser) and ["", ""] in ended
    assert [info.step for info in RunFolder(tmp_path).steps()] == [92, 96, 100]
    assert ThreadWorld(2).run(rank_run, tmp_path, 0, timeout=60) == [(100, [])] * 2


# --- failures and overlaps ------------------------------------------------------------------------------------------------


@pytest.fixture
def unwritable(tmp_path: Path) -> Path:
    """A run whose step 2 cannot be saved: a file is in the place of its folder."""
    (tmp_path / "step_00000002").write_text("in the way")
    return tmp_path


@pytest.mark.parametrize("seen", [True, False])
def test_a_failure_is_told_once(unwritable: Path, seen: bool) -> None:
    run = Run()
    with CheckpointManager(unwritable, run.states(), every=2) as manager:
        handle = manager.maybe_save(2)
        assert handle is not None
        while not handle.done():
            time.sleep(0.01)
        with pytest.raises(CheckpointError, match="step_00000002"):
            handle.result() if seen else manager.maybe_save(3)
        assert manager.maybe_save(3) is None
        handle = manager.maybe_save(4)
        assert handle is not None
        handle.result(60)
        manager.maybe_save(5)
    assert numbers(manager) == [4]


def test_a_failure_is_told_at_the_end(unwritable: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="step_00000002"),
        CheckpointManager(unwritable, Run().states(), every=2) as manager,
    ):
        manager.maybe_save(2)


def test_failures_may_be_warnings(unwritable: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = SaveOptions(on_error="warn")
    save_steps(unwritable, 1, save_options=options)
    run = Run()
    with CheckpointManager(unwritable, run.states(), every=1, save_options=options) as manager:
        for step in (1, 2, 3):
            manager.maybe_save(step)
    assert numbers(manager) == [1, 3] and "the save of step 2 failed" in caplog.text
    options = SaveOptions(on_error="warn", async_checkpoint=False)
    with CheckpointManager(unwritable, run.states(), save_options=options) as manager:
        assert manager.save(2) is None


@pytest.mark.parametrize("overlap", ["wait", "skip", "fail"])
def test_saves_that_overlap(tmp_path: Path, overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(collective: Collective) -> list[int]:
        run = Run(collective)
        saved = []
        with CheckpointManager(tmp_path, run.states(), every=Cadence(1, overlap=overlap)) as manager:
            for _ in range(3):
                step = run.step()
                handle = None
                try:
                    handle = manager.maybe_save(step)
                except UsageError as error:
                    refused.append(str(error))
                if handle is not None:
                    saved.append(step)
            go.set()
        return saved

    go, refused = threading.Event(), []
    if overlap != "wait":
        Faults().install(monkeypatch).add("publish", name=CATALOG_NAME, times=-1, hold=go)
    found = ThreadWorld(2).run(run, timeout=60)
    assert found == [[1, 2, 3] if overlap == "wait" else [1]] * 2
    wanted = [f"the save of step 1 is still being written at step {step}" for step in (2, 2, 3, 3)]
    assert sorted(refused) == (wanted if overlap == "fail" else [])


@pytest.mark.parametrize("which", ["latest", "step"])
def test_a_restore_finds_the_save_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Its own, and one of a manager that an exception has ended: the program tries again in the same process."""
    Faults().install(monkeypatch).add("publish", name=CATALOG_NAME, before=lambda: time.sleep(0.5))
    states = {"value": torch.arange(3)}
    CheckpointManager(tmp_path, states).save(1)
    manager = CheckpointManager(tmp_path, states)
    for step in (1, 2):
        manager.restore_latest() if which == "latest" else manager.restore(step)
        assert manager.step == step
        manager.save(2)
    manager.close()


def test_a_manager_that_was_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(tmp_path, Run().states(), every=1)
    manager.close()
    manager.close()
    manager.maybe_save(1)
    manager.wait()
    assert numbers(manager) == [1] and "was closed: it saves step 1, and deletes and notices nothing" in caplog.text


def test_bad_arguments(tmp_path: Path) -> None:
    bad: list[Callable[[], Any]] = [
        lambda: Cadence(overlap="never"),
        lambda: SaveOptions(on_error="ignore"),  # type: ignore[arg-type]
        lambda: Retention(grace=-1),
        lambda: CheckpointManager(tmp_path, {}, keep=[]),
        lambda: CheckpointManager(tmp_path, {}, every=0),
        lambda: CheckpointManager(tmp_path, {}, save_options={"staging": "background"}),  # type: ignore[arg-type]
        lambda: CheckpointManager(tmp_path, {}, load_options=SaveOptions()),  # type: ignore[arg-type]
    ]
    for make in bad:
        with pytest.raises(UsageError):
            make()
    with CheckpointManager(tmp_path, Run().states()) as manager:
        for step in (None, -1, 1.5, "3"):
            with pytest.raises(UsageError):
                manager.maybe_save(step)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"metrics=0.5: give names with numbers, such as {'loss': 0.5}"):
            manager.maybe_save(1, 0.5)  # type: ignore[arg-type]
        for call in (manager.pin, manager.unpin, manager.restore):
            with pytest.raises(UsageError, match="step='6': give an integer"):
                call("6")  # type: ignore[operator]
        for number in (np.int32(1), torch.tensor(2)):
            manager.maybe_save(number)  # type: ignore[arg-type]
        assert manager.step == 2 and type(manager.step) is int


def test_a_manager_that_would_save_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, Run().states()) as manager:
        manager.maybe_save(1)
        manager.maybe_save(2)
    with CheckpointManager(tmp_path, Run().states(), every=Cadence(at_end=True)) as manager:
        manager.maybe_save(1)
    (line,) = caplog.messages
    assert "maybe_save has no every= by which a save is due" in line


def test_a_metric_that_no_step_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("val_loss", "eval_loss"):
        with CheckpointManager(tmp_path, Run().states(), keep=[Latest(2), Best(name)]) as manager:
            for step in (manager.step + 1, manager.step + 2):
                manager.save(step, {"eval_loss": 1.0, "seen": 2})
    (line,) = caplog.messages[:1]
    assert "step 1 is saved without the metric 'val_loss', by which keep=Best('val_loss')" in line
    assert "it has eval_loss, seen" in line and caplog.text.count("is saved without the metric") == 1


# --- preemption -----------------------------------------------------------------------------------------------------------


def preempted_run(root: str, how: str) -> tuple[int, bool, list[int]]:
    """Train until the job is to stop: one rank is told, at a step of its own."""
    rank = dist.get_rank()
    run = Run()
    run.rank = rank
    notice = Path(root, "stop-now")
    signals = (signal.SIGTERM, signal.SIGUSR1) if how == "signal" else ()
    preemption = Preemption(signals, notice if how == "file" else None, notice.exists if how == "function" else None)
    before = signal.getsignal(signal.SIGUSR1)
    with CheckpointManager(root, run.states(), preemption=preemption, every=1000) as manager:
        for _ in range(3000):
            step = run.step()
            if step == 20 and rank == 1:
                if how == "signal":
                    os.kill(os.getpid(), signal.SIGUSR1)
                else:
                    notice.touch()
            manager.maybe_save(step)
            if manager.preempted:
                break
            dist.barrier()
            time.sleep(0.005)
    assert signal.getsignal(signal.SIGUSR1) == before
    return step, manager.preempted, numbers(manager)


@pytest.mark.parametrize("how", ["signal", "file", "function"])
def test_all_ranks_stop_at_the_step_that_is_saved(worlds: Worlds, tmp_path: Path, how: str) -> None:
    found = worlds.run(3, preempted_run, str(tmp_path), how)
    step = found[0][0]
    assert found == [(step, True, [step])] * 3 and 20 <= step < 2000


def test_a_save_that_cannot_be_done_in_time_is_not_begun(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()
    run = Run()
    preemption = Preemption((), check=told.is_set, grace=1e-6)
    with CheckpointManager(tmp_path, run.states(), preemption=preemption) as manager:
        manager.save(1).result(60)
        told.set()
        for step in range(2, 3000):
            manager.maybe_save(step)
            if manager.preempted:
                break
            time.sleep(0.01)
    assert manager.preempted and numbers(manager) == [1]
    assert "too long for the grace period" in caplog.text


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_whose_data_has_ended_keeps_nobody_from_stopping(
    tmp_path: Path, gone: int, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()

    def run(collective: Collective) -> tuple[int, bool]:
        run = Run(collective)
        preemption = Preemption((), check=told.is_set)
        with CheckpointManager(tmp_path, run.states(), every=AtSteps([4]), preemption=preemption) as manager:
            for _ in range(6 if collective.rank == gone else 600):
                step = run.step()
                manager.maybe_save(step)
                if manager.preempted:
                    break
                time.sleep(0.02)
        told.set()
        return step, manager.preempted

    found = ThreadWorld(3).run(run, timeout=60)
    assert found[gone] == (6, False)
    (others,) = {report for rank, report in enumerate(found) if rank != gone}
    assert others[0] < 600 and others[1]
    assert f"rank {gone} left this run or is lost, so step {others[0]} cannot be saved" in caplog.text
    assert [info.step for info in RunFolder(tmp_path).steps()] == [4]


# --- tiers ----------------------------------------------------------------------------------------------------------------


def test_a_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with hot_tier(monkeypatch):
        root = f"tier+file://{tmp_path}/run"
        run = Run()
        keep = Retention([Latest(1), Best("loss")], grace=0)
        with CheckpointManager(root, run.states(), every=1, keep=keep) as manager:
            assert manager.restore_latest() is None
            for _ in range(4):
                step = run.step()
                manager.maybe_save(step, {"loss": abs(step - 2)})
                manager.wait()
            eventually(manager, [2, 4])
            manager.pin(2)
        again = Run()
        with CheckpointManager(root, again.states()) as manager:
            manager.restore_latest()
            again.check(4)
            assert [info.pinned for info in manager.steps()] == [True, False]
        assert sorted(p.name for p in (tmp_path / "run").glob("step*")) == ["step_00000002", "step_00000004"]
