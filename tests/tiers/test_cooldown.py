"""Cooldown: older steps move to a cold storage, their paths still work, and no kill loses anything."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointNotFoundError, UsageError
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.tiers.cooldown import cool, plan_cooldown
from bytecheckpoint.tuning import tuned
from tests.support.coded import files_of, load_step, save_steps, states
from tests.support.damage import damage, storage_file
from tests.support.faulty_storage import Faults
from tests.support.memory import new_memory
from tests.support.processes import environment
from tests.support.programs import forked

DAY = 86400.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 4."""
    for step in range(1, 5):
        bytecheckpoint.save(tmp_path / "run" / f"step_{step}", states(step=step))
    return tmp_path / "run"


def planned(root: str | Path, cold: str | Path, older_than: float = 0, days: float = 1, **options: Any) -> list[Any]:
    """Return the plan of a cooldown that runs `days` from now."""
    return plan_cooldown(str(root), str(cold), older_than=older_than, now=time.time() + days * DAY, **options)


def move_all(root: str | Path, cold: str | Path, **options: Any) -> list[Any]:
    done = [cool(step) for step in planned(root, cold, **options)]
    assert not any(step.error for step in done), done
    return done


def actions(plan: list[Any]) -> list[str]:
    return [step.action for step in plan]


def test_paths_of_cooled_steps_work(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cold = tmp_path / "cold"
    done = move_all(root, cold)
    assert actions(done) == ["move", "move", "move", "keep"]
    assert [step.done for step in done] == [True, True, True, False]
    for step in range(1, 5):
        path = root / f"step_{step}"
        assert load_step(path) == step
        assert files_of(path) == (["metadata.parquet"] if step < 4 else files_of(root / "step_4"))
        assert command(["verify", str(path)]) == 0
        assert command(["inspect", str(path)]) == 0
        with bytecheckpoint.open(path) as checkpoint:
            assert checkpoint["extra_states/step"] == step
    for step in range(1, 4):
        assert load_step(cold / f"step_{step}") == step, "the cold copy is a checkpoint of its own"
        assert command(["diff", str(root / f"step_{step}"), str(cold / f"step_{step}")]) == 0
    capsys.readouterr()
    assert command(["ls", "--json", str(root)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [step["status"] for step in listed["checkpoints"]] == ["committed"] * 4
    assert len({step["bytes"] for step in listed["checkpoints"]}) == 1, "bytes are those of the checkpoint"
    assert actions(move_all(root, cold)) == ["cold", "cold", "cold", "keep"]


def test_a_cold_step_can_be_replaced(root: Path, tmp_path: Path) -> None:
    move_all(root, tmp_path / "cold")
    bytecheckpoint.save(root / "step_1", states(step=10))
    assert load_step(root / "step_1") == 10
    assert load_step(tmp_path / "cold" / "step_1") == 1


def test_the_newest_steps_stay(root: Path, tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    plan = planned(root, cold, older_than=7 * DAY, days=0)
    assert actions(plan) == ["keep"] * 4 and [step.reason for step in plan] == ["too young"] * 3 + ["one of the newest"]
    assert actions(planned(root, cold, older_than=7 * DAY, days=8)) == ["move"] * 3 + ["keep"]
    assert actions(planned(root, cold, keep=3)) == ["move", "keep", "keep", "keep"]
    # Neither the last to be saved nor the one of the highest number moves.
    bytecheckpoint.save(root / "step_2", states(step=2))
    assert {step.name: step.action for step in planned(root, cold)} == {
        "step_1": "move", "step_2": "keep", "step_3": "move", "step_4": "keep",
    }  # fmt: skip
    assert not cold.exists(), "planning changes nothing"


def test_damaged_and_unfinished_steps_stay(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step_1" / "metadata.parquet").write_bytes(b"nonsense")
    (root / "step_2" / "metadata.parquet").unlink()
    damage(storage_file(root / "step_3"), "flip", -5)
    bytecheckpoint.save(root / "step_5", states(step=5))
    before = {step: files_of(root / step) for step in os.listdir(root)}
    args = ["cooldown", str(root), str(tmp_path / "cold"), "--older-than", "0s", "--apply", "--json"]
    assert command(args) == 1
    report = json.loads(capsys.readouterr().out)
    by_name = {step["name"]: step for step in report["steps"]}
    assert set(by_name) == {"step_1", "step_3", "step_4", "step_5"}
    assert by_name["step_1"]["action"] == "skip"
    assert not by_name["step_3"]["done"] and "checksum mismatch" in by_name["step_3"]["error"]
    assert by_name["step_4"]["done"] and by_name["step_5"]["action"] == "keep"
    after = {step: files_of(root / step) for step in os.listdir(root) if (root / step).is_dir()}
    assert after == {**before, "step_4": ["metadata.parquet"]}
    with pytest.raises(CheckpointNotFoundError):
        load_step(tmp_path / "cold" / "step_3")


def test_files_that_another_step_uses_stay(root: Path, tmp_path: Path) -> None:
    """A step that names files of another by URI, as cooled ones do, keeps those where they are."""
    first, second = tmp_path / "a", tmp_path / "b"
    shutil.copytree(root / "step_1", first / "step_1")
    bytecheckpoint.save(first / "step_9", states(step=9))
    bytecheckpoint.save(first / "step_10", states(step=10))
    move_all(first, second, keep=1)
    # step_1 of `first` now names files of `second`; within `second` another run's view of them is planned:
    shutil.copytree(first / "step_1", second / "view")
    bytecheckpoint.save(second / "step_99", states(step=99))
    named = {step.name: (step.action, step.reason) for step in planned(second, tmp_path / "c")}
    assert named["step_1"] == ("skip", "view uses its files")
    assert named["step_9"][0] == "move"
    assert named["view"][0] == "cold"


def test_the_cold_folder_holds_something_else(root: Path, tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "cold" / "step_1", states(step=77))
    done = [cool(step) for step in planned(root, tmp_path / "cold")]
    assert "holds another checkpoint" in done[0].error and not done[0].done
    assert done[1].done and done[2].done
    assert load_step(root / "step_1") == 1 and load_step(tmp_path / "cold" / "step_1") == 77


def test_a_step_that_is_replaced_meanwhile(root: Path, tmp_path: Path, faults: Faults) -> None:
    step = root / "step_1"
    plan = planned(root, tmp_path / "cold")
    faults.add("publish", name=str(step), before=lambda: bytecheckpoint.save(step, states(step=50)))
    done = cool(plan[0])
    assert "another save" in done.error
    assert load_step(root / "step_1") == 50


@pytest.mark.parametrize(
    ("root", "cold"),
    [("{0}/run", "{0}/run"), ("{0}/run", "{0}/run/cold"), ("{0}/run", "{0}"), ("tier+file://{0}/run", "{0}/c")],
)
def test_folders_that_are_refused(tmp_path: Path, root: str, cold: str) -> None:
    bytecheckpoint.save(tmp_path / "run" / "1", states(step=1))
    with pytest.raises(UsageError):
        plan_cooldown(root.format(tmp_path), cold.format(tmp_path), older_than=0)


@pytest.mark.parametrize(
    "options",
    [
        {"older_than": -1}, {"older_than": "7d"}, {"older_than": float("nan")}, {"older_than": True},
        {"older_than": None}, {"older_than": datetime.timedelta(days=-1)}, {"older_than": 0, "keep": 0},
        {"older_than": 0, "keep": 1.5}, {"older_than": 0, "keep": True}, {"older_than": 0, "now": "today"},
    ],
)  # fmt: skip
def test_invalid_policies(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"older_than|keep|now"):
        plan_cooldown(str(tmp_path / "run"), str(tmp_path / "cold"), **options)


def test_an_age_may_be_a_timedelta(root: Path, tmp_path: Path) -> None:
    for age, expected in ((7, ["keep"] * 4), (1, ["move"] * 3 + ["keep"])):
        plan = plan_cooldown(
            str(root), str(tmp_path / "cold"), older_than=datetime.timedelta(days=age), now=time.time() + 2 * DAY
        )
        assert actions(plan) == expected


@pytest.mark.parametrize(("hot", "cold"), [("mem", "file"), ("file", "mem"), ("mem", "fsspec"), ("fsspec", "file")])
def test_any_scheme_to_any_other(tmp_path: Path, hot: str, cold: str) -> None:
    with new_memory() as memory:
        roots = {"mem": memory, "file": f"file://{tmp_path}/x y", "fsspec": f"fsspec+memory://{uuid.uuid4().hex}"}
        root = roots[hot]
        save_steps(root, 1, 2)
        move_all(root, f"{roots[cold]}/cold")
        assert [file for file, _ in resolve(f"{root}/1").list()] == ["metadata.parquet"]
        for step in (1, 2):
            assert load_step(f"{root}/{step}") == step
            assert command(["verify", f"{root}/{step}"]) == 0
    fsspec.filesystem("memory").store.clear()


#: For each line "root cold call" of its input, forks a process that moves a step, and ends at its call of that number.
_KILLED = """
import os, sys
from bytecheckpoint.storage.posix import open_files
from bytecheckpoint.storage.posix import storage as local
from bytecheckpoint.tiers.cooldown import cool, plan_cooldown

calls = last = 0

def counted(owner, name):
    real = getattr(owner, name)
    def call(*args, **options):
        global calls
        calls += 1
        if calls == last:
            os._exit(9)
        return real(*args, **options)
    setattr(owner, name, call)

for owner, names in ((local.LocalStorage, ("create", "publish", "delete", "sync", "list")),
                     (open_files.PosixWriter, ("write_at", "finish")), (os, ("fsync", "replace", "unlink"))):
    for name in names:
        counted(owner, name)
for line in sys.stdin:
    root, cold, last = line.split()
    last = int(last)
    if os.fork() == 0:
        for step in plan_cooldown(root, cold, older_than=0, keep=1):
            assert not cool(step).error
        print(calls, end=" ", flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.parametrize("moments", [8, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_killed_at_any_moment(moments: int, tmp_path: Path) -> None:
    original, root, cold = tmp_path / "original", tmp_path / "run", tmp_path / "cold"
    save_steps(original, 1, 2)
    program = subprocess.Popen(
        forked("-c", _KILLED), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment() | {"BYTECHECKPOINT_WRITE_THREADS": "1"},
    )  # fmt: skip

    def killed_at(call: int) -> list[int]:
        """Return the exit code, after the number of calls if the process came to its end."""
        assert program.stdin is not None and program.stdout is not None
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(cold, ignore_errors=True)
        shutil.copytree(original, root)
        print(root, cold, call, file=program.stdin, flush=True)
        return [int(word) for word in program.stdout.readline().split()]

    with program, tuned(lease_renewal=0.05, lease_expiry=0.2):
        calls, code = killed_at(10**6)
        assert code == 0 and calls > 25
        # The last calls, which commit and remove, and others at even distances.
        stride = max(2 * calls // moments, 1)
        for moment in sorted({*range(1, calls + 1, stride), *range(max(calls - moments // 2, 1), calls + 1)}):
            assert killed_at(moment) == [9]
            for step in (1, 2):
                assert load_step(root / str(step)) == step, f"killed at call {moment} of {calls}"
            if (cold / "1" / "metadata.parquet").exists():
                assert load_step(cold / "1") == 1
            move_all(root, cold)
            assert files_of(root / "1") == ["metadata.parquet"]
            assert load_step(root / "1") == 1 and load_step(cold / "1") == 1


def test_the_command_line(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cold = str(tmp_path / "cold")
    assert command(["cooldown", str(root), cold, "--older-than", "0"]) == 0
    assert "3 steps would be moved" in capsys.readouterr().out
    assert not os.path.exists(cold)
    assert command(["cooldown", str(root), cold, "--dry-run", "--older-than", "0"]) == 0
    assert "3 steps would be moved" in capsys.readouterr().out
    assert command(["cooldown", str(root), cold]) == 0
    assert "0 steps would be moved" in capsys.readouterr().out
    assert command(["cooldown", str(root), cold, "--older-than", "0", "--keep", "2", "--apply"]) == 0
    assert "2 steps moved" in capsys.readouterr().out
    assert load_step(root / "step_1") == 1
    assert command(["cooldown", str(root), cold, "--older-than", "soon"]) == 2
    assert command(["cooldown", str(tmp_path / "nothing"), cold]) == 2
    assert command(["cooldown", str(root), cold, "--keep", "0"]) == 2


def test_a_catalog_opens_storage_files_only(root: Path, tmp_path: Path) -> None:
    """A catalog that names anything else by URI is refused: readers must not be led to arbitrary files."""
    from dataclasses import replace

    from bytecheckpoint.engine.catalogs import read_catalog
    from bytecheckpoint.representation.catalog_file import encode

    storage: Storage = resolve(root / "step_1")
    catalog, _ = read_catalog(storage)
    secret = tmp_path / "secret"
    secret.write_text("x" * 100_000)
    for name in (f"file://{secret}", "file:///etc/passwd", "nothing://x/y/z", f"file://{tmp_path}/model/../secret"):
        files = [replace(catalog.files[0], name=name), *catalog.files[1:]]
        storage.publish("metadata.parquet", encode(catalog.with_files(files, catalog.file_sums)))
        with pytest.raises(bytecheckpoint.CorruptCheckpointError, match="no storage file"):
            load_step(root / "step_1")
        assert command(["verify", str(root / "step_1")]) == 1
