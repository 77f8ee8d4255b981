"""`rm` and `gc`: checkpoints and garbage go, whatever else is there stays."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CheckpointNotFoundError, StorageConflictError, StorageUnavailableError, UsageError
from bytecheckpoint.cli.main import run
from bytecheckpoint.collectives import current
from bytecheckpoint.engine.catalogs import read_catalog
from bytecheckpoint.storage import FileReader, resolve
from bytecheckpoint.storage.posix.storage import LocalStorage
from bytecheckpoint.tiers.cooldown import cool, plan_cooldown
from bytecheckpoint.tiers.flush.lock import flush_lock
from bytecheckpoint.tiers.storage import TierStorage
from bytecheckpoint.tools import removal
from bytecheckpoint.tools.removal import collect_garbage, collect_hot_garbage, remove
from bytecheckpoint.tools.retirement import retire
from bytecheckpoint.world import world_of
from tests.support.coded import files_of
from tests.support.memory import durable_folder, hot_folder, hot_tier

OLD = time.time() - 7 * 86400


def save(path: Path | str, step: int = 1) -> None:
    bytecheckpoint.save(path, {"model": {"w": torch.full((100,), float(step))}, "extra": {"step": step}}).result(60)


def age(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (OLD, OLD))


def uncommitted(folder: Path, step: int = 9) -> list[str]:
    """Leave the files of a save that lost one of them and did not commit; return their names."""
    save(folder / "other", step)
    names = [str(p.relative_to(folder / "other")) for p in (folder / "other").rglob("rank-*")]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder / "other" / name, folder / name)
    shutil.rmtree(folder / "other")
    return names


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with hot_tier(monkeypatch):
        yield f"tier+file://{tmp_path}/run"


def drain() -> None:
    world_of(current()).flusher.drain()


@pytest.mark.parametrize("dry_run", [True, False])
def test_rm_removes_what_is_ours(tmp_path: Path, dry_run: bool) -> None:
    path = tmp_path / "step"
    save(path)
    uncommitted(path)
    (path / "notes.txt").write_text("not ours")
    before = files_of(path)
    (removal,) = remove(str(path), dry_run=dry_run)
    assert removal.files == len(before) - 1
    assert files_of(path) == (before if dry_run else ["notes.txt"])


@pytest.mark.parametrize("name", ["another program's", "an uncommitted save beside it", "a damaged catalog"])
def test_a_catalog_without_a_seal_stays(tmp_path: Path, name: str) -> None:
    path = tmp_path / "step"
    catalog = path / "metadata.parquet"
    if name == "a damaged catalog":
        save(path)
        catalog.write_bytes(catalog.read_bytes()[:-1])
    else:
        path.mkdir()
        pyarrow.parquet.write_table(pyarrow.table({"rows": [1, 2, 3]}), catalog)
    content = catalog.read_bytes()
    if name == "another program's":
        with pytest.raises(CheckpointNotFoundError, match="has no catalog's seal"):
            remove(str(path))
        assert run(["rm", str(path)]) == 1
    else:
        uncommitted(path)
        gone, kept = remove(str(path))
        assert gone.files > 0 and "has no catalog's seal" in kept.kept
        uncommitted(path)
        assert run(["rm", str(path)]) == 1
    assert files_of(path) == ["metadata.parquet"] and catalog.read_bytes() == content


def test_gc_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gc", str(tmp_path / "none")]) == 1
    assert "there is nothing" in capsys.readouterr().err
    assert run(["gc", str(tmp_path)]) == 0


def test_rm_of_a_folder_without_other_files_removes_it(tmp_path: Path) -> None:
    save(tmp_path / "run" / "1")
    remove(str(tmp_path / "run" / "1"))
    assert not any((tmp_path / "run" / "1").rglob("*"))
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        remove(str(tmp_path / "run" / "1"))


def test_rm_of_a_run_names_its_steps(tmp_path: Path) -> None:
    save(tmp_path / "1")
    with pytest.raises(CheckpointNotFoundError, match="folder of 1 steps"):
        remove(str(tmp_path))


def test_rm_at_a_tier_removes_both_copies(tier: str) -> None:
    save(f"{tier}/1")
    save(f"{tier}/2")
    drain()
    with flush_lock(TierStorage(f"{tier}/2"), exclusive=False, timeout=5), pytest.raises(StorageConflictError):
        remove(f"{tier}/2")
    remove(f"{tier}/2")
    assert not hot_folder(f"{tier}/2").exists() and files_of(durable_folder(f"{tier}/2")) == []
    assert resolve(f"{tier}/1").read("metadata.parquet")


def test_rm_of_a_cooled_step(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "run" / str(step))
    plan = plan_cooldown(str(tmp_path / "run"), f"file://{tmp_path}/cold", older_than=0, keep=1)
    assert all(cool(step).done for step in plan if step.action == "move")
    with pytest.raises(UsageError, match="--cold"):
        remove(str(tmp_path / "run" / "1"))
    assert remove(str(tmp_path / "run" / "1"), cold=True)
    assert files_of(tmp_path / "run" / "1") == files_of(tmp_path / "cold" / "1") == []


def test_files_that_another_step_uses_stay(tmp_path: Path) -> None:
    save(tmp_path / "run" / "1")
    save(tmp_path / "run" / "2")
    done = [cool(s) for s in plan_cooldown(str(tmp_path / "run"), f"file://{tmp_path}/cold", older_than=0, keep=1)]
    assert any(step.done for step in done)
    shutil.copytree(tmp_path / "run" / "1", tmp_path / "cold" / "beside")
    with pytest.raises(UsageError, match=r"cold/beside uses files of .*cold/1"):
        remove(str(tmp_path / "cold" / "1"))


def test_rm_while_a_step_beside_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may use the files. A damaged one cannot be loaded anyway."""
    save(tmp_path / "1")
    save(tmp_path / "2")
    real = LocalStorage.open

    def opened(storage: LocalStorage, name: str) -> FileReader:
        if storage.root.endswith("2"):
            raise StorageUnavailableError("no answer")
        return real(storage, name)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "open", opened)
        with pytest.raises(StorageUnavailableError, match="no answer"):
            remove(str(tmp_path / "1"))
        with pytest.raises(StorageUnavailableError, match="no answer"):
            remove(str(tmp_path / "2"))
    assert len(files_of(tmp_path / "1")) == len(files_of(tmp_path / "2")) > 0
    (tmp_path / "2" / "metadata.parquet").write_bytes(b"damaged")
    assert remove(str(tmp_path / "1")) and remove(str(tmp_path / "2"))


def test_gc_removes_what_killed_saves_left(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / str(step), step)
    for step in (1, 2):
        uncommitted(tmp_path / str(step))
    (tmp_path / "1" / ".publishing-0123456789abcdef").write_text("x")
    (tmp_path / "1" / ".publishing-notes").write_text("not ours")
    age(tmp_path / "1")
    before = {step: files_of(tmp_path / str(step)) for step in (1, 2, 3)}
    assert len(collect_garbage(str(tmp_path), older_than=86400, dry_run=True)) == 2
    assert {step: files_of(tmp_path / str(step)) for step in (1, 2, 3)} == before
    found = collect_garbage(str(tmp_path), older_than=86400)
    assert {removal.what for removal in found} == {"uncommitted", "temporary"}
    assert len(files_of(tmp_path / "1")) == len(files_of(tmp_path / "3")) + 1, "the notes"
    assert files_of(tmp_path / "2") == before[2], "a save may be writing there"
    for step in (1, 2, 3):
        assert bytecheckpoint.open(tmp_path / str(step))["model/w"][0] == step


@pytest.mark.parametrize("clock", ["ahead", "unknown"])
def test_gc_keeps_what_only_looks_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: str) -> None:
    """To a machine whose clock is a week ahead, or on a storage that tells no times; a save may be writing there."""
    save(tmp_path / "1")
    uncommitted(tmp_path / "1")
    before, real = files_of(tmp_path), LocalStorage.stat
    if clock == "ahead":
        monkeypatch.setattr(removal.time, "time", lambda now=time.time: now() + 7 * 86400)
    else:
        monkeypatch.setattr(LocalStorage, "stat", lambda *args: dataclasses.replace(real(*args), modified=0.0))
    assert collect_garbage(str(tmp_path), older_than=86400) == []
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("lost", ["catalog", "catalog and a file"])
def test_gc_keeps_what_only_lacks_a_catalog(tmp_path: Path, lost: str) -> None:
    save(tmp_path)
    (tmp_path / "metadata.parquet").unlink()
    if lost != "catalog":
        next(tmp_path.rglob("values-*")).unlink()
        next(tmp_path.rglob("rank-*")).unlink(missing_ok=True)
    age(tmp_path)
    found = collect_garbage(str(tmp_path), older_than=86400)
    assert [bool(removal.kept) for removal in found] == ([True] if lost == "catalog" else [False] * len(found))
    assert bool(files_of(tmp_path)) == (lost == "catalog")


def test_gc_shows_deletions_that_were_begun(tmp_path: Path) -> None:
    folder = tmp_path / "step_00000001"
    save(folder)
    age(folder)
    before = [name for name in files_of(folder) if name != "metadata.parquet"]
    assert retire(resolve(str(folder)), read_catalog(resolve(str(folder)))[0].info["created"]) == ""
    (young,) = collect_garbage(str(tmp_path), older_than=86400)
    assert (young.what, young.files) == ("retired", len(before)) and "others may be reading" in young.kept
    age(folder)
    for dry_run in (True, False):
        assert {*before} <= {*files_of(folder)}
        (found,) = collect_garbage(str(tmp_path), older_than=86400, dry_run=dry_run)
        assert (found.what, found.files, found.kept) == ("retired", len(before), "")
    assert not folder.exists()


@pytest.mark.parametrize("left", ["", "model", "notes/old/more"])
def test_gc_removes_the_folder_of_a_deletion_that_was_killed(tmp_path: Path, left: str) -> None:
    folder = tmp_path / "step_00000001"
    (folder / left).mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    if left.startswith("notes"):
        (folder / left / "x").touch()
    goes = not left.startswith("notes")
    for dry_run in (True, False):
        assert folder.exists()
        found = collect_garbage(str(tmp_path), older_than=0, dry_run=dry_run)
        assert [removal.what for removal in found] == ["empty folder"] * goes
    assert folder.exists() != goes
    assert (tmp_path / "logs").exists()


def test_gc_with_a_damaged_catalog_removes_nothing(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "metadata.parquet").write_bytes(b"damaged")
    before = files_of(tmp_path)
    (found,) = collect_garbage(str(tmp_path), older_than=0)
    assert "cannot be read" in found.kept and files_of(tmp_path) == before


def test_gc_of_the_hot_tier(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all runs; what is not durable stays, and so does what is young."""
    save(f"{tier}/1")
    drain()
    with monkeypatch.context() as patch:
        patch.setattr("bytecheckpoint.tiers.flush.flusher.flush_together", _refuse)
        bytecheckpoint.save(f"{tier}-other/1", {"extra": {"step": 1}}).committed.exception(60)
        drain()
    assert [removal.kept for removal in collect_hot_garbage(older_than=86400)] != []
    assert hot_folder(f"{tier}/1").exists()
    collect_hot_garbage(older_than=0)
    assert not hot_folder(f"{tier}/1").exists() and hot_folder(f"{tier}-other/1").exists()


def _refuse(*_: Any) -> None:
    raise StorageConflictError("no")


def test_the_verbs(tmp_path: Path, tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    def call(*arguments: str) -> tuple[int, str]:
        return run(list(arguments)), capsys.readouterr().out

    save(tmp_path / "1")
    code, out = call("rm", str(tmp_path / "1"), "--dry-run")
    assert code == 0 and "would be removed" in out and (tmp_path / "1" / "metadata.parquet").exists()
    code, out = call("rm", str(tmp_path / "1"), str(tmp_path / "none"), "--json")
    assert code == 1 and json.loads(out)["removed"][0]["what"] == "checkpoint" and len(json.loads(out)["errors"]) == 1
    uncommitted(tmp_path / "2")
    code, out = call("gc", str(tmp_path), "--older-than", "0")
    assert code == 0 and "uncommitted" in out and files_of(tmp_path / "2") == []
    assert call("gc", "--json")[0] == 0
