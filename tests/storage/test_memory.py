"""`mem://`: it outlives the process, belongs to one user, and is a storage like any other."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointNotFoundError, StorageError, StorageFullError
from bytecheckpoint.cli.main import run
from bytecheckpoint.storage import resolve
from tests.faults.coded import load_step, states
from tests.support.memory import folder_in_memory
from tests.support.mounts import small_tmpfs
from tests.support.processes import run_program


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("writer", ["process", "thread"])
def test_save_and_load(memory: str, asynchronous: bool, writer: str, capsys: pytest.CaptureFixture[str]) -> None:
    bytecheckpoint.configure(writer=writer)
    for step in (1, 2):
        report = bytecheckpoint.save(f"{memory}/step", states(step=step), async_checkpoint=asynchronous).result(60)
        assert report.path == f"{memory}/step"
        assert load_step(f"{memory}/step") == step
    assert run(["verify", f"{memory}/step"]) == 0
    assert run(["ls", memory]) == 0
    assert "committed" in capsys.readouterr().out
    assert stat.S_IMODE(folder_in_memory().stat().st_mode) == 0o700
    assert (folder_in_memory(memory) / "step" / "metadata.parquet").exists()


def test_it_outlives_the_process(memory: str) -> None:
    program = """
import os, sys, bytecheckpoint
from tests.faults.coded import states
bytecheckpoint.save(sys.argv[1], states(step=5))
os._exit(9)
"""
    assert run_program(program, f"{memory}/step").returncode == 9
    assert load_step(f"{memory}/step") == 5


def test_nothing_there(memory: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=memory):
        bytecheckpoint.open(f"{memory}/step")


@pytest.mark.parametrize("wrong", ["open", "link"])
def test_a_folder_that_others_can_reach_is_refused(tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / f"bytecheckpoint-{os.geteuid()}"
    if wrong == "open":
        folder.mkdir()
        folder.chmod(0o755)
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    bytecheckpoint.configure(memory_dir=str(tmp_path))
    with pytest.raises(StorageError, match="belongs to somebody else or is open to others"):
        resolve("mem://x")


def test_the_memory_dir_reaches_the_writer_process(tmp_path: Path) -> None:
    bytecheckpoint.configure(memory_dir=str(tmp_path), writer="process")
    bytecheckpoint.save("mem://x/step", states(step=4), async_checkpoint=True).result(60)
    assert load_step("mem://x/step") == 4
    assert (tmp_path / f"bytecheckpoint-{os.geteuid()}" / "x" / "step" / "metadata.parquet").exists()


def test_no_room(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, "1m"):
        bytecheckpoint.configure(memory_dir=str(tmp_path))
        with pytest.raises(StorageFullError, match=r"mem://x/step/.*No space left"):
            bytecheckpoint.save("mem://x/step", states(step=4, rows=10_000))
        assert resolve("mem://x/step").list() == []
