"""A run's manager on real servers: what it saves, deletes, passes over and takes over."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bytecheckpoint import CheckpointManager, StorageConflictError
from bytecheckpoint.manager import Best, Latest, Retention
from bytecheckpoint.manager.run_folder import step_folder
from bytecheckpoint.representation.names import generation_of
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import removal
from tests.storage.conftest import place
from tests.support.memory import hot_folder, hot_tier
from tests.support.processes import run_program, wait_until
from tests.support.runs import Run, eventually, numbers, save_steps

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


@pytest.fixture(params=["s3", "hdfs", "tier+hdfs"])
def root(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of a run."""
    tier, _, request.param = request.param.rpartition("+")
    with hot_tier(monkeypatch):
        for url in place(request, monkeypatch, tmp_path):
            yield f"{tier and 'tier+'}{url}/run"


def durable(root: str) -> str:
    return root.removeprefix("tier+")


def files(root: str, step: int) -> list[str]:
    """The files of a step in the durable storage."""
    return [name for name, _ in resolve(step_folder(durable(root), step)).list()]


def test_what_is_kept_and_what_goes(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    keep = Retention([Latest(2), Best("loss")], grace=0)
    with CheckpointManager(root, run.states(), every=1, keep=keep) as manager:
        assert manager.restore_latest() is None
        for _ in range(6):
            step = run.step()
            manager.maybe_save(step, {"loss": abs(step - 3)})
            if step == 1:
                manager.wait()
                manager.pin(1)
        manager.wait()
        eventually(manager, [1, 3, 5, 6])
    assert resolve(durable(root)).folders() == [f"step_0000000{step}" for step in (1, 3, 5, 6)]

    # With a grace, the files of a step stay a while without their catalog; any job may end the deletion.
    before = files(root, 6)
    save_steps(root, 7, keep=Retention(1, grace=3600))
    assert numbers(manager) == [1, 7] and {*before} - {*files(root, 6)} == {"metadata.parquet"}
    with CheckpointManager(root, run.states(), keep=Retention(1, grace=3600)) as manager:
        manager.unpin(1)
        manager.restore_latest()
        assert manager.step == 7
        run.check(7)
        now = removal._now
        monkeypatch.setattr(removal, "_now", lambda *args: now(*args) + 4000)
        manager.save(8).result(60)
        eventually(manager, [8])
    assert "step_00000006" not in resolve(durable(root)).folders()


_KILLED = """
import sys
import bytecheckpoint
from bytecheckpoint import CheckpointManager
from tests.support.runs import Run, die_in_commit

def train():
    run = Run()
    with CheckpointManager(sys.argv[1], run.states()) as manager:
        manager.restore_latest()
        manager.save(4)
        manager.wait()

die_in_commit(1, train)
"""


def test_what_is_damaged_or_left_by_a_kill_is_passed_over(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(root, 1, 2, 3)
    done = run_program(_KILLED, root)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if root.startswith("tier+"):
        shutil.rmtree(hot_folder(step_folder(root, 4)), ignore_errors=True)
    else:
        # Without one file: what is whole but for its catalog can be repaired, so it stays.
        left = files(root, 4)
        assert len(left) > 1 and all(map(generation_of, left))
        resolve(step_folder(root, 4)).delete(left[:1])
    folder = resolve(step_folder(durable(root), 3))
    name = next(name for name in files(root, 3) if name.startswith("model/"))
    data = bytearray(folder.read(name))
    data[-100] ^= 1
    folder.publish(name, bytes(data))
    if root.startswith("tier+"):  # the machine with the sound copy is lost
        shutil.rmtree(hot_folder(step_folder(root, 3)))

    run = Run()
    now = removal._now
    monkeypatch.setattr(removal, "_now", lambda *args: now(*args) + 4000)
    with CheckpointManager(root, run.states(), keep=Retention(grace=0)) as manager:
        restored = manager.restore_latest()
        assert restored is not None and restored.step == 2 and list(restored.skipped) == [3]
        run.check(2)
        manager.save(5).result(60)
        assert wait_until(lambda: not files(root, 4), 30)
        assert [(info.step, info.superseded) for info in manager.steps()] == [
            (1, False),
            (2, False),
            (3, True),
            (5, False),
        ]


def test_the_manager_that_began_last_goes_on(root: str) -> None:
    with CheckpointManager(root, Run().states()) as first, CheckpointManager(root, Run().states()) as second:
        first.save(1).result(60)
        second.restore_latest()
        assert second.step == 1
        second.save(2).result(60)
        told = ""
        for step in range(3, 200):
            try:
                first.save(step).result(60)
            except StorageConflictError as error:
                told = str(error)
                break
        assert f"another job manages {root}: process " in told
        second.save(1000).result(60)
        assert numbers(second)[-1] == 1000 and {1, 2, 3} <= {*numbers(second)}
