"""A network file system: ranks on two mounts of a real GlusterFS, whose caches are strict, as usual, or stale."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import (
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    StorageConflictError,
    StorageUnavailableError,
)
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.storage import Storage, resolve
from bytecheckpoint.storage.testing import StorageTests
from tests.servers.gluster import KINDS, Gluster
from tests.support.coded import files_of, load_step, states, step_of
from tests.support.modes import MODES
from tests.support.processes import environment, python
from tests.support.ranks import attempt
from tests.support.variants import quick
from tests.support.worlds import World

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=KINDS)
def nas(request: pytest.FixtureRequest) -> Iterator[Gluster]:
    folder = Path(tempfile.mkdtemp(prefix="gluster-"))
    gluster = Gluster(folder, request.param)
    yield gluster
    gluster.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def places(nas: Gluster, request: pytest.FixtureRequest) -> list[Path]:
    """A new folder, as each of the two machines calls it."""
    name = f"t{abs(hash(request.node.name)) % 10**9}-{time.monotonic_ns()}"
    (nas.mounts[0] / name).mkdir()
    return [mount / name for mount in nas.mounts]


@pytest.mark.parametrize("nas", ["strict", "stale"], indirect=True, scope="module")
class TestConformance(StorageTests):
    """The conformance suite, with writes through one mount and reads through the other."""

    large_bytes = (3 << 20) + 4097
    many = 110

    @pytest.fixture
    def storage(self, places: list[Path]) -> Storage:
        self.here, self.there = (str(place) for place in places)
        return resolve(f"{self.here}/step")

    def again(self, storage: Storage) -> Storage:
        return _SeenAs(storage.url.replace(self.here, self.there), storage.url)


class _SeenAs(type(resolve("/"))):  # type: ignore[misc]
    """The same folder on the other machine, where it has the same name."""

    def __init__(self, path: str, url: str) -> None:
        super().__init__(path)
        self.url = url


def test_every_save_is_seen_at_once_by_the_other_machine(places: list[Path]) -> None:
    """The machines take turns in replacing it."""
    for step in range(1, 9):
        here, there = places[step % 2], places[(step + 1) % 2]
        bytecheckpoint.save(here / "s", states(step=step))
        assert load_step(there / "s") == load_step(here / "s") == step
        assert command(["verify", str(there / "s")]) == 0
        assert len(files_of(there / "s")) == 6


_OVERWRITE = """
import sys, time
import bytecheckpoint
from tests.support.coded import states

path, steps = sys.argv[1], int(sys.argv[2])
for step in range(2, steps + 1):
    bytecheckpoint.save(path, states(step=step), async_checkpoint=bool(step % 2)).result(60)
    time.sleep(0.01 * (step % 7))
"""


def test_a_reader_sees_the_old_or_the_new_one_while_the_other_machine_overwrites(places: list[Path]) -> None:
    """Every load finds all of one step, and later loads never an earlier one.

    A load begins again when it finds its checkpoint replaced. If that happens three times in a row it gives up by design.
    """
    here, there = places
    steps = 30
    bytecheckpoint.save(here / "s", states(step=1))
    writer = subprocess.Popen(python("-c", _OVERWRITE, here / "s", steps), env=environment())
    seen = []
    while writer.poll() is None:
        got = attempt(load_step, there / "s", prepare_save=False)  # fails by itself where two steps are mixed
        if isinstance(got, int):
            seen.append(got)
        else:
            assert isinstance(got, IncompatibleCheckpointError) and "was replaced 3 times" in str(got), repr(got)
    assert writer.returncode == 0
    assert load_step(there / "s") == load_step(here / "s") == steps
    assert seen == sorted(seen) and len(set(seen)) > 1
    assert len(files_of(here / "s")) == 6


def test_a_machine_that_looked_too_early_finds_the_checkpoint(places: list[Path]) -> None:
    here, there = places
    for step in range(1, 5):
        with pytest.raises(bytecheckpoint.CheckpointNotFoundError):
            load_step(there / str(step))
        bytecheckpoint.save(here / str(step), states(step=step))
        assert load_step(there / str(step)) == step


def test_a_machine_whose_cache_is_old_does_not_overwrite(places: list[Path]) -> None:
    ours, theirs = (resolve(place / "s") for place in places)
    for trial in range(4):
        ours.publish("metadata.parquet", b"first %d" % trial)
        version = theirs.version("metadata.parquet")
        ours.publish("metadata.parquet", b"second %d" % trial)
        with pytest.raises(StorageConflictError):
            theirs.publish("metadata.parquet", b"third %d" % trial, expected=version)
        assert theirs.read("metadata.parquet") == ours.read("metadata.parquet") == b"second %d" % trial


def test_of_publishers_on_both_machines_one_wins(places: list[Path]) -> None:
    storages = [resolve(place / "s") for place in places] * 3
    for trial in range(4):
        versions = {storage.version("metadata.parquet") for storage in storages}
        assert len(versions) == 1
        (version,) = versions
        start = threading.Barrier(len(storages))

        def one(number: int, trial: int = trial, version: str = version, start: Any = start) -> Any:
            start.wait()
            data = b"%d/%d" % (trial, number)
            return attempt(storages[number].publish, "metadata.parquet", data, expected=version) or data

        with ThreadPoolExecutor(len(storages)) as pool:
            got = list(pool.map(one, range(len(storages))))
        winners = [result for result in got if isinstance(result, bytes)]
        assert len(winners) == 1, got
        assert {storage.read("metadata.parquet") for storage in storages} == set(winners)


def test_a_replaced_checkpoint_can_be_read_on(places: list[Path]) -> None:
    here, there = places
    bytecheckpoint.save(here / "s", states(step=1))
    with bytecheckpoint.open(there / "s") as checkpoint:
        first = checkpoint["model/w"][0:1]
        bytecheckpoint.save(here / "s", states(step=2))
        # The file that was read from stays open, which keeps its bytes; others are gone.
        assert (checkpoint["model/w"][0:1] == first).all()
        with pytest.raises(CorruptCheckpointError, match="was replaced by another save"):
            checkpoint["optimizer/momentum"][0:1]
    assert load_step(there / "s") == 2


# --- ranks of one job on both machines --------------------------------------------------------------------------------


def move_to(machine: str, path: str) -> None:
    """Let this thread, and those that it starts, see a machine's mount under a path that all machines share."""
    os.unshare(os.CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True, timeout=30)
    subprocess.run(["mount", "--bind", machine, path], check=True, timeout=30)


def save_and_load(mounts: list[str], path: str, steps: int) -> list[int]:
    """Save over one path and load it again, from ranks on both machines; the steps that were found."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    move_to(mounts[rank % 2], path)
    found = []
    for step in range(1, steps + 1):
        options: dict[str, Any] = [{}, {"async_checkpoint": True}][step % 2]
        bytecheckpoint.save(f"{path}/s", states(rank, world, step), **options).result(60)
        mine = states((rank + 1) % world, world)
        bytecheckpoint.load(f"{path}/s", mine)
        found.append(step_of(mine))
    return found


@pytest.mark.skipif(not hasattr(os, "unshare"), reason="NOT TESTED HERE: mount namespaces need Python 3.12")
def test_a_job_with_ranks_on_both_machines(nas: Gluster, tmp_path: Path) -> None:
    common = tmp_path / "nas"
    common.mkdir()
    world = World(3, tmp_path / "world")
    try:
        ranks = world.run(save_and_load, [str(mount) for mount in nas.mounts], str(common), 6, timeout=200)
    finally:
        world.kill()
    assert ranks == [[1, 2, 3, 4, 5, 6]] * 3
    for mount in nas.mounts:
        assert load_step(mount / "s") == 6
        assert len(files_of(mount / "s")) == len(files_of(nas.mounts[0] / "s"))
    shutil.rmtree(nas.mounts[0] / "s")


# --- the server has trouble ---------------------------------------------------------------------------------------------


@pytest.fixture
def frail(tmp_path: Path) -> Iterator[Gluster]:
    """A server of the test's own, with usual caches."""
    gluster = Gluster(tmp_path / "gluster", "default")
    yield gluster
    gluster.stop()


def test_a_server_that_pauses(frail: Gluster) -> None:
    here, there = frail.mounts
    bytecheckpoint.save(here / "s", states(step=1))
    with frail.paused():
        handle = bytecheckpoint.save(here / "s", states(step=2), async_checkpoint=True)
        time.sleep(2)
        assert not handle.done()
    handle.result(60)
    assert load_step(there / "s") == 2


@pytest.mark.parametrize("mode", quick(MODES, every=3))
def test_a_save_and_a_load_outlast_a_restart_of_the_server(frail: Gluster, mode: str) -> None:
    here, there = frail.mounts
    bytecheckpoint.save(here / "s", states(step=1))
    for calls in (
        lambda: bytecheckpoint.save(here / "s", states(step=2), **MODES[mode]).result(120),
        lambda: load_step(there / "s"),
    ):
        frail.kill_server()
        back = threading.Timer(6.0, frail.start_server)
        back.start()
        calls()
        back.join()
    assert load_step(there / "s") == load_step(here / "s") == 2
    assert command(["verify", str(there / "s")]) == 0
    assert len(files_of(there / "s")) == 6


def test_a_server_that_dies_and_comes_back_late(frail: Gluster) -> None:
    here, there = frail.mounts
    bytecheckpoint.save(here / "s", states(step=1))
    bytecheckpoint.configure(storage_timeout=1.0)
    frail.kill_server()
    with pytest.raises(StorageUnavailableError, match=r"m1/s.*not connected.*\(\d+ attempts? in \d"):
        bytecheckpoint.save(here / "s", states(step=2))
    with pytest.raises(StorageUnavailableError, match=r"m2/s.*not connected.*\(\d+ attempts? in \d"):
        load_step(there / "s")
    frail.start_server()
    bytecheckpoint.configure(storage_timeout=60.0)
    assert load_step(there / "s") == 1
    bytecheckpoint.save(here / "s", states(step=3))
    assert load_step(there / "s") == 3
    assert len(files_of(there / "s")) == 6
