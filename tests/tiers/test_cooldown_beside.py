"""Cooldown at the same time as loads, readers and other cooldowns; a cold storage that goes away."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import (
    CheckpointError,
    CorruptCheckpointError,
    StorageConflictError,
    StorageError,
    StorageUnavailableError,
)
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.errors import CheckpointReplacedError
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.posix import open_files
from bytecheckpoint.storage.posix import storage as local
from bytecheckpoint.tiers.cooldown import CoolStep, cool, plan_cooldown
from bytecheckpoint.tiers.lease import LEASE_FILE, Lease, leased
from bytecheckpoint.tuning import tuned
from tests.support.coded import check_steps, files_of, load_step, save_steps
from tests.support.processes import run_program, wait_until
from tests.support.programs import forked
from tests.support.ranks import attempt
from tests.support.system_calls import failing


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 3."""
    save_steps(tmp_path / "run", 1, 2, 3)
    return tmp_path / "run"


@pytest.fixture
def short_leases() -> Iterator[None]:
    """Leases are renewed often, and expire soon."""
    with tuned(lease_renewal=0.05, lease_expiry=1.0):
        yield


def planned(root: Path, cold: Path | str) -> list[CoolStep]:
    return [step for step in plan_cooldown(str(root), str(cold), older_than=0) if step.action == "move"]


@contextmanager
def paused(owner: Any, name: str, fits: Callable[..., bool], work: Callable[..., Any], *given: Any) -> Iterator[Any]:
    """Begin `work(*given)` on a thread; run the block while the first call of `owner.name` that fits stands still."""
    reached, go_on = threading.Event(), threading.Event()
    real = getattr(owner, name)

    def call(this: Any, *args: Any, **options: Any) -> Any:
        if not reached.is_set() and fits(this, *args):
            reached.set()
            assert go_on.wait(60)
        return real(this, *args, **options)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(owner, name, call)
        future = pool.submit(work, *given)
        try:
            assert reached.wait(60)
            yield future
        finally:
            go_on.set()
            future.exception(60)


@pytest.mark.parametrize("moment", ["catalog read", "file opened", "file read"])
def test_a_step_that_moves_while_it_is_loaded(root: Path, tmp_path: Path, moment: str) -> None:
    """The load finds the files at their new place or keeps reading the old ones; it does not fail."""
    (plan, *_) = planned(root, tmp_path / "cold")
    here = str(root / "1")
    owner, name, fits = {
        "catalog read": (local.PosixStorage, "open", lambda storage, _: storage.root == here),
        "file opened": (open_files.PosixReader, "read_into", lambda reader, *_: here in reader._path),
        "file read": (open_files.PosixReader, "read_into", lambda reader, *_: f"{here}/optimizer" in reader._path),
    }[moment]
    with paused(owner, name, fits, load_step, root / "1") as loading:
        assert cool(plan).done
        assert files_of(root / "1") == ["metadata.parquet"]
    assert loading.result() == 1


def test_a_step_that_moves_while_it_is_open(root: Path, tmp_path: Path) -> None:
    """A checkpoint opened before reads the old files or fails because they are gone; a new one reads the cold files."""
    (plan, *_) = planned(root, tmp_path / "cold")
    with bytecheckpoint.open(root / "1") as checkpoint:
        before = checkpoint["model/w"][...]
        assert cool(plan).done
        got = {key: attempt(lambda key=key: checkpoint[key][...]) for key in ("model/w", "optimizer/momentum")}
    with bytecheckpoint.open(root / "1") as checkpoint:
        for key, found in got.items():
            if isinstance(found, Exception):
                assert isinstance(found, CheckpointReplacedError)
            else:
                assert torch.equal(found, checkpoint[key][...])
        assert torch.equal(checkpoint["model/w"][...], before)


def test_a_cooled_step_can_be_exported_and_compared(root: Path, tmp_path: Path) -> None:
    assert command(["export", str(root / "1"), str(tmp_path / "before")]) == 0
    assert all(cool(step).done for step in planned(root, tmp_path / "cold"))
    assert command(["export", str(root / "1"), str(tmp_path / "after")]) == 0
    assert (tmp_path / "before" / "model.safetensors").read_bytes() == (
        tmp_path / "after" / "model.safetensors"
    ).read_bytes()
    assert command(["inspect", str(root / "1"), "--values", "--boxes"]) == 0
    assert command(["repair", str(root / "1")]) == 0, "its catalog is sound"


# --- two at once --------------------------------------------------------------------------------------------------------


def test_a_second_cooldown_leaves_the_step_to_the_first(root: Path, tmp_path: Path, short_leases: None) -> None:
    cold = tmp_path / "cold"
    (plan, *_) = planned(root, cold)
    with paused(open_files.PosixWriter, "finish", lambda writer, *_: str(cold) in writer._path, cool, plan) as first:
        second = cool(plan)
        assert not second.done and "being filled by another cooldown or copy (process" in second.error
        assert "let it finish" in second.error
    assert first.result().done
    assert cool(plan).done, "and nothing is left to do"
    assert load_step(root / "1") == load_step(cold / "1") == 1
    assert LEASE_FILE not in files_of(cold / "1")


def test_many_cooldowns_at_once(tmp_path: Path) -> None:
    root, cold = tmp_path / "run", tmp_path / "cold"
    save_steps(root, *range(1, 4))
    line = forked("-m", "bytecheckpoint.cli.main", "cooldown", root, cold, "--older-than", "0s", "--apply", "--json")
    movers = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    reports = []
    for mover in movers:
        out, errors = mover.communicate(timeout=100)
        assert mover.returncode in (0, 1), errors
        reports.append(json.loads(out))
    problems = [step["error"] for report in reports for step in report["steps"] if step["error"]]
    assert all("another cooldown" in text or "another save" in text for text in problems), problems
    check_steps(root, *range(1, 4))
    assert command(["cooldown", str(root), str(cold), "--older-than", "0s", "--apply"]) == 0
    for step in range(1, 3):
        assert files_of(root / str(step)) == ["metadata.parquet"]
        assert load_step(cold / str(step)) == step and command(["verify", str(cold / str(step))]) == 0
        assert LEASE_FILE not in files_of(cold / str(step))


@pytest.mark.parametrize("content", [b"process 7 on another", b"\xff"])
def test_a_lease_that_is_not_renewed_is_taken_over(
    root: Path, tmp_path: Path, content: bytes, short_leases: None
) -> None:
    (plan, *_) = planned(root, tmp_path / "cold")
    storage = resolve(plan.target)
    storage.publish(LEASE_FILE, content)
    begun = time.monotonic()
    assert cool(plan).done
    assert time.monotonic() - begun >= 1.0
    assert LEASE_FILE not in files_of(tmp_path / "cold" / "1") and load_step(root / "1") == 1


@tuned(lease_renewal=100.0, lease_expiry=1.0)
def test_a_cooldown_that_has_lost_its_lease_removes_nothing(root: Path, tmp_path: Path) -> None:
    """It was stopped for longer than others wait, and finds that out before it moves the step."""
    cold = tmp_path / "cold"
    (plan, *_) = planned(root, cold)
    before = files_of(root)
    with ExitStack() as leases:
        with paused(
            open_files.PosixWriter, "finish", lambda writer, *_: str(cold) in writer._path, cool, plan
        ) as first:
            second = leases.enter_context(leased(resolve(plan.target)))
        assert f"this process lost {LEASE_FILE}" in first.result().error
        second.check()
    assert files_of(root) == before and load_step(root / "1") == 1
    assert not (cold / "1" / "metadata.parquet").exists()
    assert cool(plan).done and load_step(root / "1") == load_step(cold / "1") == 1


# --- one folder, two names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ["link", "link of a step", "scheme"])
def test_a_cold_folder_that_is_the_hot_one(root: Path, tmp_path: Path, alias: str) -> None:
    """Its files would be proved to be there, and then be removed as the hot ones."""
    cold = str(tmp_path / "cold")
    if alias == "link":
        os.symlink(root, cold)
    elif alias == "link of a step":
        os.mkdir(cold)
        for step in (1, 2):
            os.symlink(root / str(step), f"{cold}/{step}")
    else:
        cold = f"fsspec+file://{root}"
    before = files_of(root)
    for step in planned(root, cold):
        done = cool(step)
        assert not done.done and "are the same folder" in done.error
    assert files_of(root) == before
    assert [load_step(root / str(step)) for step in (1, 2, 3)] == [1, 2, 3]


def test_a_cold_folder_that_has_become_the_hot_one(root: Path, tmp_path: Path) -> None:
    """Somebody moved all files back, with a link in place of the cold folder: the hot files are not remains of a move."""
    cold = tmp_path / "cold"
    assert all(cool(step).done for step in planned(root, cold))
    for step in (1, 2):
        for folder in ("model", "optimizer", "extra"):
            shutil.move(cold / str(step) / folder, root / str(step) / folder)
    shutil.rmtree(cold)
    os.symlink(root, cold)
    assert load_step(root / "1") == 1
    steps = [
        step for step in plan_cooldown(str(root), str(tmp_path / "colder"), older_than=0) if step.action == "finish"
    ]
    assert len(steps) == 2 and all("are the same folder" in cool(step).error for step in steps)
    assert load_step(root / "1") == 1 and load_step(root / "2") == 2


def test_a_lease_ends_with_its_with_block(tmp_path: Path, short_leases: None) -> None:
    storage = resolve(tmp_path)

    def work() -> None:
        with leased(storage):
            assert isinstance(attempt(work), StorageConflictError)
            raise ZeroDivisionError

    for _ in range(3):
        assert isinstance(attempt(work), ZeroDivisionError)
        assert storage.list() == []


_KILLED = """
import os, sys
from bytecheckpoint.storage import resolve
from bytecheckpoint.tiers.lease import leased
with leased(resolve(sys.argv[1])):
    os._exit(9)
"""


def test_the_lease_of_a_killed_process_is_taken_over_by_one(tmp_path: Path, short_leases: None) -> None:
    storage = resolve(tmp_path / "cold")
    assert run_program(_KILLED, storage.url).returncode == 9
    assert [name for name, _ in storage.list()] == [LEASE_FILE]
    start = threading.Barrier(6)
    losers = itertools.count(1)
    stay = threading.Event()

    def work() -> None:
        with leased(storage) as lease:
            while not stay.wait(0.01):  # one whose new lease another has removed ends at a check
                lease.check()

    def one(_: int) -> Any:
        start.wait(30)
        found = attempt(work)
        if found is not None and next(losers) == 5:
            stay.set()
        return found

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(one, range(6)))
    assert sum(result is None for result in results) == 1
    assert all(isinstance(found, StorageConflictError) for found in results if found is not None)


class _WithoutConditions(local.LocalStorage):
    """A storage that creates under a condition, but does not replace, like Ceph 16."""

    def check_publish(self, name: str, expected: str) -> None:
        if expected:
            raise StorageError(f"cannot replace {name}: no If-Match")

    def publish(self, name: str, data: bytes, *, expected: str | None = None) -> None:
        self.check_publish(name, expected or "")
        super().publish(name, data, expected=expected)


def test_leases_where_nothing_is_replaced_under_a_condition(root: Path, tmp_path: Path, short_leases: None) -> None:
    """A killed holder blocks nobody for ever, and a living one is respected."""
    storage = _WithoutConditions(str(tmp_path / "cold"))
    assert run_program(_KILLED, storage.url).returncode == 9
    with leased(storage) as lease:
        first = storage.read(LEASE_FILE)
        assert wait_until(lambda: storage.read(LEASE_FILE) != first, 30)
        assert isinstance(attempt(Lease, storage), StorageConflictError)
        lease.check()
    assert storage.list() == []


# --- the cold storage goes away -----------------------------------------------------------------------------------------


def test_the_cold_files_are_gone(root: Path, tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    assert all(cool(step).done for step in planned(root, cold))
    shutil.move(cold, tmp_path / "elsewhere")
    for function in (load_step, lambda path: bytecheckpoint.open(path)["model/w"][...]):
        with pytest.raises(CorruptCheckpointError, match=rf"file://{cold}/1/\w+/.* is missing"):
            function(root / "1")
    assert command(["verify", str(root / "1")]) == 1
    assert command(["ls", str(root)]) == 0, "the catalogs are still there"
    assert load_step(root / "3") == 3
    shutil.move(tmp_path / "elsewhere", cold)
    assert load_step(root / "1") == 1


def test_the_cold_storage_does_not_answer(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = tmp_path / "cold"
    assert all(cool(step).done for step in planned(root, cold))
    bytecheckpoint.configure(storage_timeout=1.0)
    failing(monkeypatch, "open", errno.ENOTCONN, lambda path, *_: str(path).startswith(f"{cold}/1/"))
    with pytest.raises(StorageUnavailableError, match=rf"cannot open .*{cold}/1/.*not connected"):
        load_step(root / "1")
    assert load_step(root / "2") == 2


def test_a_cold_step_is_brought_back_by_copying(root: Path, tmp_path: Path) -> None:
    """The order is that of docs/how-to/cool-down.md: the storage files first, the catalog last."""
    cold = tmp_path / "cold"
    assert all(cool(step).done for step in planned(root, cold))
    for folder in ("model", "optimizer", "extra"):
        shutil.copytree(cold / "1" / folder, root / "1" / folder)
        assert load_step(root / "1") == 1
    shutil.copy(cold / "1" / "metadata.parquet", root / "1" / "new")
    os.replace(root / "1" / "new", root / "1" / "metadata.parquet")
    shutil.rmtree(cold / "1")
    assert load_step(root / "1") == 1
    (step,) = [step for step in plan_cooldown(str(root), str(cold), older_than=0) if step.name == "1"]
    assert step.action == "move" and cool(step).done
    assert load_step(root / "1") == 1


def test_a_cold_root_that_cannot_be_written(root: Path, tmp_path: Path) -> None:
    (tmp_path / "cold").write_text("a file")
    before = files_of(root)
    for step in planned(root, tmp_path / "cold"):
        done = cool(step)
        assert not done.done and "Not a directory" in done.error and str(tmp_path / "cold") in done.error
    assert files_of(root) == before
    with pytest.raises(CheckpointError):
        plan_cooldown(str(tmp_path / "nothing"), str(tmp_path / "cold"), older_than=0)
