"""A FUSE file system that fails by rules, and a slow disk, which is a throttled loop device; both take root."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import (
    CheckpointTimeoutError,
    CorruptCheckpointError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.handles import SaveReport
from bytecheckpoint.tiers.cooldown import cool, plan_cooldown
from tests.servers.faultfs import FaultFs, fault_fs
from tests.support.coded import files_of, load_step, save_steps, states
from tests.support.modes import MODES
from tests.support.mounts import run_command, small_ext4
from tests.support.processes import ROOT, python
from tests.support.ranks import check_recovery, load_all, save_all, succeeded
from tests.support.variants import crossed, quick

pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]

CLASSES = {
    errno.ENOSPC: StorageFullError,
    errno.EDQUOT: StorageFullError,
    errno.EIO: StorageUnavailableError,
    errno.EACCES: StorageError,
    errno.EROFS: StorageError,
}


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultFs]:
    with fault_fs(tmp_path_factory.mktemp("mounted")) as fs:
        yield fs


@pytest.fixture
def fs(mounted: FaultFs) -> Iterator[FaultFs]:
    bytecheckpoint.configure(storage_timeout=1.0)  # a network file system is retried for so long
    yield mounted
    mounted.clear()


@pytest.fixture
def folder(fs: FaultFs, request: pytest.FixtureRequest) -> Path:
    """The name of a folder for the test alone, below the mount point."""
    return fs.mount / re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def tier(folder: Path, tmp_path: Path) -> str:
    """The URL of a tier whose durable folder is `folder`."""
    folder.mkdir()
    bytecheckpoint.configure(tier_hot=str(tmp_path / "hot"))
    return f"tier+file://{folder}"


@pytest.fixture
def path(folder: Path) -> Path:
    """A checkpoint of step 1, saved by two ranks."""
    path = folder / "s"
    succeeded(save_all(ThreadWorld(2), path, 1))
    return path


def is_whole(path: Path, step: int, files: int) -> None:
    assert load_step(path) == step
    assert command(["verify", str(path)]) == 0
    assert len(files_of(path)) == files


@pytest.mark.parametrize(
    ("fault", "how"),
    crossed(
        [
            ("create", errno.EACCES, {"name": "/model/"}),
            ("create", errno.EROFS, {}),
            ("write", errno.ENOSPC, {"after_bytes": 20_000}),
            ("write", errno.EDQUOT, {}),
            ("write", errno.EIO, {"name": "optimizer/rank-00001"}),
            ("fsync", errno.EIO, {"name": "/model/"}),
            ("fsync", errno.EIO, {"name": ".publishing"}),
            ("rename", errno.EIO, {}),
            ("truncate", errno.EIO, {}),
        ],
        [("sync", "thread"), ("async", "process"), ("background", "thread")],
    ),
)
def test_a_save_meets_an_error(
    fs: FaultFs, path: Path, fault: tuple[str, int, dict[str, Any]], how: tuple[str, str]
) -> None:
    """The save fails on both ranks with the right class and the path; the old step stays whole; later saves work."""
    (op, code, options), (mode, writer) = fault, how
    bytecheckpoint.configure(writer=writer)
    before = len(files_of(path))
    world = ThreadWorld(2)
    fs.rule(op, code, **options)
    got = save_all(world, path, 2, **MODES[mode])
    fs.clear()
    for raised in got:
        assert type(raised) is CLASSES[code], raised
        assert os.strerror(code) in str(raised) and "/s" in str(raised) and "rank " in str(raised)
    is_whole(path, 1, before)
    check_recovery(world, path, mode)
    is_whole(path, 4, before)


@pytest.mark.parametrize("op", ["fsyncdir", "unlink", "rmdir"])
def test_an_error_after_the_commit(fs: FaultFs, path: Path, op: str) -> None:
    """Old files that cannot be removed fail no save. A name that may not be durable fails the save, and loses nothing."""
    fs.rule(op, errno.EIO, name="/s" if op == "fsyncdir" else "")
    got = save_all(ThreadWorld(2), path, 2)
    fs.clear()
    assert load_step(path) in ((1, 2) if op == "fsyncdir" else (2,))
    assert all(isinstance(g, SaveReport) for g in got) or op == "fsyncdir"
    succeeded(save_all(ThreadWorld(2), path, 3))
    is_whole(path, 3, len(files_of(path)))


@pytest.mark.parametrize(
    ("op", "code", "error", "words"),
    [
        ("read", errno.EIO, StorageUnavailableError, r"cannot read .*/s/.*Input/output error"),
        ("open", errno.EACCES, StorageError, r"cannot (open|read) .*/s/.*Permission denied"),
        ("read", 0, CorruptCheckpointError, r"checksum mismatch in (model|optimizer|extra)"),
    ],
)
def test_a_load_meets_an_error(fs: FaultFs, path: Path, op: str, code: int, error: type[Exception], words: str) -> None:
    fs.rule(op, code, name="rank-", **({} if code else {"flip": True}))
    with pytest.raises(error, match=words):
        load_step(path)
    fs.clear()
    assert load_step(path) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_slow_file_system_is_waited_for(fs: FaultFs, path: Path, mode: str) -> None:
    fs.rule("*", delay=0.005)
    got = save_all(ThreadWorld(2), path, 2, **MODES[mode])
    succeeded(got)
    assert load_step(path) == 2


_TIMEOUT = 1.5


@pytest.mark.parametrize(
    ("op", "place", "mode"),
    [
        ("getattr", "", "sync"),
        ("create", "rank-00001", "async"),
        ("write", "rank-00001", "sync"),
        ("write", "rank-00001", "async"),
        ("write", "rank-00001", "background"),
        ("fsync", "/model/", "async"),
        ("fsyncdir", "", "background"),
        ("readdir", "", "async"),
        ("write", ".publishing", "sync"),
        ("rename", "", "async"),
        ("rename", "", "background"),
    ],
)
def test_a_save_gets_no_answer(fs: FaultFs, path: Path, op: str, place: str, mode: str) -> None:
    """The save fails on both ranks; the old step stays whole, and the next save works once answers come again."""
    bytecheckpoint.configure(writer="process" if mode == "async" else "thread")
    before = len(files_of(path))
    world = ThreadWorld(2)
    begun = time.monotonic()
    fs.rule(op, hang=True, name=place)
    got = save_all(world, path, 2, timeout=_TIMEOUT, **MODES[mode])
    assert time.monotonic() - begun < 25
    fs.clear()
    for raised in got:
        # A rank may stop waiting for a rank that waits for the file system.
        words = rf"cannot .* {path}.*no answer within {_TIMEOUT} s|no message .* within"
        assert isinstance(raised, StorageUnavailableError | CheckpointTimeoutError), raised
        assert re.search(words, str(raised)), raised
    await_publishers(path)
    assert load_step(path) in (1, 2)
    check_recovery(world, path, mode)
    is_whole(path, 4, before)


def await_publishers(path: Path) -> None:
    """Wait until publishers that have an answer again are done, and have released the lock of the folder."""
    folder = os.open(path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    os.close(folder)


def test_a_removal_of_old_files_that_gets_no_answer_fails_no_save(fs: FaultFs, path: Path) -> None:
    before = len(files_of(path))
    fs.rule("unlink", hang=True, name="rank-")
    succeeded(save_all(ThreadWorld(2), path, 2, timeout=_TIMEOUT))
    assert load_step(path) == 2
    fs.clear()
    succeeded(save_all(ThreadWorld(2), path, 3))
    is_whole(path, 3, before)


@pytest.mark.parametrize(
    ("where", "overlap"),
    crossed(
        [("getattr", ""), ("open", "metadata"), ("read", "metadata"), ("open", "rank-"), ("read", "rank-")],
        [False, True],
    ),
)
def test_a_load_gets_no_answer(fs: FaultFs, path: Path, where: tuple[str, str], overlap: bool) -> None:
    """The load fails, and so does the next one, while a late answer could still fill memory that is in use."""
    op, place = where
    options = {"timeout": _TIMEOUT, "overlap_loading": overlap, "prepare_save": False}
    fs.rule(op, hang=True, name=place)
    for _ in range(2):
        begun = time.monotonic()
        for raised in load_all(ThreadWorld(2), path, **options):
            assert isinstance(raised, StorageUnavailableError | CheckpointTimeoutError), raised
            assert re.search("no answer|restart the process|did not|within", str(raised)), raised
        assert time.monotonic() - begun < 20
    fs.clear()
    options["timeout"] = 30.0  # a busy machine may stand still for longer than the short one
    assert load_all(ThreadWorld(2), path, **options) == [1, 1]
    assert load_step(path) == 1


@pytest.mark.parametrize(("op", "place"), [("open", "metadata"), ("read", "rank-")])
def test_an_open_checkpoint_gets_no_answer(fs: FaultFs, path: Path, op: str, place: str) -> None:
    bytecheckpoint.configure(timeout=_TIMEOUT)
    fs.rule(op, hang=True, name=place)
    begun = time.monotonic()
    with pytest.raises(StorageUnavailableError, match=rf"cannot read {path}.*no answer within {_TIMEOUT} s"):
        bytecheckpoint.open(path)["model/w"][...]
    assert time.monotonic() - begun < 20
    fs.clear()
    with bytecheckpoint.open(path) as checkpoint:
        assert checkpoint["model/w"][...].shape == (24, 40)


@pytest.mark.parametrize(
    ("words", "op", "place"),
    [
        ("verify {path}", "read", "rank-"),
        ("verify {path}", "open", "rank-"),
        ("verify {path}", "readdir", ""),
        ("repair {path}", "read", "rank-"),
        ("export {path} {new}", "read", "rank-"),
        ("export {path} {new}", "write", "exporting"),
        ("export {path} {new}", "fsync", "exporting"),
        ("export {path} {new}", "rename", ""),
        ("export {path} {new}", "readdir", "/new"),
    ],
)
def test_a_command_gets_no_answer(
    fs: FaultFs, path: Path, words: str, op: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command reports that, and succeeds once answers come again."""
    bytecheckpoint.configure(timeout=_TIMEOUT)
    new = path.parent / "new"
    if op == "readdir" and place:
        new.mkdir()
    if words.startswith("repair"):
        (path / "metadata.parquet").unlink()
    line = words.format(path=path, new=new).split()
    fs.rule(op, hang=True, name=place)
    begun = time.monotonic()
    code = command(line)
    assert time.monotonic() - begun < 25
    output = "".join(capsys.readouterr())
    assert re.search(r"(cannot|folder).*no answer", output.replace("\n", " ")), output
    fs.clear()
    assert code != 0 or op == "readdir"  # a folder that cannot be listed is only a note
    again = [*line, "--force"] if op == "rename" else line  # the rename may have taken effect
    assert command(again) == 0, capsys.readouterr()
    assert load_step(path) == 1
    assert not [name for name in os.listdir(path.parent) if "exporting" in name]


@pytest.mark.parametrize("most", [1000, 4097])
def test_short_writes_of_the_file_system(fs: FaultFs, path: Path, most: int) -> None:
    fs.rule("write", short=most)
    for step, mode in ((2, "sync"), (3, "async")):
        succeeded(save_all(ThreadWorld(2), path, step, **MODES[mode]))
        assert load_step(path) == step


# --- tiers and cooldown on it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["create", "write", "fsync", "rename", "link"])
def test_a_flush_meets_an_error(fs: FaultFs, folder: Path, tier: str, op: str) -> None:
    fs.rule(op, errno.EIO)
    handle = bytecheckpoint.save(f"{tier}/1", states(step=1), async_checkpoint=True)
    handle.restorable.result(60)
    if op == "rename":  # a new name is given by a link
        handle.committed.exception(60)
    else:
        with pytest.raises(StorageUnavailableError, match=r"flush of tier\+file.*Input/output error"):
            handle.result(60)
    assert load_step(f"{tier}/1") == 1
    fs.clear()
    assert command(["flush", tier]) == 0
    is_whole(folder / "1", 1, 6)


@pytest.mark.parametrize("op", quick(["create", "write", "fsync", "rename", "link", "readdir"], every=2))
def test_a_flush_gets_no_answer(fs: FaultFs, folder: Path, tier: str, op: str) -> None:
    """The flush fails in time. It may continue beside the next flush, and nothing is lost by that."""
    bytecheckpoint.configure(timeout=_TIMEOUT)
    place = {"link": ".publishing", "rename": ".publishing", "readdir": ""}.get(op, "rank-")
    begun = time.monotonic()
    handle = bytecheckpoint.save(f"{tier}/1", states(step=1), async_checkpoint=True)
    fs.rule("*" if op in ("link", "rename") else op, hang=True, name=place)
    handle.restorable.result(60)
    with pytest.raises(StorageUnavailableError, match="no answer"):
        handle.result(60)
    assert time.monotonic() - begun < 25
    assert load_step(f"{tier}/1") == 1
    fs.clear()
    if command(["flush", tier]) != 0:  # the flush that was given up has just published, or removed its files
        assert command(["flush", tier]) == 0
    is_whole(folder / "1", 1, 6)


@pytest.mark.parametrize(
    ("op", "options"),
    [("write", {"after_bytes": 9000}), ("fsync", {}), ("link", {}), ("read", {"flip": True, "name": "rank-"})],
)
def test_a_cooldown_meets_an_error(fs: FaultFs, folder: Path, tmp_path: Path, op: str, options: dict[str, Any]) -> None:
    """An error of the cold storage: the step stays where it is, and can be moved when the storage works again."""
    save_steps(tmp_path / "run", 1, 2)
    before = files_of(tmp_path / "run")
    (plan, _) = plan_cooldown(str(tmp_path / "run"), str(folder), older_than=0)
    code = errno.ENOSPC if op == "write" else errno.EIO
    if op == "link":
        fs.rule("*", code, name=".publishing")
    else:
        fs.rule(op, 0 if "flip" in options else code, **options)
    done = cool(plan)
    fs.clear()
    assert done.error and not done.done
    assert files_of(tmp_path / "run") == before
    assert load_step(tmp_path / "run" / "1") == 1
    assert cool(plan).done
    assert load_step(tmp_path / "run" / "1") == 1
    assert files_of(tmp_path / "run" / "1") == ["metadata.parquet"]


# --- a slow disk ----------------------------------------------------------------------------------------------------

_SAVE = """
import json, os, sys
import bytecheckpoint
from tests.support.coded import states, load_step
path, tasks = sys.argv[1:]
state = states(step=1, rows=20_000)
bytecheckpoint.prepare(state).result()
with open(tasks, "w") as file:
    file.write(str(os.getpid()))
bytecheckpoint.configure(writer="thread")
report = bytecheckpoint.save(path, state, async_checkpoint=True).result(120)
print(json.dumps({"blocking": report.blocking_seconds, "total": report.total_seconds, "bytes": report.bytes_written}))
"""


@pytest.fixture
def slow_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """An ext4 that a control group may write at 10 MiB/s: its mount point, and the list of the group's processes."""
    point = tmp_path / "disk"
    with contextlib.ExitStack() as made:
        try:
            hierarchy = run_command("findmnt", "-nt", "cgroup", "-O", "blkio", "-o", "TARGET").split()[0]
            image = made.enter_context(small_ext4(point, 200 << 20))
            device = run_command("losetup", "-j", str(image)).partition(":")[0]
            number = run_command("lsblk", "-no", "MAJ:MIN", device).strip()
            group = Path(hierarchy) / f"bytecheckpoint-{os.getpid()}"
            group.mkdir()
            made.callback(group.rmdir)
            (group / "blkio.throttle.write_bps_device").write_text(f"{number} {10 << 20}")
        except (OSError, IndexError) as error:
            pytest.skip(f"NOT TESTED HERE: needs root, loop devices and a blkio control group (version 1): {error}")
        yield point, group / "cgroup.procs"


def test_blocking_time_does_not_grow_on_a_slow_disk(slow_disk: tuple[Path, Path]) -> None:
    point, tasks = slow_disk
    command = python("-c", _SAVE, point / "s", tasks)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout)
    assert facts["bytes"] > 15 << 20
    assert facts["total"] > 1.2, f"the disk is not slow: {facts}"
    assert facts["blocking"] < facts["total"] / 3, facts
    assert load_step(point / "s", rows=20_000) == 1
