"""Copies of checkpoints and runs: verified, continued after an interrupt, and committed last."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import CheckpointNotFoundError, CorruptCheckpointError, UsageError, tools
from bytecheckpoint.cli.main import run
from bytecheckpoint.storage import resolve
from bytecheckpoint.tiers.lease import LEASE_FILE
from bytecheckpoint.tuning import tuned
from tests.support.coded import check_steps, files_of, load_step, save_steps
from tests.support.damage import flip_bit, storage_file
from tests.support.memory import folder_in_memory, hot_tier
from tests.support.processes import interrupted, run_program
from tests.support.settings import using


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 3 of a run whose name is hostile."""
    save_steps(tmp_path / "my\nrun \x1b", 1, 2, 3)
    return tmp_path / "my\nrun \x1b"


def same(source: Path, target: str) -> bool:
    storage = resolve(target)
    names = {str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()}
    return names == {name for name, _ in storage.list()} and all(
        storage.read(name) == (source / name).read_bytes() for name in names
    )


@pytest.mark.parametrize("place", ["{}/new/copy of\tit", "mem://copied-{}/step", "fsspec+memory://copied-{}/step"])
def test_a_copy_is_the_same_checkpoint(root: Path, tmp_path: Path, place: str) -> None:
    target = place.format(tmp_path if place.startswith("{") else uuid.uuid4().hex)
    progress: list[tuple[int, int]] = []
    with using(writer="thread"):
        report = tools.copy(root / "2", target, lambda *done: progress.append(done))
    assert report.state == "copied" and report.nbytes == progress[-1][0] == progress[-1][1]
    assert same(root / "2", target) and load_step(target) == 2
    assert tools.copy(root / "2", target) == tools.CopyReport(
        report.path, report.target, "already there", report.files, 0
    )
    with pytest.raises(UsageError, match="holds another checkpoint"):
        tools.copy(root / "3", target)
    assert same(root / "2", target)
    tools.remove(target)
    if target.startswith("mem://"):
        shutil.rmtree(folder_in_memory(target.removesuffix("/step")))


def test_an_interrupted_copy_is_no_checkpoint_and_is_continued(root: Path, tmp_path: Path) -> None:
    total = sum(file.stat().st_size for file in (root / "1").glob("*/*"))

    def stop(done: int, _: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), using(write_threads=1):
        tools.copy(root / "1", str(tmp_path / "copy"), stop)
    left = files_of(tmp_path / "copy")
    assert left and LEASE_FILE not in left
    with pytest.raises(CheckpointNotFoundError):
        tools.verify(tmp_path / "copy")
    flip_bit(tmp_path / "copy" / left[0])  # a killed machine may leave such files too
    assert 0 < tools.copy(root / "1", str(tmp_path / "copy")).nbytes <= total
    assert same(root / "1", str(tmp_path / "copy"))


def test_a_killed_copy_is_continued_when_its_lease_has_expired(root: Path, tmp_path: Path) -> None:
    done = run_program(
        "import os, sys\n"
        "from bytecheckpoint import tools\n"
        "tools.copy(sys.argv[1], sys.argv[2], lambda done, total: os._exit(9))\n",
        str(root / "1"), str(tmp_path / "copy"),
    )  # fmt: skip
    assert done.returncode == 9 and LEASE_FILE in os.listdir(tmp_path / "copy")
    with tuned(lease_expiry=0.2):
        tools.copy(root / "1", str(tmp_path / "copy"))
    assert same(root / "1", str(tmp_path / "copy"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_copy(tmp_path: Path, number: signal.Signals) -> None:
    step, target = tmp_path / "step", tmp_path / "copy"
    bytecheckpoint.save(step, {"model": {f"w{i}": bytes_of(16 << 20) for i in range(4)}})
    command = [sys.executable, "-m", "bytecheckpoint.cli.main", "cp", str(step), str(target)]
    code, err = interrupted(command, number, lambda: list(target.glob("model/*")))
    assert code == (130 if number == signal.SIGINT else 128 + number), err
    assert not (target / LEASE_FILE).exists() and not (target / "metadata.parquet").exists()
    assert run(["cp", str(step), str(target)]) == 0 and same(step, str(target))


def bytes_of(count: int) -> Any:
    import torch

    return torch.zeros(count, dtype=torch.uint8)


def test_a_damaged_checkpoint_is_not_copied(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(storage_file(root / "2"))
    with pytest.raises(CorruptCheckpointError, match="checksum mismatch"):
        tools.copy(root / "2", str(tmp_path / "copy"))
    storage_file(root / "3").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"lacks .*/model/rank-.*, so it cannot be copied"):
        tools.copy(root / "3", str(tmp_path / "other"))
    for target in ("copy", "other"):
        assert not (tmp_path / target / "metadata.parquet").exists()
    assert run(["cp", str(root), str(tmp_path / "runs"), "--json"]) == 1
    done = json.loads(capsys.readouterr().out)
    assert [step["state"] for step in done["steps"]] == ["failed", "failed", "copied"] and not done["ok"]
    check_steps(tmp_path / "runs", 1)
    assert run(["cp", str(root), str(tmp_path / "runs")]) == 1
    out, err = capsys.readouterr()
    assert "/1: already there" in out and err.count("failed: ") == err.count("\n") == 2 and "\x1b" not in out + err


def test_a_run_is_copied_the_newest_step_first(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "notes").mkdir()
    assert run(["cp", str(root), str(tmp_path / "copy"), "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["target"] for step in steps] == [str(tmp_path / "copy" / name) for name in ("3", "2", "1")]
    assert steps[0].keys() == {"path", "target", "state", "files", "nbytes"}
    check_steps(tmp_path / "copy", 1, 2, 3)
    shutil.rmtree(tmp_path / "copy" / "2")
    assert run(["cp", str(root), str(tmp_path / "copy")]) == 0
    assert [line.split(": ")[1].split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "already there", "copied", "already there"
    ]  # fmt: skip


def test_where_no_copy_may_go(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a\nb").write_text("x")
    (tmp_path / "other" / "4").mkdir(parents=True)
    (tmp_path / "link").symlink_to(root)
    step = root / "1"
    before = files_of(tmp_path)
    for source, target in [
        (step, step),
        (step, step / "model"),
        (step, root),
        (step, f"file://{root}/1"),
        (step, f"tier+file://{tmp_path}/tier"),
        (step, tmp_path / "file"),
        (step, tmp_path / "full"),
        (step, "nothing://x/y"),
        (step, ""),
        (root, root / "copy"),
        (root, root),
        (root, tmp_path / "other"),
        (tmp_path / "full", tmp_path / "new"),
        (tmp_path / "absent", tmp_path / "new"),
    ]:
        assert run(["cp", str(source), str(target)]) == 2, (source, target)
    assert files_of(tmp_path) == before
    assert run(["cp", str(step), str(tmp_path / "link" / "1")]) == 0  # it is there already
    assert files_of(tmp_path) == before


def test_steps_in_a_hot_tier_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_url = f"tier+file://{tmp_path}/run"
    with hot_tier(monkeypatch), using(writer="thread"):
        save_steps(run_url, 1, 2)
        shutil.rmtree(tmp_path / "run" / "2", ignore_errors=True)  # as if it were not flushed
        assert run(["cp", f"{run_url}/2", str(tmp_path / "copy")]) == 0
        assert run(["cp", run_url, str(tmp_path / "runs")]) == 0
        assert run(["cp", run_url, str(tmp_path / "run")]) == 2  # where it is flushed to
        assert run(["verify", run_url]) == 0
    assert load_step(tmp_path / "copy") == 2
    check_steps(tmp_path / "runs", 1, 2)


def test_a_cooled_step_is_copied_whole(root: Path, tmp_path: Path) -> None:
    assert run(["cooldown", str(root), str(tmp_path / "cold"), "--older-than", "0s", "--apply"]) == 0
    assert os.listdir(root / "1") == ["metadata.parquet"]
    assert tools.copy(root / "1", str(tmp_path / "copy")).state == "copied"
    shutil.rmtree(tmp_path / "cold")
    assert load_step(tmp_path / "copy") == 1
