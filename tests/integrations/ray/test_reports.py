"""`CheckpointManager` in workers without a cluster: what is reported to Ray, and when."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bytecheckpoint.errors import CheckpointError, UsageError
from bytecheckpoint.manager import AtSteps, Cadence, Preemption, SaveOptions
from tests.integrations.ray.jobs import new_states, pretended_ray, take_step
from tests.support.damage import damage, storage_file
from tests.support.faulty_storage import Faults
from tests.support.runs import steps_in
from tests.support.worlds import on_ranks


def manager_of(states: dict[str, Any], **options: Any) -> Any:
    from bytecheckpoint.integrations.ray import CheckpointManager

    return CheckpointManager(states, **options)


def run(manager: Any, states: dict[str, Any], steps: range) -> None:
    """Train; the ranks take different times for a step."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        time.sleep(0.002 * rank)
        manager.maybe_save(step, {"loss": take_step(states, step, rank, ranks)})


@pytest.mark.parametrize("asynchronous", [True, False])
@on_ranks(2)
def test_all_ranks_report_together(tmp_path: Path, asynchronous: bool) -> None:
    states = new_states()
    with pretended_ray(tmp_path) as reports:
        save_options = SaveOptions(async_checkpoint=asynchronous)
        with manager_of(states, every=Cadence(3, at_end=True), save_options=save_options) as manager:
            assert manager.restore_latest() is None
            run(manager, states, range(1, 41))
        assert reports.steps == [*range(3, 40, 3), 40]
        assert steps_in(tmp_path) == reports.steps
        assert reports.found[-1][2].keys() == {"step", "loss"}


@on_ranks(1)
def test_nothing_is_reported_before_its_commit(tmp_path: Path) -> None:
    states, go_on = new_states(), threading.Event()
    with pytest.MonkeyPatch.context() as patch, pretended_ray(tmp_path) as reports:
        Faults().install(patch).add("publish", name="metadata.parquet", before=lambda: go_on.wait(60))
        with manager_of(states, every=4) as manager:
            run(manager, states, range(1, 8))
            assert not reports.found and steps_in(tmp_path) == []
            go_on.set()
            manager.wait()
            run(manager, states, range(8, 9))  # waits for nothing: step 4 is reported here or a little later
        assert reports.steps == [4, 8]


@on_ranks(1)
def test_a_failed_save_is_not_reported(tmp_path: Path) -> None:
    states = new_states()
    with pytest.MonkeyPatch.context() as patch, pretended_ray(tmp_path) as reports:
        Faults().install(patch).add("publish", OSError("no commit"), name="metadata.parquet", skip=1)
        with manager_of(states, every=4, save_options=SaveOptions(on_error="warn")) as manager:
            run(manager, states, range(1, 13))
        assert reports.steps == steps_in(tmp_path) == [4, 12]
    with pytest.MonkeyPatch.context() as patch, pretended_ray(tmp_path / "other") as reports:
        Faults().install(patch).add("publish", OSError("no commit"), name="metadata.parquet")
        with pytest.raises(CheckpointError, match="no commit"), manager_of(states, every=4) as manager:
            run(manager, states, range(1, 9))
        assert not reports.found


@on_ranks(2)
def test_a_file_tells_of_the_end(tmp_path: Path) -> None:
    """Signals reach no training function. The last step is saved, and reported at the end."""
    states, told = new_states(), tmp_path / "stop"
    with pretended_ray(tmp_path) as reports:
        with manager_of(states, every=1000, preemption=Preemption(signals=(), file=told)) as manager:
            for step in range(1, 10_000):
                told.touch()
                manager.maybe_save(step)
                time.sleep(0.005)
                if manager.preempted:
                    break
        assert reports.steps == steps_in(tmp_path) == [step]


def save_and_fail(manager: Any) -> None:
    with manager:
        manager.save(4)
        raise ValueError("the loss is odd")


@on_ranks(1)
def test_an_exception_reports_nothing(tmp_path: Path) -> None:
    """The other workers may never come to a report, which waits for all."""
    states = new_states()
    with pretended_ray(tmp_path) as reports:
        with pytest.raises(ValueError, match="odd"):
            save_and_fail(manager_of(states))
        assert not reports.found and steps_in(tmp_path) == [4]


@on_ranks(2)
def test_restored_steps_that_ray_does_not_know(tmp_path: Path) -> None:
    """A worker was killed between commits and reports. What is older than a known step would count as newer: it is left."""
    states = new_states()
    with pretended_ray(tmp_path), manager_of(states, every=2) as manager:
        run(manager, states, range(1, 9))
    paths = [str(tmp_path / f"step_{step:08d}") for step in (2, 4, 6, 8)]
    for known, wanted in (([], [2, 4, 6, 8]), (paths[1:2], [6, 8]), (paths[3:], []), (paths, [])):
        with pretended_ray(tmp_path, known) as reports, manager_of(new_states()) as manager:
            assert manager.restore_latest().step == 8
            assert reports.steps == wanted
            assert all("loss" in metrics for _, _, metrics in reports.found)
    with pretended_ray(tmp_path, paths[:1]) as reports, manager_of(new_states()) as manager:
        assert manager.restore(6).step == 6 and reports.steps == [4, 6]


@on_ranks(1)
def test_a_path_is_reported_once(tmp_path: Path) -> None:
    """A second report of a path would make Ray delete it when it drops the first one."""
    states = new_states()
    with pretended_ray(tmp_path) as reports, manager_of(states, every=4) as manager:
        run(manager, states, range(1, 9))
    damage(storage_file(tmp_path / "step_00000008"), "flip")
    with pretended_ray(tmp_path, reports.known) as reports:
        with manager_of(states, every=4) as manager:
            assert manager.restore_latest().step == 4
            run(manager, states, range(5, 13))
        assert [(step, name) for step, name, _ in reports.found] == [(8, ""), (12, "step_00000012")]
    assert steps_in(tmp_path) == [4, 8, 12]


@on_ranks(1)
def test_steps_that_ray_has_deleted(tmp_path: Path) -> None:
    states = new_states()
    with pretended_ray(tmp_path), manager_of(states, every=AtSteps([2, 4, 6])) as manager:
        run(manager, states, range(1, 6))
        manager.wait()
        shutil.rmtree(tmp_path / "step_00000002")
        run(manager, states, range(6, 8))
    assert steps_in(tmp_path) == [4, 6]
    (tmp_path / "step_00000004" / "metadata.parquet").unlink()  # Ray was killed in the middle
    (tmp_path / "checkpoint_manager_snapshot.json").write_text("{}")
    with pretended_ray(tmp_path), manager_of(states) as manager:
        assert manager.restore_latest().step == 6


@on_ranks(1)
def test_refusals(tmp_path: Path) -> None:
    states = new_states()
    with pretended_ray(tmp_path), pytest.raises(UsageError, match="let Ray delete"):
        manager_of(states, keep=3)
    with pretended_ray(tmp_path), pytest.raises(UsageError, match="just_in_time= is not for Ray"):
        manager_of(states, just_in_time=True)
    with pretended_ray(tmp_path), manager_of(states) as manager, pytest.raises(UsageError, match="knows no pins"):
        manager.pin(1)
    with pretended_ray(tmp_path, custom_fs_provided=True), pytest.raises(UsageError, match="file system 'local' at"):
        manager_of(states)
    with (
        pretended_ray(tmp_path, custom_fs_provided=True),
        pytest.raises(UsageError, match="is not where Ray sees"),
        manager_of(states, root=str(tmp_path / "elsewhere")) as manager,
    ):
        manager.save(4)
    with pretended_ray(tmp_path, custom_fs_provided=True) as reports:
        with manager_of(states, root=str(tmp_path)) as manager:
            manager.save(4)
        assert reports.steps == [4]
