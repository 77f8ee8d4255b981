"""Local folders and `mem://`: odd paths, links, files of several users, what crashed saves leave."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bytecheckpoint
import bytecheckpoint.storage.posix.memory  # `act` may be unable to: other users cannot read a clone of mode 0700
from bytecheckpoint import CheckpointNotFoundError, StorageError, StorageFullError
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.collectives.testing import ThreadWorld
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.testing import content, read_all, write_file
from tests.storage.checks import check_save
from tests.support.coded import files_of, load_step, states
from tests.support.memory import folder_in_memory
from tests.support.modes import MODES
from tests.support.mounts import small_tmpfs
from tests.support.processes import run_program
from tests.support.ranks import attempt, save_all
from tests.support.settings import using
from tests.support.worlds import World

ROOT = os.geteuid() == 0


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
    with pytest.raises(CheckpointNotFoundError):
        load_step(tmp_path / "dangling")


@pytest.mark.parametrize("place", ["step", "step/inside", "step/inside/further"])
def test_a_path_that_leads_through_a_file(tmp_path: Path, place: str) -> None:
    (tmp_path / "step").write_text("precious")
    for options in MODES.values():
        got = attempt(
            lambda options=options: bytecheckpoint.save(tmp_path / place, states(step=1), **options).result(60)
        )
        assert type(got) is StorageError and str(tmp_path / place) in str(got) and "Not a directory" in str(got)
    with pytest.raises(CheckpointNotFoundError):
        load_step(tmp_path / place)
    assert command(["ls", str(tmp_path / place)]) == 2
    assert (tmp_path / "step").read_text() == "precious"


def test_a_file_where_a_state_is_to_go(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "model").write_text("precious")
    for raised in save_all(ThreadWorld(2), tmp_path / "s", 1):
        assert type(raised) is StorageError and "/s/model" in str(raised)
    assert files_of(tmp_path / "s") == ["model"]


def test_long_names(tmp_path: Path) -> None:
    longest = "n" * 255
    check_save(tmp_path / longest, 1)
    check_save(tmp_path.joinpath(*["d" * 200] * 15), 2)
    for path in (tmp_path / ("n" * 256), tmp_path.joinpath(*["d" * 200] * 25)):
        for call in (lambda path=path: bytecheckpoint.save(path, states(step=1)), lambda path=path: load_step(path)):
            with pytest.raises(StorageError, match="File name too long"):
                call()
    shutil.rmtree(tmp_path / ("d" * 200))


# --- files that other things share ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [["-al"], ["-a", "--reflink=auto"], ["-as"]])
def test_copies_that_share_their_bytes_stay_as_they_are(tmp_path: Path, flags: list[str]) -> None:
    """Nothing is rewritten in place, so a copy by hard links is a backup."""
    path, copy = tmp_path / "s", tmp_path / "copy"
    bytecheckpoint.save(path, states(step=1))
    subprocess.run(["cp", *flags, str(path), str(copy)], check=True)
    with using(trusted_folders=str(path) if "-as" in flags else ""):  # symbolic links lead out of the copy
        assert load_step(copy) == 1 and command(["verify", str(copy)]) == 0
    check_save(path, 2, 3)
    if "-as" not in flags:  # symbolic links share names, which is another thing
        assert load_step(copy) == 1 and command(["verify", str(copy)]) == 0
    check_save(copy, 4)
    assert load_step(path) == 3


def act(user: int, mask: int, root: str, what: str, name: str, memory: str) -> str:
    """Act as another user, in a process of its own; return the result or error as a text."""
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
            (said,) = world.run(act, user, mask, str(root), what, name, bytecheckpoint.settings().storage.memory_dir)
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


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("writer", ["process", "thread"])
def test_saves_in_memory(memory: str, asynchronous: bool, writer: str, capsys: pytest.CaptureFixture[str]) -> None:
    bytecheckpoint.configure(writer=writer)
    for step in (1, 2):
        report = bytecheckpoint.save(f"{memory}/step", states(step=step), async_checkpoint=asynchronous).result(60)
        assert report.path == f"{memory}/step"
        assert load_step(f"{memory}/step") == step
    assert command(["verify", f"{memory}/step"]) == 0
    assert command(["ls", memory]) == 0
    assert "committed" in capsys.readouterr().out
    assert stat.S_IMODE(folder_in_memory().stat().st_mode) == 0o700
    assert (folder_in_memory(memory) / "step" / "metadata.parquet").exists()


def test_memory_outlives_the_process(memory: str) -> None:
    program = """
import os, sys, bytecheckpoint
from tests.support.coded import states
bytecheckpoint.save(sys.argv[1], states(step=5))
os._exit(9)
"""
    assert run_program(program, f"{memory}/step").returncode == 9
    assert load_step(f"{memory}/step") == 5


@pytest.mark.parametrize("wrong", ["open", "link"])
def test_a_folder_in_memory_that_others_can_reach_is_refused(tmp_path: Path, wrong: str) -> None:
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
    check_save("mem://x/step", 4, async_checkpoint=True)
    assert (tmp_path / f"bytecheckpoint-{os.geteuid()}" / "x" / "step" / "metadata.parquet").exists()


def test_no_room_in_memory(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, "1m"):
        bytecheckpoint.configure(memory_dir=str(tmp_path))
        with pytest.raises(StorageFullError, match=r"mem://x/step/.*No space left"):
            bytecheckpoint.save("mem://x/step", states(step=4, rows=10_000))
        assert resolve("mem://x/step").list() == []


_CRASH = """
import os, sys, bytecheckpoint
from tests.support.coded import states
from tests.support.faulty_storage import Faults
faults = Faults()
faults.add("finish", name="optimizer", before=lambda: os._exit(9))
bytecheckpoint.save(faults.at(sys.argv[1]), states(step=2))
"""


@pytest.mark.parametrize("first", [False, True])
def test_what_a_crashed_saver_left_in_memory_goes_with_the_next_save(memory: str, first: bool) -> None:
    path = f"{memory}/s"
    if not first:
        bytecheckpoint.save(path, states(step=1))
    assert run_program(_CRASH, path).returncode == 9
    left = len(resolve(path).list())
    assert left > (0 if first else 6)
    found = attempt(load_step, path)
    assert isinstance(found, CheckpointNotFoundError) if first else found == 1
    check_save(path, 3)
    assert len(resolve(path).list()) == 6


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
