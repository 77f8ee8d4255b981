"""Local file systems that answer oddly or fail: by calls that are made to fail, and by real small mounts."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import StorageError, StorageFullError, StorageUnavailableError
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.storage import NewFile, resolve
from bytecheckpoint.storage.posix import open_files
from bytecheckpoint.storage.testing import content, read_all, write_file
from bytecheckpoint.tuning import tuned
from tests.storage.checks import check_file, check_save
from tests.support.coded import files_of, load_step, states
from tests.support.faulty_storage import Faults
from tests.support.modes import MODES
from tests.support.mounts import small_tmpfs
from tests.support.ranks import attempt, save_all, succeeded
from tests.support.system_calls import Fail

ROOT = os.geteuid() == 0


# --- file systems that answer oddly -----------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 1000, 4096, 100_001])
def test_short_writes_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    bytecheckpoint.configure(writer="thread", direct_io="off")
    size = 300 if most == 1 else 400_000

    def cut(buffers: Any) -> list[memoryview]:
        left, found = most, []
        for buffer in buffers:
            found.append(memoryview(buffer)[:left])
            left -= len(found[-1])
        return [part for part in found if len(part)]

    writev, readv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: writev(fd, cut(buffers), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: readv(fd, cut(buffers), offset))
    check_file(resolve(tmp_path), "model/x", content(size))
    if most > 1:
        check_save(tmp_path / "s", 1, rows=300)


def test_a_write_that_takes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """... and not an endless loop."""
    bytecheckpoint.configure(writer="thread")
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(StorageUnavailableError, match=rf"cannot write {tmp_path}/s/\w+/.*took no byte"):
        bytecheckpoint.save(tmp_path / "s", states(step=1))
    assert files_of(tmp_path) == []


def test_signals_interrupt_nothing(tmp_path: Path) -> None:
    """System calls that a signal interrupts are repeated."""

    bytecheckpoint.configure(writer="thread")
    seen = [0]
    before = signal.signal(signal.SIGALRM, lambda *_: seen.__setitem__(0, seen[0] + 1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        check_save(tmp_path / "s", 1, 2, 3, 4, 5, rows=3000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen[0] > 3


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_close_is_an_error_of_the_save(tmp_path: Path, fail: Fail, code: int, mode: str) -> None:
    """NFS may report a full quota when a file is closed, and not before."""
    bytecheckpoint.configure(writer="thread", direct_io="off")
    bytecheckpoint.save(tmp_path / "s", states(step=1))
    before = files_of(tmp_path / "s")

    def ours(fd: int) -> bool:
        try:
            return "/s/model/rank" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return False

    rule = fail("close", code, ours, lose=True)
    got = attempt(lambda: bytecheckpoint.save(tmp_path / "s", states(step=2), **MODES[mode]).result(60))
    rule.times = 0
    assert rule.hits > 0
    assert type(got) is (StorageUnavailableError if code == errno.EIO else StorageFullError), got
    assert os.strerror(code) in str(got) and "/s/model/rank" in str(got)
    assert load_step(tmp_path / "s") == 1
    assert files_of(tmp_path / "s") == before, "an unfinished file is removed although its close failed"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP])
def test_file_systems_that_cannot_sync_folders(tmp_path: Path, fail: Fail, code: int) -> None:
    rule = fail("fsync", code, lambda fd: os.path.isdir(f"/proc/self/fd/{fd}"))
    check_save(tmp_path / "new" / "s", 1)
    assert rule.hits > 3


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("created", [False, True])
def test_direct_io_that_is_refused(
    tmp_path: Path, fail: Fail, monkeypatch: pytest.MonkeyPatch, code: int, created: bool
) -> None:
    """Before the file is made, or after that."""
    fail("open", code, lambda path, flags, *_: bool(flags & os.O_DIRECT), lose=created)
    monkeypatch.setattr(os, "major", lambda _: 8)
    writer = resolve(tmp_path).create(NewFile("model/x", 5001, direct=True))
    assert not writer.direct
    writer.write_at(0, [memoryview(content(5001))])
    writer.finish(5001)
    assert np.array_equal(read_all(resolve(tmp_path), "model/x"), content(5001))


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("skip", [0, 1])
def test_direct_io_that_is_refused_by_writes(tmp_path: Path, fail: Fail, code: int, skip: int) -> None:
    """Of a file system that lets files be opened so; otherwise no background save would ever succeed there."""
    bytecheckpoint.configure(writer="thread", direct_io="on", write_threads=1, chunk_bytes=1 << 20)
    rule = fail("pwritev", code, lambda fd, *_: bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), skip=skip)
    bytecheckpoint.save(tmp_path / "s", states(step=1, rows=10_000), async_checkpoint=True).result(60)
    assert load_step(tmp_path / "s", rows=10_000) == 1
    if not rule.hits:
        pytest.skip("NOT TESTED HERE: this file system takes no direct I/O")


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_blocks_that_cannot_be_reserved(tmp_path: Path, fail: Fail, code: int, direct: bool) -> None:
    """A full disk is an error before the first byte is written."""
    if os.major(os.stat(tmp_path).st_dev) == 0:
        pytest.skip("NOT TESTED HERE: this file system is on no disk")
    fail("posix_fallocate", code)
    with pytest.raises(StorageFullError, match=r"cannot create .*/model/x"):
        resolve(tmp_path).create(NewFile("model/x", 1 << 20, direct=direct))
    assert files_of(tmp_path) == []


@pytest.mark.parametrize(("wanted", "direct"), [("auto", False), ("on", True), ("off", False)])
def test_direct_io_where_there_is_no_disk(tmp_path: Path, fail: Fail, wanted: str, direct: bool) -> None:
    """Network file systems may take it; a tmpfs does so too."""
    bytecheckpoint.configure(direct_io=wanted)
    written: list[bool] = []
    with small_tmpfs(tmp_path / "t", "8m"):
        probe = resolve(tmp_path / "t").create(NewFile("model/x", 5001, direct=True))
        if wanted == "on" and not probe.direct:
            pytest.skip("NOT TESTED HERE: this kernel's tmpfs takes no direct I/O")
        probe.abort()
        # No write fails: the predicate only looks at the flags of its file.
        fail("pwritev", 0, lambda fd, *_: written.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT != 0))
        for mode in MODES.values():
            bytecheckpoint.save(tmp_path / "t" / "s", states(step=1), **mode).result(60)
            assert load_step(tmp_path / "t" / "s", prepare_save=False) == 1
    assert set(written) == {direct}


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_file_systems_without_links(tmp_path: Path, fail: Fail, code: int) -> None:
    rule = fail("link", code)
    check_save(tmp_path / "s", 1, 2)
    assert rule.hits == 1 and len(files_of(tmp_path / "s")) == 6


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_link_that_fails_otherwise_fails_the_save(tmp_path: Path, fail: Fail, code: int) -> None:
    fail("link", code)
    got = attempt(bytecheckpoint.save, tmp_path / "s", states(step=1))
    expected = {errno.EIO: StorageUnavailableError, errno.EROFS: StorageError}.get(code, StorageFullError)
    assert type(got) is expected and f"cannot publish {tmp_path}/s/metadata.parquet" in str(got)
    assert files_of(tmp_path) == []


def test_file_systems_without_locks(tmp_path: Path, fail: Fail) -> None:
    fail("flock", errno.ENOLCK, owner=fcntl)
    check_save(tmp_path / "s", 1, 2, 3)
    assert len(files_of(tmp_path / "s")) == 6


@tuned(stale_pauses=(0.0, 0.01))
def test_a_stale_name_tells_how_often_it_was_tried(tmp_path: Path, fail: Fail) -> None:
    bytecheckpoint.save(tmp_path / "s", states(step=1))
    bytecheckpoint.configure(storage_timeout=1.0)
    fail("open", errno.ESTALE, lambda path, *_: "rank-" in str(path))
    with pytest.raises(StorageUnavailableError, match=rf"cannot open {tmp_path}/s/.*Stale .* \(\d+ attempts in \d"):
        load_step(tmp_path / "s")


def test_files_that_vanish_while_a_folder_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process publishes, or removes what it replaced: the rest of the folder is listed all the same."""
    storage = resolve(tmp_path)
    for name in ("a", "b", "c", "model/a", "model/b", "model/c"):
        write_file(storage, name, content(10))
    real = os.scandir

    def scandir(path: str) -> list[os.DirEntry[str]]:
        found = list(real(path))
        Path(path, "b").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(os, "scandir", scandir)
    assert storage.list() == [("a", 10), ("c", 10), ("model/a", 10), ("model/c", 10)]


# --- on the way -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_directory_is_removed_in_the_middle(tmp_path: Path, mode: str, ranks: int) -> None:
    """Somebody's `rm -r` while a save is under way: the save fails, or nothing of it is missing."""
    bytecheckpoint.configure(writer="thread")
    path, world, faults = tmp_path / "s", ThreadWorld(ranks), Faults()
    # Errors are ignored because another rank makes files there meanwhile.
    faults.add("finish", name="optimizer", times=-1, before=lambda: shutil.rmtree(path, ignore_errors=True))
    got = save_all(world, path, 1, faults=faults, **MODES[mode])
    assert all(isinstance(raised, StorageError) and str(path) in str(raised) for raised in got), got
    assert files_of(path) == []
    if mode != "sync":
        save_all(world, path, 2)
    succeeded(save_all(world, path, 3, **MODES[mode]))
    assert load_step(path) == 3


def test_the_directory_is_removed_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bytecheckpoint.save(path, states(step=1))
    with bytecheckpoint.open(path) as checkpoint:
        shutil.rmtree(path)
        with pytest.raises(bytecheckpoint.CorruptCheckpointError, match=rf"{path}: .* is missing"):
            checkpoint["model/w"][...]
    with pytest.raises(bytecheckpoint.CheckpointNotFoundError, match=rf"{path} .*there after `handle.result\(\)`"):
        load_step(path)


# --- caches of network file systems that are out of date: test_nas.py has two mounts of a real one ----------------------


SHORT_PAUSES = (0.0, 0.01, 0.01, 0.01)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
@tuned(stale_pauses=SHORT_PAUSES)
def test_a_name_that_the_cache_knows_wrongly_is_opened_again(tmp_path: Path, fail: Fail, code: int) -> None:
    storage = resolve(tmp_path)
    write_file(storage, "model/file", content(5000))
    rule = fail("open", code, lambda path, *_: str(path).endswith("model/file"), times=3)
    assert np.array_equal(read_all(storage, "model/file"), content(5000))
    assert rule.hits == 3
    rule.times = 3
    assert storage.stat("model/file").size == 5000
    assert rule.hits == 6


@pytest.mark.parametrize("remote", [False, True])
@tuned(stale_pauses=SHORT_PAUSES)
def test_an_old_length_of_a_file_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    """A network file system may know the length from before another machine wrote the file; a local one does not."""
    monkeypatch.setattr(open_files, "on_network", lambda _: remote)
    storage = resolve(tmp_path)
    (tmp_path / "file").touch()
    reader = storage.open("file")
    (tmp_path / "file").write_bytes(content(5000))
    assert reader.match_size(5000) == remote
    assert not reader.match_size(6000)
    reader.close()


@tuned(stale_pauses=(1000.0,))
def test_a_missing_file_is_reported_at_once(tmp_path: Path) -> None:
    storage = resolve(tmp_path / "step")
    for name in ("model/file", "other"):
        for call in (storage.open, storage.read, storage.stat):
            with pytest.raises(FileNotFoundError):
                call("metadata.parquet")
        write_file(storage, name, content(5))


@pytest.mark.parametrize("threads", [1, 4])
@tuned(stale_pauses=SHORT_PAUSES)
def test_an_open_file_that_becomes_stale_is_reopened(tmp_path: Path, fail: Fail, threads: int) -> None:
    storage = resolve(tmp_path)
    data = content(1 << 20)
    write_file(storage, "model/file", data)
    reader = storage.open("model/file")
    stale = reader._file.get()  # type: ignore[attr-defined]
    fail("preadv", errno.ESTALE, lambda fd, *_: fd == stale)
    out = np.zeros(len(data), np.uint8)
    step = len(data) // 16

    def one(start: int) -> int:
        return reader.read_into(start, [memoryview(out)[start : start + step]])

    with ThreadPoolExecutor(threads) as pool:
        assert sum(pool.map(one, range(0, len(data), step))) == len(data)
    assert np.array_equal(out, data)
    before = len(os.listdir("/proc/self/fd"))
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2, "both descriptors are closed"


@tuned(stale_pauses=SHORT_PAUSES)
def test_a_file_that_is_removed_while_it_is_opened_again_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Fail
) -> None:
    """Another machine replaces the checkpoint: a load begins again for it, and must not fail with an error of storage."""
    monkeypatch.setattr(open_files, "on_network", lambda _: True)
    storage = resolve(tmp_path)
    write_file(storage, "model/file", content(5000))
    stale, shorter = storage.open("model/file"), storage.open("model/file")
    lost = stale._file.get()  # type: ignore[attr-defined]
    fail("preadv", errno.ESTALE, lambda fd, *_: fd == lost)
    (tmp_path / "model/file").unlink()
    assert stale.read_into(0, [memoryview(bytearray(5000))]) == 0
    assert not shorter.match_size(6000)
    for reader in (stale, shorter):
        reader.close()
