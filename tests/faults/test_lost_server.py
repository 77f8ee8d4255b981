"""The server of a mounted file system is killed and comes back: saves and loads continue, and nothing is lost silently."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import StorageConflictError, StorageUnavailableError
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.storage import NewFile, resolve
from bytecheckpoint.storage.testing import content, read_all
from tests.servers.faultfs import FaultFs, fault_fs
from tests.support.coded import files_of, load_step, states, step_of
from tests.support.modes import MODES
from tests.support.processes import wait_until
from tests.support.ranks import attempt
from tests.support.variants import crossed

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

#: Seconds until the server is back.
_AWAY = 3.0
_ROWS = 10_000


@pytest.fixture
def fs(tmp_path: Path) -> Iterator[FaultFs]:
    with fault_fs(tmp_path) as fs:
        yield fs


@contextmanager
def killed_when(fs: FaultFs, condition: Callable[[], bool], **options: Any) -> Iterator[None]:
    """Kill the server once the condition holds, and have it back a while later, before the block has ended."""

    def kill() -> None:
        assert wait_until(condition, 60)
        fs.kill_for(_AWAY, **options).join()

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        yield
        assert killed.done(), "the block has waited for the server"
        killed.result()


def bytes_in(folder: Path, part: str) -> int:
    """Return the bytes of the files below a folder whose names have a part."""
    found = 0
    for name in files_of(folder):
        try:
            found += os.path.getsize(folder / name) if part in name else 0
        except FileNotFoundError:
            continue
    return found


@pytest.mark.parametrize(
    ("way", "unmount"),
    crossed(
        ["sync thread", "async process", "background thread", "async thread", "background process"],
        [False, True],
        every=2,
    ),
)
def test_a_save_outlasts_a_restart_of_the_server(fs: FaultFs, way: str, unmount: bool) -> None:
    """Killed while bytes are written: with its mount left dead, and without a mount until it is back."""
    mode, writer = way.split()
    bytecheckpoint.configure(writer=writer)
    path = fs.mount / "s"
    bytecheckpoint.save(path, states(step=1, rows=_ROWS), **MODES[mode]).result(60)
    old = bytes_in(fs.back, "rank-")
    fs.rule("write", delay=0.05)
    with killed_when(fs, lambda: bytes_in(fs.back, "rank-") > old * 1.3, unmount=unmount):
        report = bytecheckpoint.save(path, states(step=2, rows=_ROWS), **MODES[mode]).result(120)
    assert report.retries >= 1 and report.retry_seconds >= 0.05, "also those of the helper process"
    assert load_step(path, rows=_ROWS) == 2
    assert command(["verify", str(path)]) == 0
    assert len(files_of(path)) == 6
    assert not [name for name in os.listdir(fs.mount) if name != "s"]


@pytest.mark.parametrize(
    ("op", "mode", "unmount"),
    crossed(["getattr", "create", "fsync", "link", "rename", "fsyncdir"], ["sync", "background"], [False, True]),
)
def test_a_save_outlasts_a_server_that_dies_in_a_call(fs: FaultFs, op: str, mode: str, unmount: bool) -> None:
    path = fs.mount / "s"
    if op != "link":  # a link gives a new name
        bytecheckpoint.save(path, states(step=1))
    fs.rule(op, hang=True, name="" if op in ("link", "rename") else "/s")
    saved = threading.Event()

    def save() -> None:
        try:
            bytecheckpoint.save(path, states(step=2), **MODES[mode]).result(120)
        finally:
            saved.set()

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save)
        time.sleep(1.0)  # it hangs
        assert not saved.is_set()
        back = fs.kill_for(2.0, unmount=unmount)
        fs.clear()
        saving.result()
        back.join()
    assert load_step(path) == 2
    assert command(["verify", str(path)]) == 0
    assert len(files_of(path)) == 6


@pytest.mark.parametrize(("overlap", "unmount"), crossed([False, True], [False, True]))
def test_a_load_outlasts_a_restart_of_the_server(fs: FaultFs, overlap: bool, unmount: bool) -> None:
    path = fs.mount / "s"
    bytecheckpoint.save(path, states(step=1, rows=_ROWS))
    fs.rule("read", delay=0.05, name="rank-")
    began = time.monotonic()
    with killed_when(fs, lambda: time.monotonic() - began > 0.3, unmount=unmount):
        assert load_step(path, rows=_ROWS, overlap_loading=overlap) == 1


def test_calls_while_the_server_is_away(fs: FaultFs) -> None:
    """A load that begins meanwhile waits too: a mount point without its mount is no run without checkpoints."""
    bytecheckpoint.save(fs.mount / "run" / "1", states(step=1))
    for unmount in (False, True):
        back = fs.kill_for(3.0, unmount=unmount)
        assert load_step(fs.mount / "run" / "1") == 1
        back.join()
        back = fs.kill_for(3.0, unmount=unmount)
        assert resolve(fs.mount / "run").folders() == ["1"]
        back.join()


def test_the_error_of_a_server_that_stays_away(fs: FaultFs, caplog: pytest.LogCaptureFixture) -> None:
    path = fs.mount / "s"
    bytecheckpoint.save(path, states(step=1))
    bytecheckpoint.configure(storage_timeout=2.0)
    for unmount, reason in ((False, "not connected"), (True, f"nothing is mounted at {fs.mount}")):
        fs.kill(unmount=unmount)
        begun = time.monotonic()
        with pytest.raises(StorageUnavailableError, match=rf"{path}.*{reason}.*check the .*\(\d+ attempts in \d"):
            bytecheckpoint.save(path, states(step=2))
        with pytest.raises(StorageUnavailableError, match=rf"cannot open {path}/meta.*{reason}.*\(\d+ attempts in \d"):
            load_step(path, prepare_save=False)
        assert time.monotonic() - begun < 40
        fs.start()
        assert load_step(path) == 1
    assert any("trying again for up to 2 s" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("op", "code"),
    crossed(
        ["create", "write", "fsync", "truncate", "rename", "read", "open", "getattr", "readdir"],
        [errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN],
    ),
)
def test_errors_that_pass(fs: FaultFs, op: str, code: int) -> None:
    path = fs.mount / "s"
    bytecheckpoint.save(path, states(step=1))
    fs.rule(op, code, times=3)
    target = states()
    reports = bytecheckpoint.save(path, states(step=2)).result(), bytecheckpoint.load(path, target)
    assert step_of(target) == 2
    # The kernel itself looks up a stale name again.
    assert (code != errno.ESTALE) <= sum(report.retries for report in reports) <= 3
    assert len(files_of(path)) == 6


@pytest.mark.parametrize("stable", [False, True])
def test_bytes_that_the_server_has_lost(fs: FaultFs, stable: bool) -> None:
    """It had taken them and died before the fsync: written again from the caller's memory, or the file fails."""
    storage, data = resolve(fs.mount), content(300_000)
    writer = storage.create(NewFile("model/x", len(data), stable=stable))
    buffer = memoryview(data)
    writer.write_at(100_000, [buffer[100_000:]])
    writer.write_at(0, [buffer[:100_000]])
    fs.kill(unmount=True)
    with open(fs.back / "model" / "x", "r+b") as file:
        file.seek(150_000)
        file.write(bytes(1000))
    fs.start()
    found = attempt(writer.finish, len(data))
    if stable:
        assert found is None and np.array_equal(read_all(storage, "model/x"), data)
    else:
        assert isinstance(found, StorageUnavailableError) and "were lost with the connection" in str(found)
        writer.abort()
        assert files_of(fs.mount) == []


@pytest.mark.parametrize("stable", [False, True])
def test_an_fsync_that_fails_is_not_merely_repeated(fs: FaultFs, stable: bool) -> None:
    """The system has given the bytes up, so they are written again before the fsync that counts."""
    storage, data = resolve(fs.mount), content(300_000)
    journal = fs.record()
    writer = storage.create(NewFile("model/x", len(data), stable=stable))
    writer.write_at(0, [memoryview(data)])
    fs.rule("fsync", errno.EIO, times=1)
    back = threading.Timer(0.05, fs.record)
    back.start()
    writer.finish(len(data))
    back.join()
    assert np.array_equal(read_all(storage, "model/x"), data)
    assert journal.read_text().count('"write"') >= 1 and journal.read_text().count('"fsync"') == 1


def test_a_publication_whose_answer_is_lost(fs: FaultFs) -> None:
    """It is recognised as done; where another publisher came between, that is a conflict."""
    storage = resolve(fs.mount)
    storage.publish("a", b"1")
    version = storage.version("a")
    fs.rule("fsyncdir", errno.ENOTCONN, times=1)
    storage.publish("a", b"2", expected=version)
    assert storage.read("a") == b"2"
    fs.rule("fsyncdir", errno.ENOTCONN, times=1)
    storage.publish("b", b"3", expected="")
    with pytest.raises(StorageConflictError):
        storage.publish("b", b"4", expected="")
    assert files_of(fs.mount) == ["a", "b"]
