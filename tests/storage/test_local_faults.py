"""Local paths that are odd, file systems that answer oddly, files of several users: calls that fail, real small mounts."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bytecheckpoint
from bytecheckpoint import StorageError, StorageFullError, StorageUnavailableError
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.collectives.threads import ThreadWorld
from bytecheckpoint.handles import SaveReport
from bytecheckpoint.storage import NewFile, local, posix_files, resolve
from bytecheckpoint.storage.testing import content, read_all, write_file
from tests.faults.coded import files_of, load_step, states
from tests.faults.ranks import attempt, save_all
from tests.support.mounts import small_tmpfs
from tests.support.worlds import World

ROOT = os.geteuid() == 0
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_checkpoint": True},
    "background": {"async_checkpoint": True, "staging": "background"},
}


def succeeded(got: list[Any]) -> None:
    assert all(isinstance(report, SaveReport) for report in got), got


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writer", ["process", "thread"])
def test_a_relative_path_means_the_directory_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, writer: str
) -> None:
    bytecheckpoint.configure(writer=writer)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    handle = bytecheckpoint.save("run/step", states(step=1), **MODES[mode])
    os.chdir(tmp_path / "elsewhere")
    handle.result(60)
    assert os.listdir() == []
    assert load_step(tmp_path / "run" / "step") == 1
    os.chdir(tmp_path)
    assert load_step("run/step") == 1 and load_step("./run/../run//step/") == 1


def test_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    for step in (1, 2):
        bytecheckpoint.save(tmp_path / "run" / "s", states(step=step))
        assert load_step(tmp_path / "disk" / "s") == step
        assert len(files_of(tmp_path / "disk" / "s")) == 6
    (tmp_path / "disk" / "latest").symlink_to("s")
    assert load_step(tmp_path / "run" / "latest") == 2
    bytecheckpoint.save(tmp_path / "run" / "latest", states(step=3))
    assert load_step(tmp_path / "disk" / "s") == 3 and (tmp_path / "disk" / "latest").is_symlink()
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    with pytest.raises(StorageError, match=rf"{tmp_path}/dangling"):
        bytecheckpoint.save(tmp_path / "dangling", states(step=1))
    with pytest.raises(bytecheckpoint.CheckpointNotFoundError):
        load_step(tmp_path / "dangling")


@pytest.mark.parametrize("place", ["step", "step/inside", "step/inside/further"])
def test_a_path_that_leads_through_a_file(tmp_path: Path, place: str) -> None:
    (tmp_path / "step").write_text("precious")
    for options in MODES.values():
        got = attempt(
            lambda options=options: bytecheckpoint.save(tmp_path / place, states(step=1), **options).result(60)
        )
        assert type(got) is StorageError and str(tmp_path / place) in str(got) and "Not a directory" in str(got)
        attempt(bytecheckpoint.save, tmp_path / "other", states(step=1))  # raises the earlier one
    with pytest.raises(bytecheckpoint.CheckpointNotFoundError):
        load_step(tmp_path / place)
    assert command(["ls", str(tmp_path / place)]) == 2
    assert (tmp_path / "step").read_text() == "precious"


def test_a_file_where_a_kind_is_to_go(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "model").write_text("precious")
    for raised in save_all(ThreadWorld(2), tmp_path / "s", 1):
        assert type(raised) is StorageError and "/s/model" in str(raised)
    assert files_of(tmp_path / "s") == ["model"]


def test_long_names(tmp_path: Path) -> None:
    longest = "n" * 255
    bytecheckpoint.save(tmp_path / longest, states(step=1))
    assert load_step(tmp_path / longest) == 1
    deep = tmp_path.joinpath(*["d" * 200] * 15)
    bytecheckpoint.save(deep, states(step=2))
    assert load_step(deep) == 2
    for path in (tmp_path / ("n" * 256), tmp_path.joinpath(*["d" * 200] * 25)):
        for call in (lambda path=path: bytecheckpoint.save(path, states(step=1)), lambda path=path: load_step(path)):
            with pytest.raises(StorageError, match="File name too long"):
                call()
    shutil.rmtree(tmp_path / ("d" * 200))


def test_a_long_name_of_a_state(tmp_path: Path) -> None:
    kind = "k" * 300 + "/../x"
    bytecheckpoint.save(tmp_path / "s", {kind: {"a": 1}})
    loaded: dict[str, Any] = {kind: {}}
    bytecheckpoint.load(tmp_path / "s", loaded)
    assert loaded[kind] == {"a": 1}


# --- files that other things share ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [["-al"], ["-a", "--reflink=auto"], ["-as"]])
def test_copies_that_share_their_bytes_stay_as_they_are(tmp_path: Path, flags: list[str]) -> None:
    """Nothing is rewritten in place, so a copy by hard links is a backup."""
    path, copy = tmp_path / "s", tmp_path / "copy"
    bytecheckpoint.save(path, states(step=1))
    subprocess.run(["cp", *flags, str(path), str(copy)], check=True)
    assert load_step(copy) == 1 and command(["verify", str(copy)]) == 0
    for step in (2, 3):
        bytecheckpoint.save(path, states(step=step))
        assert load_step(path) == step
    if "-as" not in flags:  # symbolic links share names, which is another thing
        assert load_step(copy) == 1 and command(["verify", str(copy)]) == 0
    bytecheckpoint.save(copy, states(step=4))
    assert load_step(copy) == 4 and load_step(path) == 3


def act(user: int, mask: int, root: str, what: str, name: str, memory: str) -> str:
    """What another user meets, in a process of its own."""
    bytecheckpoint.configure(memory_dir=memory)
    os.setgroups([])
    os.setgid(2000)
    os.setuid(user)
    os.umask(mask)
    storage = resolve(root)

    def work() -> Any:
        if what == "read":
            return storage.read(name)
        if what == "delete":
            return storage.delete([name])
        if what == "replace":
            storage.publish("metadata.parquet", name.encode(), expected=storage.version("metadata.parquet"))
        write_file(storage, f"model/{name}", content(5000))
        return storage.list() if what == "list" else None

    return repr(attempt(work))


def open_up(path: Path) -> None:
    """Let other users reach a folder of the test's."""
    for folder in [path, *path.parents]:
        if os.stat(folder).st_uid == os.geteuid() and len(folder.parts) > 2:
            folder.chmod(0o777)


@pytest.fixture
def as_user(tmp_path: Path) -> Callable[..., str]:
    """Calls `act`."""
    if not ROOT:
        pytest.skip("NOT TESTED HERE: other users take root")

    def call(user: int, what: str, root: Path | str, name: str = "", *, mask: int = 0o022) -> str:
        world = World(1, tmp_path / f"world-{uuid.uuid4().hex}")
        try:
            (said,) = world.run(act, user, mask, str(root), what, name, bytecheckpoint.settings().memory_dir)
        finally:
            world.kill()
        return str(said)

    return call


def test_files_of_several_users(tmp_path: Path, as_user: Callable[..., str]) -> None:
    """A team's folder (group-writable): one replaces what the other saved; without permission the error names it."""
    step = tmp_path / "run" / "s"
    step.parent.mkdir()
    open_up(step.parent)
    for name, user in (("a", 2001), ("b", 2002), ("c", 2001)):
        assert as_user(user, "replace", step, name, mask=0o002) == "None"
        assert resolve(step).read("metadata.parquet") == name.encode()
    found = {file: os.stat(step / file) for file in files_of(step)}
    assert {file: (facts.st_uid, stat.S_IMODE(facts.st_mode)) for file, facts in found.items()} == {
        "metadata.parquet": (2001, 0o664), "model/a": (2001, 0o664), "model/b": (2002, 0o664), "model/c": (2001, 0o664),
    }  # fmt: skip
    assert as_user(2002, "delete", step, "model/a") == "None"
    os.chmod(step / "model", 0o755)
    os.chmod(step, 0o755)
    said = as_user(2002, "replace", step, "d")
    assert said.startswith("StorageError") and "Permission denied" in said and f"{step}/metadata.parquet" in said
    assert as_user(2002, "read", step, "metadata.parquet") == "b'c'", "reading is allowed"
    os.chmod(step / "metadata.parquet", 0o600)
    said = as_user(2002, "read", step, "metadata.parquet")
    assert said.startswith("StorageError") and "Permission denied" in said
    assert files_of(step) == ["metadata.parquet", "model/b", "model/c"], "nothing is left of what was refused"


def test_a_folder_that_can_be_written_and_not_listed(tmp_path: Path, as_user: Callable[..., str]) -> None:
    """Its parent cannot be opened to be synced, which fails nothing."""
    parent = tmp_path / "drop"
    parent.mkdir()
    open_up(parent)
    parent.chmod(0o733)
    assert as_user(2001, "write", parent / "s", "x") == "None"
    assert np.array_equal(read_all(resolve(parent / "s"), "model/x"), content(5000))


# --- file systems that answer oddly -----------------------------------------------------------------------------------


Fail = Callable[..., list[int]]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Lets a function of os fail with an errno, for calls that fit; the list counts them."""

    def make(name: str, code: int, fits: Callable[..., bool] = lambda *_: True, after: bool = False) -> list[int]:
        real, hits = getattr(os, name), [0]

        def call(*args: Any, **options: Any) -> Any:
            if not fits(*args):
                return real(*args, **options)
            hits[0] += 1
            if after:
                real(*args, **options)
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, name, call)
        return hits

    return make


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
    storage = resolve(tmp_path)
    write_file(storage, "model/x", content(size))
    assert np.array_equal(read_all(storage, "model/x"), content(size))
    if most > 1:
        bytecheckpoint.save(tmp_path / "s", states(step=1, rows=300))
        assert load_step(tmp_path / "s", rows=300) == 1


def test_a_write_that_takes_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """... and not an endless loop."""
    bytecheckpoint.configure(writer="thread")
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(StorageUnavailableError, match=rf"cannot write {tmp_path}/s/\w+/.*took no byte"):
        bytecheckpoint.save(tmp_path / "s", states(step=1))
    assert files_of(tmp_path) == []


def test_signals_interrupt_nothing(tmp_path: Path) -> None:
    """System calls that a signal interrupts go on."""
    import signal

    bytecheckpoint.configure(writer="thread")
    seen = [0]
    before = signal.signal(signal.SIGALRM, lambda *_: seen.__setitem__(0, seen[0] + 1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for step in range(1, 6):
            bytecheckpoint.save(tmp_path / "s", states(step=step, rows=3000))
            assert load_step(tmp_path / "s", rows=3000) == step
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen[0] > 3


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_close_is_an_error_of_the_save(tmp_path: Path, fail: Fail, code: int, mode: str) -> None:
    """NFS tells of a full quota when a file is closed, at the latest."""
    bytecheckpoint.configure(writer="thread", direct_io="off")
    bytecheckpoint.save(tmp_path / "s", states(step=1))
    before = files_of(tmp_path / "s")

    def ours(fd: int) -> bool:
        try:
            return "/s/model/rank" in os.readlink(f"/proc/self/fd/{fd}") and on[0]
        except OSError:
            return False

    on = [True]
    hits = fail("close", code, ours, after=True)
    got = attempt(lambda: bytecheckpoint.save(tmp_path / "s", states(step=2), **MODES[mode]).result(60))
    on[0] = False
    assert hits[0] > 0
    assert type(got) is (StorageUnavailableError if code == errno.EIO else StorageFullError), got
    assert os.strerror(code) in str(got) and "/s/model/rank" in str(got)
    assert load_step(tmp_path / "s") == 1
    assert files_of(tmp_path / "s") == before, "an unfinished file is removed although its close failed"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP])
def test_file_systems_that_cannot_sync_folders(tmp_path: Path, fail: Fail, code: int) -> None:
    hits = fail("fsync", code, lambda fd: os.path.isdir(f"/proc/self/fd/{fd}"))
    bytecheckpoint.save(tmp_path / "new" / "s", states(step=1))
    assert hits[0] > 3
    assert load_step(tmp_path / "new" / "s") == 1


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("created", [False, True])
def test_direct_io_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, created: bool) -> None:
    """At the open, or only where blocks are to be reserved."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            if created:
                os.close(real(path, flags & ~os.O_DIRECT, *args, **options))
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "major", lambda _: 8)
    writer = resolve(tmp_path).create(NewFile("model/x", 5001, direct=True))
    assert not writer.direct
    writer.write_at(0, [memoryview(content(5001))])
    writer.finish(5001)
    assert np.array_equal(read_all(resolve(tmp_path), "model/x"), content(5001))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_blocks_that_cannot_be_reserved(tmp_path: Path, fail: Fail, code: int, direct: bool) -> None:
    """A full disk is told of before the first byte is written."""
    if os.major(os.stat(tmp_path).st_dev) == 0:
        pytest.skip("NOT TESTED HERE: this file system is on no disk")
    fail("posix_fallocate", code)
    with pytest.raises(StorageFullError, match=r"cannot create .*/model/x"):
        resolve(tmp_path).create(NewFile("model/x", 1 << 20, direct=direct))
    assert files_of(tmp_path) == []


@pytest.mark.parametrize(("wanted", "direct"), [("auto", False), ("on", True), ("off", False)])
def test_direct_io_where_there_is_no_disk(tmp_path: Path, wanted: str, direct: bool) -> None:
    """Network file systems may take it; a tmpfs does so too."""
    bytecheckpoint.configure(direct_io=wanted)
    opened: list[bool] = []
    real = local._Writer.finish
    with small_tmpfs(tmp_path / "t", "8m"), pytest.MonkeyPatch.context() as patch:
        probe = resolve(tmp_path / "t").create(NewFile("model/x", 5001, direct=True))
        if wanted == "on" and not probe.direct:
            pytest.skip("NOT TESTED HERE: this kernel's tmpfs takes no direct I/O")
        probe.abort()
        patch.setattr(local._Writer, "finish", lambda self, size: (opened.append(self.direct), real(self, size))[1])
        for mode in MODES.values():
            bytecheckpoint.save(tmp_path / "t" / "s", states(step=1), **mode).result(60)
            assert load_step(tmp_path / "t" / "s", prepare_save=False) == 1
    assert set(opened) == {direct}


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_file_systems_without_links(tmp_path: Path, fail: Fail, code: int) -> None:
    hits = fail("link", code)
    for step in (1, 2):
        bytecheckpoint.save(tmp_path / "s", states(step=step))
        assert load_step(tmp_path / "s") == step
    assert hits[0] == 1 and len(files_of(tmp_path / "s")) == 6


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_link_that_fails_otherwise_fails_the_save(tmp_path: Path, fail: Fail, code: int) -> None:
    fail("link", code)
    got = attempt(bytecheckpoint.save, tmp_path / "s", states(step=1))
    expected = {errno.EIO: StorageUnavailableError, errno.EROFS: StorageError}.get(code, StorageFullError)
    assert type(got) is expected and f"cannot publish {tmp_path}/s/metadata.parquet" in str(got)
    assert files_of(tmp_path) == []


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("bytecheckpoint.storage.posix_publish.fcntl.flock", flock)
    for step in (1, 2, 3):
        bytecheckpoint.save(tmp_path / "s", states(step=step))
        assert load_step(tmp_path / "s") == step
    assert len(files_of(tmp_path / "s")) == 6


def test_a_stale_name_tells_how_often_it_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Fail) -> None:
    monkeypatch.setattr(posix_files, "_STALE_PAUSES", (0.0, 0.01))
    bytecheckpoint.save(tmp_path / "s", states(step=1))
    fail("open", errno.ESTALE, lambda path, *_: "rank-" in str(path))
    with pytest.raises(StorageUnavailableError, match=rf"cannot open {tmp_path}/s/.*Stale file handle \(attempt 3\)"):
        load_step(tmp_path / "s")


def test_files_that_vanish_while_a_folder_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process publishes, or removes what it replaced: the rest of the folder is listed all the same."""
    storage = resolve(tmp_path)
    for name in ("a", "b", "c", "model/a", "model/b", "model/c"):
        write_file(storage, name, content(10))
    real = os.scandir

    class Entry:
        def __init__(self, entry: Any) -> None:
            self._entry, self.name, self.path = entry, entry.name, entry.path

        def is_dir(self, **options: Any) -> bool:
            return bool(self._entry.is_dir(**options))

        def is_file(self) -> bool:
            return True

        def stat(self) -> Any:
            if self.name == "b":
                raise FileNotFoundError(2, "No such file or directory")
            return self._entry.stat()

    monkeypatch.setattr(os, "scandir", lambda path: [Entry(entry) for entry in real(path)])
    assert storage.list() == [("a", 10), ("c", 10), ("model/a", 10), ("model/c", 10)]


def test_listing_beside_publishers(tmp_path: Path) -> None:
    storage, stop = resolve(tmp_path), threading.Event()
    write_file(storage, "model/x", content(10))

    def publish() -> None:
        while not stop.is_set():
            storage.publish("metadata.parquet", b"x" * 100)

    threads = [threading.Thread(target=publish) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert ("model/x", 10) in resolve(tmp_path).list()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# --- on the way -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_directory_is_removed_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, ranks: int
) -> None:
    """Somebody's `rm -r` while a save is under way: the save fails, or nothing of it is missing."""
    bytecheckpoint.configure(writer="thread")
    path = tmp_path / "s"
    world = ThreadWorld(ranks)
    real = local._Writer.finish
    gone = threading.Lock()

    def finish(writer: Any, size: int) -> None:
        with gone:
            real(writer, size)
            if "optimizer" in writer._path and path.exists():
                shutil.rmtree(path, ignore_errors=True)  # another rank makes files there meanwhile

    monkeypatch.setattr(local._Writer, "finish", finish)
    got = save_all(world, path, 1, **MODES[mode])
    assert all(isinstance(raised, StorageError) and str(path) in str(raised) for raised in got), got
    assert files_of(path) == []
    monkeypatch.undo()
    bytecheckpoint.configure(writer="thread")
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
    with pytest.raises(bytecheckpoint.CheckpointNotFoundError, match=str(path)):
        load_step(path)


@pytest.mark.skipif(not ROOT, reason="NOT TESTED HERE: mounting a small file system takes root")
@pytest.mark.parametrize("mode", MODES)
def test_one_rank_has_no_space(tmp_path: Path, mode: str) -> None:
    """Ranks whose files are on different small disks: what one cannot write, all take back."""
    bytecheckpoint.configure(writer="thread")
    path, world = tmp_path / "s", ThreadWorld(3)
    succeeded(save_all(world, path, 1))
    before = files_of(path)
    real = local.PosixStorage.create
    small = tmp_path / "small"

    def create(storage: Any, request: NewFile) -> Any:
        if "rank-00001" in request.name and storage.root == str(path) and small.is_mount():
            place, shown = str(small / uuid.uuid4().hex), f"{path}/{request.name}"
            return local._Writer(place, shown, request.size, direct=False, reserve=False)
        return real(storage, request)

    with small_tmpfs(small, "4k"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local.PosixStorage, "create", create)
            got = save_all(world, path, 2, **MODES[mode])
        assert all(type(raised) is StorageFullError for raised in got), got
        assert all("No space left on device" in str(raised) and "rank-00001" in str(raised) for raised in got)
        assert os.listdir(small) == [], "nothing is left"
    assert files_of(path) == before and load_step(path) == 1
    if mode != "sync":
        assert all("earlier" in str(raised) for raised in save_all(world, path, 3))
    succeeded(save_all(world, path, 4, **MODES[mode]))
    assert load_step(path) == 4


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield f"mem://{name}"
    shutil.rmtree(f"/dev/shm/bytecheckpoint-{os.geteuid()}/{name}", ignore_errors=True)


_CRASH = """
import os, sys
import bytecheckpoint
from bytecheckpoint.storage import local
from tests.faults.coded import states
real = local._Writer.finish
def finish(writer, size):
    if "optimizer" in writer._path:
        os._exit(9)
    real(writer, size)
local._Writer.finish = finish
bytecheckpoint.configure(writer="thread")
bytecheckpoint.save(sys.argv[1], states(step=2))
"""


@pytest.mark.parametrize("first", [False, True])
def test_what_a_crashed_saver_left_in_memory_goes_with_the_next_save(memory: str, first: bool) -> None:
    path = f"{memory}/s"
    if not first:
        bytecheckpoint.save(path, states(step=1))
    done = subprocess.run([sys.executable, "-c", _CRASH, path], cwd=Path(__file__).parents[2], timeout=100, check=False)
    assert done.returncode == 9
    left = len(resolve(path).list())
    assert left > (0 if first else 6)
    if first:
        with pytest.raises(bytecheckpoint.CheckpointNotFoundError):
            load_step(path)
    else:
        assert load_step(path) == 1
    bytecheckpoint.save(path, states(step=3))
    assert load_step(path) == 3
    assert len(resolve(path).list()) == 6


@pytest.mark.parametrize("name", ["with space", "ünï-文", "100%41", "a+b&c=d,e;f", "~", "#x?y", "-rf", "x" * 200])
def test_odd_names_in_memory(memory: str, name: str) -> None:
    path = f"{memory}/{name}/{name}"
    bytecheckpoint.save(path, states(step=1), async_checkpoint=True).result(60)
    assert load_step(path) == 1 and load_step(f"{path}/") == 1
    assert resolve(f"{memory}/{name}").folders() == [name]
    assert command(["verify", path]) == 0


def test_users_have_memory_of_their_own(tmp_path: Path, as_user: Callable[..., str]) -> None:
    """The same name is another place for another user, who can neither see nor take over the first one's."""
    shared = tmp_path / "shm"
    shared.mkdir()
    open_up(shared)
    bytecheckpoint.configure(memory_dir=str(shared))
    write_file(resolve("mem://run/s"), "model/x", content(100))
    said = as_user(2001, "list", "mem://run/s", "y")
    assert said == "[('model/y', 5000)]"
    assert resolve("mem://run/s").list() == [("model/x", 100)]
    said = as_user(2001, "read", shared / "bytecheckpoint-0" / "run" / "s", "model/x")
    assert said.startswith("StorageError") and "Permission denied" in said
    # A folder that another user made under this user's name is not used.
    shutil.rmtree(shared / "bytecheckpoint-0")
    (shared / "bytecheckpoint-0").mkdir(mode=0o700)
    os.chown(shared / "bytecheckpoint-0", 2001, 2000)
    with pytest.raises(StorageError, match=r"mem://run/s.*belongs to somebody else"):
        resolve("mem://run/s")
