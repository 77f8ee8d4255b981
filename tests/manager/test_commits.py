"""What follows a commit: functions of the program, links, the wait of other jobs; and the question before a save."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bytecheckpoint import CheckpointManager
from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.errors import CheckpointNotFoundError, UsageError
from bytecheckpoint.manager import (
    Best,
    EverySteps,
    LatestLink,
    Preemption,
    Retention,
    SaveOptions,
    StepInfo,
    wait_for_new_step,
)
from bytecheckpoint.manager.run_folder import RunFolder
from tests.support.faulty_storage import Faults
from tests.support.runs import steps_in


def states() -> dict[str, Any]:
    return {"model": {"w": torch.ones(4)}}


def manager_of(root: Path, *on_commit: Callable[[StepInfo], object], **options: Any) -> CheckpointManager:
    return CheckpointManager(root, states(), save_options=SaveOptions(on_commit=on_commit), **options)


def test_functions_are_called_in_order_with_committed_steps(tmp_path: Path) -> None:
    seen: list[Any] = []

    def see(info: StepInfo) -> None:
        seen.append((info.step, info.metrics["loss"], info.metadata["commit"], os.listdir(info.path) != []))

    def fails(info: StepInfo) -> None:
        raise ValueError(info.step)

    def ends(info: StepInfo) -> None:
        sys.exit(3)

    def run(collective: Collective) -> None:
        with manager_of(tmp_path, fails, ends, see, every=2) as manager:
            for step in range(1, 7):
                manager.maybe_save(step, {"loss": step / 2}, {"commit": "1a2b" if collective.rank == 0 else "other"})

    ThreadWorld(2).run(run)
    assert seen == [(step, step / 2, "1a2b", True) for step in (2, 4, 6)]


def test_a_function_may_change_what_it_is_given(tmp_path: Path) -> None:
    """The rules choose by the metrics of the step."""

    def takes(info: StepInfo) -> None:
        info.metrics.pop("loss")  # type: ignore[attr-defined]
        info.metadata["facts"].clear()

    with manager_of(tmp_path, takes, every=1, keep=Retention(Best("loss"), grace=0)) as manager:
        for step in (1, 2, 3):
            manager.maybe_save(step, {"loss": float(step)}, {"facts": [step]})
        manager.wait()
        assert [info.metadata for info in manager.steps()][-1:] == [{"facts": [3]}]
    assert steps_in(tmp_path) == [1, 3]


def test_a_step_stays_while_a_function_reads_it(tmp_path: Path) -> None:
    go_on, found = threading.Event(), list[bool]()

    def slow(info: StepInfo) -> None:
        assert go_on.wait(30)
        found.append(os.path.exists(f"{info.path}/metadata.parquet"))

    with manager_of(tmp_path, slow, every=1, keep=Retention(1, grace=0)) as manager:
        for step in range(1, 6):
            manager.maybe_save(step)
            manager.wait()
        time.sleep(0.2)  # of deletions that shall not happen
        assert steps_in(tmp_path) == [1, 2, 3, 4, 5]
        go_on.set()
    assert found == [True] * 5 and steps_in(tmp_path) == [5]


@pytest.mark.parametrize("bad", [3, "latest", [print, 3], lambda: None, lambda a, b: None])
def test_wrong_functions(bad: Any) -> None:
    with pytest.raises(UsageError, match="on_commit="):
        SaveOptions(on_commit=bad)


def test_a_link_to_the_newest_step(tmp_path: Path) -> None:
    """It protects no older step from the rules, and nothing of the user's is replaced."""
    with manager_of(tmp_path, LatestLink(), every=1, keep=Retention(1, grace=0)) as manager:
        for step in (1, 2, 3):
            manager.maybe_save(step)
    assert os.readlink(tmp_path / "latest") == "step_00000003" and steps_in(tmp_path) == [3]
    os.unlink(tmp_path / "latest")
    (tmp_path / "latest").write_text("mine")
    with manager_of(tmp_path, LatestLink()) as manager:
        manager.restore_latest()
        manager.save(4)
    assert (tmp_path / "latest").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == [".bytecheckpoint-manager", "latest", "step_00000003", "step_00000004"]
    os.unlink(tmp_path / "latest")
    (tmp_path / ".latest.new").symlink_to("step_00000001")  # of a call that was killed
    with manager_of(tmp_path, LatestLink()) as manager:
        manager.restore_latest()
        manager.save(5)
    assert os.readlink(tmp_path / "latest") == "step_00000005" and not os.path.lexists(tmp_path / ".latest.new")
    for bad in ("", "a/b", "step_00000001", ".."):
        with pytest.raises(UsageError):
            LatestLink(bad)


def test_the_wait_for_a_new_step(tmp_path: Path) -> None:
    assert wait_for_new_step(tmp_path / "none", timeout=0.1, interval=0.02) is None
    with manager_of(tmp_path / "run") as manager:
        manager.save(3)
        manager.wait()
        first = wait_for_new_step(tmp_path / "run", timeout=10)
        assert first is not None and first.step == 3
        assert wait_for_new_step(tmp_path / "run", first, timeout=0.1, interval=0.02) is None
        threading.Timer(0.2, lambda: (manager.save(5), manager.wait())).start()
        second = wait_for_new_step(tmp_path / "run", 3, timeout=30, interval=0.02)
        assert second is not None and second.step == 5
        manager.restore(3)
        manager._keeper.claim(4)  # as at the beginning of a save: 5 is superseded
        assert wait_for_new_step(tmp_path / "run", second, timeout=0.0) is None
        manager.save(4)
        manager.wait()
        third = wait_for_new_step(tmp_path / "run", second, timeout=30, interval=0.02)
        assert third is not None and third.step == 4


def test_a_step_that_is_deleted_under_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(1)
    faults = Faults().install_in_folders(monkeypatch)
    faults.add("open", before=lambda: os.unlink(tmp_path / "step_00000001/metadata.parquet"))
    assert wait_for_new_step(tmp_path, timeout=0.1, interval=0.01) is None
    assert not caplog.text and steps_in(tmp_path) == []


@pytest.mark.parametrize("wrong", [{"interval": 0}, {"interval": -1.0}, {"after": "3"}, {"after": 2.5}])
def test_wrong_waits(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(UsageError):
        wait_for_new_step(tmp_path, timeout=0.0, **wrong)


def test_a_pin_during_a_deletion(tmp_path: Path) -> None:
    """Another job pins the step that it has just found, while a manager chooses the steps to delete."""

    class PinsLate:
        def keep(self, steps: Sequence[StepInfo]) -> set[int]:
            if len(steps) > 1:
                RunFolder(tmp_path).pin(1, pinned=True)
            return set()

    with manager_of(tmp_path, every=1, keep=Retention([PinsLate()], grace=0)) as manager:
        for step in (1, 2):
            manager.maybe_save(step)
    assert steps_in(tmp_path) == [1, 2]


def test_a_rule_that_ends_its_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Ends:
        def keep(self, steps: Sequence[StepInfo]) -> set[int]:
            if steps[-1].step == 2:
                asked.set()
                sys.exit("a rule gives up")
            return set()

    asked = threading.Event()
    with manager_of(tmp_path, every=1, keep=Retention([Ends()], grace=0)) as manager:
        for step in (1, 2, 3):
            manager.maybe_save(step)
            manager.wait()
            assert step != 2 or asked.wait(60)  # else a slow machine asks once for steps 2 and 3
    assert steps_in(tmp_path) == [3] and "a rule gives up" in caplog.text


def test_a_pin_behind_a_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(1)
        manager.wait()
        faults = Faults().install_in_folders(monkeypatch)
        faults.add("publish", before=lambda: os.unlink(tmp_path / "step_00000001/metadata.parquet"))
        with pytest.raises(CheckpointNotFoundError):
            manager.pin(1)
        assert ".bytecheckpoint-pinned" not in os.listdir(tmp_path / "step_00000001")


def test_a_pin_waits_for_the_commit(tmp_path: Path) -> None:
    with manager_of(tmp_path, keep=1) as manager:
        for step in (1, 2, 3):
            manager.save(step)
            manager.pin(step)
        with pytest.raises(CheckpointNotFoundError):
            manager.pin(4)
    assert steps_in(tmp_path) == [1, 2, 3]


def test_the_question_before_a_save(tmp_path: Path) -> None:
    """Metrics that are measured only for saves. What was due and not saved stays due; each rule acts once."""

    def run(collective: Collective) -> list[int]:
        asked = []
        preemption = Preemption(signals=(), check=lambda: False)
        with manager_of(tmp_path, every=EverySteps(4), keep=[Best("loss")], preemption=preemption) as manager:
            for step in range(1, 15):
                if due := manager.should_save(step):
                    asked.append(step)
                if step in (8, 9):
                    continue
                assert (manager.maybe_save(step, {"loss": float(step)} if due else None) is not None) == due
        return asked

    assert ThreadWorld(2).run(run) == [[4, 8, 9, 10, 12]] * 2
    assert [info.metrics for info in manager_of(tmp_path).steps()] == [{"loss": 4.0}, {"loss": 12.0}]


def test_the_question_at_the_end_of_a_job(tmp_path: Path) -> None:
    stop = threading.Event()
    with manager_of(tmp_path, preemption=Preemption(check=stop.is_set)) as manager:
        assert not manager.should_save(1)
        stop.set()
        step = 1
        while not manager.should_save(step := step + 1):
            manager.maybe_save(step)
            time.sleep(0.05)
        assert manager.preempted
        manager.maybe_save(step, {"loss": 1.0})
    assert manager_of(tmp_path).latest().metrics == {"loss": 1.0}  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [3, {1: 2}, {"manager": {}}, [("a", 1)]])
def test_wrong_facts(tmp_path: Path, bad: Any) -> None:
    with manager_of(tmp_path) as manager, pytest.raises(UsageError, match="metadata="):
        manager.save(1, metadata=bad)
    with pytest.raises(UsageError, match="metadata"):
        CheckpointManager(tmp_path, states(), save_options=SaveOptions(metadata=bad))


@pytest.mark.parametrize("of_options", [False, True])
def test_facts_are_those_of_the_call(tmp_path: Path, *, of_options: bool) -> None:
    """The program counts on while the save is written."""
    counts = {"tokens": [1]}
    options = SaveOptions(metadata=counts if of_options else None)
    with CheckpointManager(tmp_path, states(), save_options=options) as manager:
        manager.save(1, metadata=None if of_options else counts)
        counts["tokens"].append(2)
    assert manager.steps()[0].metadata == {"tokens": [1]}


def test_a_restore_forgets_what_was_due(tmp_path: Path) -> None:
    with manager_of(tmp_path, every=EverySteps(5)) as manager:
        manager.save(3)
        assert manager.should_save(5)
        manager.restore(3)
        assert not manager.should_save(4) and manager.maybe_save(4) is None
        assert manager.should_save(5)
        manager.go_back(3)
        assert manager.maybe_save(4) is None
