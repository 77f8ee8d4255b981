"""Runs that go on from an older step than the newest, and steps that come and go meanwhile."""

from __future__ import annotations

import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CheckpointManager
from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.engine import catalogs
from bytecheckpoint.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    StorageConflictError,
    UsageError,
)
from bytecheckpoint.frameworks.rng import rng_state
from bytecheckpoint.manager import Best, Cadence, Every, Latest, Retention, StepInfo, Younger, run_folder
from bytecheckpoint.manager.run_folder import RunFolder, by_age, step_folder
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.tiers.cooldown import cool, plan_cooldown
from tests.loading.test_layouts import folder_of, fused, module_of, weights
from tests.support.damage import damage, storage_file
from tests.support.faulty_storage import Faults
from tests.support.memory import hot_tier
from tests.support.runs import Run, eventually, numbers, save_steps, steps_in
from tests.support.variants import crossed


def go_on(root: Path | str, *steps: int, restore: int | None = None, keep: Any = None) -> list[int]:
    """Restore a step, or the newest, save some more, and return the steps that are left."""
    run = Run()
    with CheckpointManager(root, run.states(), keep=Retention(keep, grace=0)) as manager:
        manager.restore_latest() if restore is None else manager.restore(restore)
        run.check(manager.step)
        for step in steps:
            run.weights.fill_(step)
            run.progress["step"] = step
            manager.save(step).result(60)
    return numbers(manager)


def test_what_is_saved_after_going_back_is_the_newest(tmp_path: Path) -> None:
    save_steps(tmp_path, *range(100, 1001, 100))
    assert go_on(tmp_path, 310, keep=2, restore=300) == [300, 310]
    assert go_on(tmp_path, 320, keep=2) == [310, 320]

    save_steps(tmp_path, 400, 500)
    assert go_on(tmp_path, 350, restore=320) == [310, 320, 350, 400, 500]
    manager = CheckpointManager(tmp_path, Run().states())
    assert [info.step for info in manager.steps() if info.superseded] == [400, 500]
    latest = manager.latest()
    manager.restore_latest()
    assert latest is not None and latest.step == manager.step == 350
    manager.close()
    # A step that is saved anew counts again, the others do not.
    assert go_on(tmp_path, 400) == [310, 320, 350, 400, 500]
    assert go_on(tmp_path, 410, keep=[Latest(2), Every(500)]) == [400, 410, 500]
    assert go_on(tmp_path, 420, keep=1) == [420]


def test_a_checkpoint_by_its_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of the run is a step to go back to; of others, and of a part, the run only takes the values."""
    save_steps(tmp_path / "other", 7)
    save_steps(tmp_path / "run", 1, 2)
    run = Run()
    with CheckpointManager(tmp_path / "run", run.states()) as manager:
        manager.restore_from(tmp_path / "other" / "step_00000007")
        assert manager.restored is None
        run.check(7)
        manager.restore_from(tmp_path / "run" / "step_00000002", only=["progress"])
        assert manager.restored is None and run.progress["step"] == 2 and run.weights[0] == 7
        report = manager.restore_from(tmp_path / "run" / "step_00000001")
        assert manager.restored is not None and (manager.restored.step, manager.restored.report) == (1, report)
        run.check(1)
        manager.save(3)
    assert [info.superseded for info in RunFolder(tmp_path / "run").steps()] == [False, True, False]
    assert not caplog.records


def test_remarks_about_a_load_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work(collective: Collective) -> None:
        states = {"rng": rng_state(rank=collective.rank, ranks=collective.world_size)}
        with CheckpointManager(tmp_path, states) as manager:
            manager.restore_latest()
            manager.save(1)

    ThreadWorld(2).run(work, timeout=60)
    assert not caplog.records
    ThreadWorld(3).run(work, timeout=60)
    (line,) = caplog.messages
    assert "seeded anew" in line and "step_00000001" in line


def test_what_rank_0_finds(tmp_path: Path) -> None:
    def work(collective: Collective) -> Any:
        with CheckpointManager(tmp_path, Run(collective).states()) as manager:
            manager.save(4, {"loss": 2.0})
            manager.wait()
            found = manager.ask_rank_0(manager.steps, list[StepInfo])
            with pytest.raises(CheckpointNotFoundError, match="nothing here"):
                manager.ask_rank_0(lambda: refuse(collective.rank))
            return found

    def refuse(rank: int) -> None:
        assert rank == 0
        raise CheckpointNotFoundError("nothing here")

    found = ThreadWorld(2).run(work, timeout=60)
    assert found[0] == found[1] and found[0][0].metrics == {"loss": 2.0}


def test_going_back_within_a_job(tmp_path: Path) -> None:
    run = Run()
    with CheckpointManager(tmp_path, run.states(), keep=Retention(2, grace=0)) as manager:
        for step in (10, 20):
            manager.save(step).result(60)
        manager.restore(10)
        manager.save(15).result(60)
        manager.save(16).result(60)
        eventually(manager, [15, 16])


def test_steps_that_go_backwards(tmp_path: Path) -> None:
    """A counter that begins again in each epoch would lose its steps at once, and a resume would find the old ones."""
    run = Run()
    with CheckpointManager(tmp_path, run.states(), every=10, keep=Retention(2, grace=0)) as manager:
        for step in (10, 20):
            assert manager.maybe_save(step) is not None
        for call in (manager.maybe_save, manager.save):
            with pytest.raises(
                UsageError, match=r"step 7 comes after step 20.* or call restore\(...\) or go_back\(7\)"
            ):
                call(7)
        assert manager.step == 20 and manager.maybe_save(20) is None
        with pytest.raises(UsageError, match=r"go_back\(21\): the run is at step 20"):
            manager.go_back(21)
        manager.go_back(7)
        for step in (10, 20, 30):
            assert manager.maybe_save(step) is not None
        eventually(manager, [20, 30])
        assert not [info for info in manager.steps() if info.superseded]
    with CheckpointManager(tmp_path, run.states()) as manager:
        manager.restore_latest()
        with pytest.raises(UsageError, match="step 1 comes after step 30"):
            manager.maybe_save(1)


def test_damaged_steps_do_not_push_out_what_follows(tmp_path: Path) -> None:
    """Their sizes are right, so nothing but a load notices."""
    save_steps(tmp_path, 50, 60, 70)
    for step in (60, 70):
        damage(storage_file(Path(step_folder(str(tmp_path), step))))
    assert go_on(tmp_path, 53, keep=2) == [50, 53]
    assert go_on(tmp_path, 56, keep=2) == [53, 56]


def test_the_steps_of_another_run_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 900, 1000)
    save_steps(tmp_path, 10, 20, 30, keep=2)
    assert [info.step for info in RunFolder(tmp_path).steps()] == [20, 30, 900, 1000]
    assert "holds steps up to 1000, and a run that began from none of them saves step 10" in caplog.text


def test_ranks_that_go_back(tmp_path: Path) -> None:
    def run(collective: Collective, restore: int | None, *steps: int) -> list[int]:
        run = Run(collective)
        with CheckpointManager(tmp_path, run.states(), keep=Retention(2, grace=0)) as manager:
            manager.restore_latest() if restore is None else manager.restore(restore)
            found = [manager.step]
            if steps and steps[0] < manager.step:
                manager.go_back(steps[0] - 1)
            for step in steps:
                manager.save(step).result(60)
        return found

    assert ThreadWorld(2).run(run, None, 1, 2, 3, timeout=60) == [[0]] * 2
    assert ThreadWorld(2).run(run, 2, 9, 10, timeout=60) == [[2]] * 2
    assert ThreadWorld(2).run(run, 9, timeout=60) == [[9]] * 2
    assert ThreadWorld(2).run(run, 9, 5, timeout=60) == [[9]] * 2
    assert ThreadWorld(2).run(run, None, timeout=60) == [[5]] * 2


def test_a_reader_goes_to_the_step_that_was_committed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 10, 20)
    committed = RunFolder.committed

    def then_deleted(self: RunFolder) -> Any:
        found = committed(self)
        monkeypatch.setattr(RunFolder, "committed", committed)
        save_steps(tmp_path, 30, keep=1)
        return found

    monkeypatch.setattr(RunFolder, "committed", then_deleted)
    with CheckpointManager(tmp_path, Run().states()) as manager:
        manager.restore_latest()
        assert manager.step == 30


def test_no_catalog_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, *range(1, 11))
    read: list[str] = []

    def counted(storage: Any, *args: Any) -> Any:
        read.append(storage.url)
        return catalogs.read_catalog(storage, *args)

    monkeypatch.setattr(run_folder, "read_catalog", counted)
    folder = RunFolder(tmp_path)
    folder.take_over()
    assert folder.clean([Best("loss"), Latest(2)], 0) == [*range(1, 9)]
    assert len(read) <= 11  # and that of the one that is whole


@pytest.mark.parametrize("overlap", ["skip", "fail"])
def test_the_clock_goes_on_after_a_save_that_was_skipped(
    tmp_path: Path, overlap: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wait() -> None:
        while "still being written" not in caplog.text and not refused:
            time.sleep(0.01)

    Faults().install(monkeypatch).add("publish", name=CATALOG_NAME, before=wait)
    refused: list[Exception] = []
    run, cadence = Run(), Cadence(timedelta(seconds=0.05), overlap=overlap)
    with CheckpointManager(tmp_path, run.states(), every=cadence) as manager:
        for _ in range(2000):
            try:
                manager.maybe_save(run.step())
            except Exception as error:  # noqa: BLE001
                refused.append(error)
            if len(numbers(manager)) == 3:
                break
            time.sleep(0.01)
    assert len(numbers(manager)) >= 3


def test_a_manager_that_only_saves_at_once_learns_of_its_successor(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, Run().states()) as manager:
        manager.save(1).result(60)
        save_steps(tmp_path, 2)
        error: StorageConflictError | None = None
        for step in range(3, 500):
            try:
                manager.save(step).result(60)
            except StorageConflictError as found:
                error = found
                break
            time.sleep(0.01)
    assert "another job manages" in str(error)


def test_what_another_job_is_writing_stays(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    written = storage_file(Path(step_folder(str(tmp_path), 1)))
    begun = Path(step_folder(str(tmp_path), 3), "model", written.name.replace(written.name.split(".")[1], "0" * 24))
    begun.parent.mkdir(parents=True)
    begun.write_bytes(written.read_bytes())
    (tmp_path / "step_00000007" / "model").mkdir(parents=True)  # a deletion was killed at its end
    assert [info.step for info in RunFolder(tmp_path).steps()] == [1]
    for seconds, stays in ((60, True), (6000, False)):
        os.utime(begun, (time.time() - seconds,) * 2)
        assert go_on(tmp_path, 2) == [1, 2]
        assert begun.exists() == stays and not (tmp_path / "step_00000007").exists()


def test_a_step_whose_files_another_one_uses_stays(tmp_path: Path) -> None:
    run, cold = tmp_path / "run", tmp_path / "cold"
    save_steps(run, 1, 2)
    catalog = (run / "step_00000001/metadata.parquet").read_bytes()
    assert any(cool(step).done for step in plan_cooldown(str(run), f"file://{cold}", older_than=0, keep=1))
    shutil.copytree(run / "step_00000001", cold / "step_00000009")  # names the files in cold/step_00000001
    (cold / "step_00000001/metadata.parquet").write_bytes(catalog)
    folder = RunFolder(cold)
    folder.take_over()
    assert [info.step for info in folder.steps()] == [1, 9]
    assert folder.clean([Latest(1)], 0) == [] and folder.clean([Latest(1)], 0) == []
    shutil.rmtree(cold / "step_00000009")
    shutil.copytree(run / "step_00000002", cold / "step_00000009")
    assert folder.clean([Latest(1)], 0) == [1]


@pytest.mark.parametrize("who", ["this job", "another job"])
def test_a_step_that_is_saved_anew_while_it_is_about_to_go_stays(
    tmp_path: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1, 2)
    folder = RunFolder(tmp_path)
    folder.take_over()
    users_in = run_folder.users_in

    def save_anew(*args: Any) -> Any:
        if who == "this job":
            bytecheckpoint.save(step_folder(str(tmp_path), 1), Run().states())
        else:
            save_steps(tmp_path, 1)
        return users_in(*args)

    monkeypatch.setattr(run_folder, "users_in", save_anew)
    if who == "this job":
        assert folder.clean([Latest(1)], 0) == []
    else:
        with pytest.raises(StorageConflictError, match="another job manages"):
            folder.clean([Latest(1)], 0)
    assert [info.step for info in folder.steps()] == [1, 2]
    assert not [*tmp_path.rglob(".bytecheckpoint-retired*")]


HOUR = 3600.0


@pytest.mark.parametrize(("root", "jumps"), crossed(["local", "tier"], [(5, 5, 5), (0, -5, -9), (5, 0, 5), (-5, 0, 5)]))
def test_the_clocks_of_machines_decide_nothing(
    tmp_path: Path, jumps: tuple[int, ...], root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job runs on a machine whose clock is some hours ahead or behind."""
    clock = time.time
    url = str(tmp_path) if root == "local" else f"tier+file://{tmp_path}"
    with hot_tier(monkeypatch):
        for job, hours in enumerate((0, *jumps)):
            monkeypatch.setattr(time, "time", lambda hours=hours: clock() + hours * HOUR)
            save_steps(url, 2 * job + 1, 2 * job + 2, keep=[Younger(timedelta(hours=2))], restore=True)
        folder = RunFolder(url)
        assert [info.step for info in by_age(folder.steps())] == [*range(1, 9)]
        assert go_on(url, 6, restore=5) == [*range(1, 9)]
        assert go_on(url, 7, keep=[Latest(3)]) == [5, 6, 7]
        monkeypatch.setattr(time, "time", lambda: clock() + 20 * HOUR)
        assert go_on(url, 8, keep=2) == [7, 8]


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"a": 1}', "\xff", '{"id": "x"}'])
def test_damaged_files_of_the_manager(tmp_path: Path, text: str) -> None:
    run = Run()
    with CheckpointManager(tmp_path, run.states(), keep=Retention(1, grace=0)) as manager:
        manager.save(1)
        manager.wait()
        (tmp_path / ".bytecheckpoint-manager").write_bytes(text.encode("latin-1"))
        manager.save(2)
    assert steps_in(tmp_path) == [2]
    (tmp_path / ".bytecheckpoint-superseded").write_bytes(text.encode("latin-1"))
    with CheckpointManager(tmp_path, run.states()) as manager:
        for look in (manager.steps, manager.restore_latest):
            with pytest.raises(CorruptCheckpointError, match="bytecheckpoint-superseded, which lists"):
                look()


def test_a_run_begins_with_the_weights_of_another_program(tmp_path: Path) -> None:
    """Until it has a step of its own; nothing in the other folder changes, and an optimizer stays new."""
    found = weights()
    folder = folder_of(tmp_path / "hf", found)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    for attempt in range(2):
        model = module_of(fused(found))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        states = {"model": model, "optimizer": optimizer}
        with CheckpointManager(tmp_path / "run", states, keep=1, start_from=folder, layout="llama") as manager:
            restored = manager.restore_latest()
            assert (restored is None) == (attempt == 0) and manager.step == 5 * attempt
            expected = {name: value + attempt for name, value in fused(found).items()}
            assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
            assert bool(optimizer.state) == bool(attempt)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(fused(found)[name] + attempt + 1)
            manager.save(5 * attempt + 5)
    assert before == {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    for arguments in ({"layout": "llama"}, {"start_from": folder, "layout": "lama"}):
        with pytest.raises(UsageError, match=r"start_from|did you mean llama"):
            CheckpointManager(tmp_path / "run", states, **arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has weights for modules, and the states are progress"):
        CheckpointManager(tmp_path / "run", {"progress": {}}, start_from=folder)


def test_copies_that_drift_are_named_before_they_are_saved(tmp_path: Path) -> None:
    """Every second step; a restore of the last step at which they agreed goes on."""

    def train(collective: Collective) -> list[str]:
        run, said = Run(), []
        with CheckpointManager(tmp_path, run.states(), every=2, check_replicas=2) as manager:
            for step in range(1, 5):
                run.weights.fill_(step)
                if step == 3 and collective.rank == 1:
                    run.weights.view(-1)[1] += 1e-4
                    manager.maybe_save(step)
                    continue
                if step == 4 and collective.rank == 1:
                    run.weights.view(-1)[1] += 1e-4
                try:
                    manager.maybe_save(step)
                except IncompatibleCheckpointError as error:
                    said.append(str(error))
            manager.wait()
            assert numbers(manager) == [2]
            assert manager.restore_latest().step == 2  # type: ignore[union-attr]
            run.weights.fill_(5.0)
            manager.maybe_save(6)
            manager.wait()
            assert numbers(manager) == [2, 6]
        return said

    for said in ThreadWorld(2).run(train):
        assert len(said) == 1
        for words in ("step 4: ", "the copies of model/part_0 on rank 1 differ", "at step 2 all copies agreed"):
            assert words in said[0], said
    with pytest.raises(UsageError, match="check_replicas=0"):
        CheckpointManager(tmp_path, Run().states(), check_replicas=0)
