"""File systems that are full, read-only, or take direct I/O: small ones that the tests mount, which takes root."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import StorageError, StorageFullError
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.storage import NewFile, resolve
from tests.support.coded import files_of, load_step, states
from tests.support.mounts import run_command, small_ext4, small_tmpfs
from tests.support.ranks import check_recovery, save_all, saved, succeeded

MODES: dict[str, dict[str, Any]] = {"sync": {}, "async": {"async_checkpoint": True}}
BIG = 6000  # rows: some 6 MB in all

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Return a function that mounts a file system below `tmp_path` until the test ends."""
    with contextlib.ExitStack() as mounts:

        def make(kind: str, size: Any, name: str = "mnt") -> Path:
            try:
                mounts.enter_context((small_tmpfs if kind == "tmpfs" else small_ext4)(tmp_path / name, size))
            except OSError as error:
                pytest.skip(f"NOT TESTED HERE: cannot mount a small {kind}, which takes root: {error}")
            return tmp_path / name

        yield make


def failed(got: list[Any], error: type[Exception]) -> None:
    for rank, raised in enumerate(got):
        assert type(raised) is error, f"rank {rank}: {raised!r}"
        assert "rank " in str(raised) and "\n" not in str(raised)


def after_a_failure(world: ThreadWorld, path: Path, before: list[str], mode: str) -> None:
    """Fail unless step 1 is whole, nothing else is left, and the next saves work."""
    assert load_step(path) == 1
    assert files_of(path) == before
    check_recovery(world, path, mode)
    assert len(files_of(path)) == len(before)


@pytest.mark.parametrize("writer", ["process", "thread"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_tmpfs(mount: Mount, ranks: int, mode: str, writer: str) -> None:
    bytecheckpoint.configure(writer=writer)
    path = mount("tmpfs", size="2m") / "s"
    world = saved(path, ranks)
    before = files_of(path)
    got = save_all(world, path, 2, rows=BIG, **MODES[mode])
    failed(got, StorageFullError)
    assert all("No space left" in str(raised) and "free space" in str(raised) for raised in got)
    after_a_failure(world, path, before, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_tmpfs_that_gets_full_at_every_point_of_a_save(mount: Mount, mode: str) -> None:
    """Free space grows page by page, so that folders, headers, data, or the catalog are the first that do not fit."""
    bytecheckpoint.configure(writer="thread")
    root = mount("tmpfs", size="1m")
    path, ballast = root / "s", root / "ballast"
    failures = successes = 0
    step = 1
    bytecheckpoint.save(path, states(step=1))
    before = len(files_of(path))
    free = shutil.disk_usage(root).free
    for pages in range(40):
        ballast.write_bytes(bytes(free - 4096 * pages))
        wanted = step + 1
        try:
            bytecheckpoint.save(path, states(step=wanted), **MODES[mode]).result(20)
            step = wanted
            successes += 1
        except StorageFullError:
            failures += 1
        ballast.unlink()
        assert load_step(path) == step
        assert len(files_of(path)) == before, f"{pages} free pages: {files_of(path)}"
    assert failures > 10 and successes > 3


def test_a_tmpfs_without_inodes(mount: Mount) -> None:
    root = mount("tmpfs", size="8m,nr_inodes=14")
    path = root / "s"
    bytecheckpoint.save(path, states(step=1))
    before = files_of(path)
    spare = 0
    while True:
        try:
            (root / f"spare{spare}").touch()
            spare += 1
        except OSError:
            break
    with pytest.raises(StorageFullError, match="No space left"):
        bytecheckpoint.save(path, states(step=2))
    assert load_step(path) == 1 and files_of(path) == before
    with pytest.raises(StorageFullError):
        bytecheckpoint.save(root / "other", states(step=2))
    assert not (root / "other").exists()
    for number in range(spare):
        (root / f"spare{number}").unlink()


@pytest.mark.parametrize("mode", MODES)
def test_a_full_ext4_with_direct_io(mount: Mount, mode: str) -> None:
    bytecheckpoint.configure(writer="process" if mode == "async" else "thread")
    path = mount("ext4", size=6 << 20) / "s"
    probe = resolve(path).create(NewFile("model/probe", 10, direct=True))
    assert probe.direct, "a loop device takes direct I/O, so that is what is tested"
    probe.abort()
    world = saved(path, **MODES[mode])
    assert load_step(path) == 1
    before = files_of(path)
    failed(save_all(world, path, 2, rows=BIG, **MODES[mode]), StorageFullError)
    after_a_failure(world, path, before, mode)


@pytest.mark.parametrize("mode", MODES)
def test_direct_io_of_any_length(mount: Mount, mode: str) -> None:
    path = mount("ext4", size=24 << 20) / "s"
    for rows in (1, 2, 511, 513, 4095):
        bytecheckpoint.save(path, states(step=rows, rows=rows), **MODES[mode]).result(30)
        assert load_step(path, rows=rows) == rows


@pytest.mark.parametrize("mode", MODES)
def test_a_file_system_that_turns_read_only(mount: Mount, mode: str) -> None:
    root = mount("ext4", size=24 << 20)
    path = root / "s"
    world = saved(path)
    before = files_of(path)
    run_command("mount", "-o", "remount,ro", str(root))
    assert load_step(path) == 1, "reading needs no writing"
    with bytecheckpoint.open(path) as checkpoint:
        assert checkpoint["model/bias"][0] == checkpoint["model/bias"][...][0]
    got = save_all(world, path, 2, **MODES[mode])
    failed(got, StorageError)
    assert all("Read-only file system" in str(raised) for raised in got)
    run_command("mount", "-o", "remount,rw", str(root))
    after_a_failure(world, path, before, mode)


def test_one_folder_alone_has_no_space(mount: Mount) -> None:
    """The folder of one kind is a full file system of its own. The files of the failed save in other folders go too."""
    root, full = mount("tmpfs", size="4m", name="large"), mount("tmpfs", size="16k", name="small")
    path = root / "s"
    world = saved(path)
    before = files_of(path)
    for name in os.listdir(path / "extra"):
        shutil.copy(path / "extra" / name, full / name)
    run_command("mount", "--bind", str(full), str(path / "extra"))
    try:
        failed(save_all(world, path, 2), StorageFullError)
        assert load_step(path) == 1
        assert files_of(path) == before
    finally:
        run_command("umount", str(path / "extra"))
    succeeded(save_all(world, path, 3))
    assert load_step(path) == 3
