"""Facts of the training process that the writer process follows: umask, folder, limits, groups."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.engine.helper import HelperProcess
from bytecheckpoint.world import world_of
from tests.support.coded import load_step, states
from tests.support.modes import MODES
from tests.support.programs import forked
from tests.support.settings import undisturbed


@pytest.fixture(autouse=True)
def by_process(tmp_path: Path) -> Iterator[None]:
    """Let the helper process write, also in the first save of the test."""
    with undisturbed():
        bytecheckpoint.configure(writer="process")
        for _ in range(2):
            bytecheckpoint.save(tmp_path / "warm", states(step=1), async_checkpoint=True).result(30)
        yield


def running() -> HelperProcess:
    found = world_of(current()).resources.running_helper
    assert found is not None and found.alive
    return found


@pytest.fixture
def mask() -> Iterator[None]:
    """Restore the umask."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("umask", [0o077, 0o027, 0o000])
def test_new_files_obey_the_umask(tmp_path: Path, mask: None, mode: str, umask: int) -> None:
    os.umask(umask)
    path = tmp_path / "new" / "s"
    bytecheckpoint.save(path, states(step=1), **MODES[mode]).result(30)
    found = {p: stat.S_IMODE(p.stat().st_mode) for p in (path, *path.rglob("*"))}
    assert len(found) > 6
    assert found == {p: (0o777 if p.is_dir() else 0o666) & ~umask for p in found}


@pytest.mark.parametrize("mode", MODES)
def test_a_relative_path_after_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    handle = bytecheckpoint.save("s", states(step=3), **MODES[mode])
    os.chdir(tmp_path)
    handle.result(30)
    assert load_step(tmp_path / "a" / "s") == 3
    bytecheckpoint.save("s", states(step=4), **MODES[mode]).result(30)
    assert load_step(tmp_path / "s") == 4
    assert mode == "sync" or os.readlink(f"/proc/{running().pid}/cwd") == str(tmp_path)


def test_a_new_limit_takes_a_new_helper(tmp_path: Path) -> None:
    before, old = running().pid, resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, old[1]))
        bytecheckpoint.save(tmp_path / "s", states(step=1), async_checkpoint=True).result(30)
        assert running().pid != before
        assert resource.prlimit(running().pid, resource.RLIMIT_FSIZE)[0] == 1 << 40
        before = running().pid
        bytecheckpoint.save(tmp_path / "s", states(step=2), async_checkpoint=True).result(30)
        assert running().pid == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


PROGRAM = """
import os, sys, bytecheckpoint
from tests.support.coded import states
bytecheckpoint.configure(writer="process")
for path in (sys.argv[1] + "/a", sys.argv[1] + "/b"):
    bytecheckpoint.save(path, states(step=1), async_checkpoint=True).result(60)
os.setgroups([12345]); os.setgid(12345)
bytecheckpoint.save(sys.argv[1] + "/c", states(step=1), async_checkpoint=True).result(60)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its groups")
def test_new_groups_take_a_new_helper(tmp_path: Path) -> None:
    subprocess.run(forked("-c", PROGRAM, tmp_path), check=True, timeout=100)
    files = [p for p in (tmp_path / "c").rglob("*") if p.is_file()]
    assert {p.stat().st_gid for p in files} == {12345}
