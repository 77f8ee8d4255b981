"""Tiers of several machines: replicas, lost machines, other world sizes, killed jobs."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint.cli.main import run as command
from bytecheckpoint.storage import resolve
from bytecheckpoint.tiers.storage import TierStorage
from tests.faults.coded import load_step, states
from tests.support.mounts import small_tmpfs
from tests.support.worlds import World
from tests.tiers import machines as jobs

pytestmark = pytest.mark.timeout(240)

Start = Callable[[int], World]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a world of so many ranks."""
    worlds: list[World] = []
    numbers = itertools.count()

    def make(size: int) -> World:
        worlds.append(World(size, tmp_path / f"world-{next(numbers)}"))
        return worlds[-1]

    yield make
    for world in worlds:
        if world.usable:
            world.close()
        else:
            world.kill()


@pytest.fixture
def memory(hot: Path) -> str:
    return hot.name


def step_in(memory: str, machine: int, path: str) -> Path:
    """The folder of a step in a machine's memory."""
    bytecheckpoint.configure(tier_hot=f"mem://{memory}/{machine}")
    storage = resolve(path)
    assert isinstance(storage, TierStorage)
    return Path(storage.hot.root)


def lose(hot: Path, machine: int) -> None:
    shutil.rmtree(hot / str(machine))


def ranks_in(folder: Path) -> set[int]:
    return {int(file.name.split("-")[1][:5]) for file in (folder / "model").iterdir()}


def durable(path: str) -> Path:
    return Path(path.removeprefix("tier+file://"))


def test_partners_hold_replicas(start: Start, run: str, memory: str, tmp_path: Path) -> None:
    path, gate = f"{run}/1", tmp_path / "gate"
    world = start(5)
    got = world.run(jobs.save, path, memory, [0, 0, 1, 1, 2], 1, str(gate))
    assert not any(rank["committed"] for rank in got)
    assert ranks_in(step_in(memory, 0, path)) == {0, 1, 4}
    assert ranks_in(step_in(memory, 1, path)) == {0, 1, 2, 3}
    assert ranks_in(step_in(memory, 2, path)) == {2, 3, 4}
    for machine in range(3):
        assert (step_in(memory, machine, path) / "metadata.parquet").exists()
    gate.touch()
    world.run(jobs.save, f"{run}/2", memory, [0, 0, 1, 1, 2], 2)
    for step in (1, 2):
        assert load_step(durable(run) / str(step)) == step
    # Flushed steps go, but for the newest.
    for machine in range(3):
        assert [p.name for p in step_in(memory, machine, path).parent.iterdir()] == ["2"]


@pytest.mark.parametrize("replicas", [0, 2])
def test_the_number_of_replicas(start: Start, run: str, memory: str, replicas: int) -> None:
    path = f"{run}/1"
    start(3).run(jobs.save, path, memory, [0, 1, 2], 1, tier_replicas=replicas)
    for machine in range(3):
        expected = {0, 1, 2} if replicas else {machine}
        assert ranks_in(step_in(memory, machine, path)) == expected
    assert load_step(durable(path)) == 1


@pytest.mark.parametrize(
    ("lost", "new"), [(0, [0, 1]), (1, [0, 1]), (0, [0, 0, 1]), (0, [0, 1, 2, 2]), (1, [0, 1, 2, 2]), (0, [2, 3])]
)
def test_a_lost_machine_loses_nothing(
    start: Start, run: str, memory: str, hot: Path, tmp_path: Path, lost: int, new: list[int]
) -> None:
    """The durable storage has nothing yet, and the job that loads may have other ranks, on new machines."""
    path = f"{run}/1"
    world = start(4)
    world.run(jobs.save, path, memory, [0, 0, 1, 1], 1, str(tmp_path / "never"), rows=4000)
    world.kill()
    lose(hot, lost)
    assert not durable(path).joinpath("metadata.parquet").exists()
    if new == [2, 3]:  # no rank runs on the machine that is left: nobody can reach its memory
        errors = start(2).run(jobs.load_and_fail, path, memory, new)
        assert all(error.startswith("CheckpointNotFoundError") for error in errors)
        return
    got = start(len(new)).run(jobs.load, path, memory, new, rows=4000)
    assert {step for step, _ in got} == {1}


def test_a_new_machine_keeps_no_folder_of_steps_that_it_never_had(
    start: Start, run: str, memory: str, hot: Path, tmp_path: Path
) -> None:
    """It takes part in the flush of a killed job's step, of which it has no files."""
    world = start(2)
    world.run(jobs.save, f"{run}/1", memory, [0, 1], 1, str(tmp_path / "never"))
    world.kill()
    lose(hot, 1)
    start(2).run(jobs.save, f"{run}/2", memory, [0, 1], 2)
    assert load_step(durable(run) / "1") == 1
    for machine in range(2):
        assert [p.name for p in step_in(memory, machine, f"{run}/1").parent.iterdir()] == ["2"]


@pytest.mark.parametrize("away", [False, True])
def test_a_job_killed_before_other_machines_heard_of_the_commit(
    start: Start, run: str, memory: str, tmp_path: Path, away: bool
) -> None:
    """The files are there without a catalog; loads find the step, and so does the next flush that works."""
    world = start(2)
    world.run(jobs.save, f"{run}/1", memory, [0, 1], 1, str(tmp_path / "never"), tier_replicas=0)
    world.kill()
    here = step_in(memory, 1, f"{run}/1")
    for name in ("metadata.parquet", *(file.name for file in here.glob("tier*"))):
        (here / name).unlink()
    assert {step for step, _ in start(2).run(jobs.load, f"{run}/1", memory, [0, 1])} == {1}
    world = start(2)
    if away:
        (durable(run) / "1").mkdir(parents=True)
        (durable(run) / "1" / "model").write_text("a file where a folder should be")
    world.run(jobs.save, f"{run}/2", memory, [0, 1], 2)
    if away:
        (durable(run) / "1" / "model").unlink()
        world.run(jobs.save, f"{run}/3", memory, [0, 1], 3)
    assert load_step(durable(run) / "1") == 1
    assert sorted(p.name for p in here.parent.iterdir()) == ["3" if away else "2"]


def test_without_replicas_a_lost_machine_loses_the_step(
    start: Start, run: str, memory: str, hot: Path, tmp_path: Path
) -> None:
    """A load then finds the durable step before it."""
    path = f"{run}/s"
    world = start(2)
    world.run(jobs.save, path, memory, [0, 1], 1, tier_replicas=0)
    world.run(jobs.save, path, memory, [0, 1], 2, str(tmp_path / "never"), tier_replicas=0)
    world.kill()
    assert {step for step, _ in start(2).run(jobs.load, path, memory, [0, 1])} == {2}
    lose(hot, 1)
    assert {step for step, _ in start(3).run(jobs.load, path, memory, [0, 1, 1])} == {1}


@pytest.mark.parametrize("new", [[0, 1, 2], [2], [0, 0, 1, 2]])
def test_two_lost_machines(start: Start, run: str, memory: str, hot: Path, tmp_path: Path, new: list[int]) -> None:
    """One replica does not survive two neighbours: a load finds an older durable step, or names what is missing."""
    path, other = f"{run}/s", f"{run}/t"
    world = start(3)
    world.run(jobs.save, path, memory, [0, 1, 2], 1)
    world.run(jobs.save, path, memory, [0, 1, 2], 2, str(tmp_path / "never"))
    world.kill()
    world = start(3)
    world.run(jobs.save, other, memory, [0, 1, 2], 7, str(tmp_path / "never"))
    world.kill()
    lose(hot, 0)
    lose(hot, 1)
    assert {step for step, _ in start(len(new)).run(jobs.load, path, memory, new)} == {1}
    for error in start(len(new)).run(jobs.load_and_fail, other, memory, new):
        assert error.startswith("CheckpointNotFoundError") and other in error
        assert "files are on " in error and "-00000." in error and "use another step" in error


def test_a_partner_without_room(start: Start, run: str, tmp_path: Path) -> None:
    """The step goes to the durable storage all the same, and is restorable as soon as it is there."""
    small = tmp_path / "small"
    with small_tmpfs(small, "1500k"):
        for step in (1, 2):
            got = start(2).run(jobs.save_where, f"{run}/{step}", [str(tmp_path / "roomy"), str(small)], step, 3000)
            assert got == [True, True], "it is not restorable before"
            assert load_step(durable(f"{run}/{step}"), rows=3000) == step
        left = [file for _, _, files in os.walk(small) for file in files]
        assert not left, "what nobody would find is removed"


def test_machines_that_flush_at_the_same_time(start: Start, run: str, memory: str, tmp_path: Path) -> None:
    """By hand, after a job was killed: whichever is the last one commits."""
    path = f"{run}/1"
    world = start(3)
    world.run(jobs.save, path, memory, [0, 1, 2], 1, str(tmp_path / "never"), rows=4000)
    world.kill()
    line = [sys.executable, "-m", "bytecheckpoint.cli.main", "flush", path]
    flushes = [
        subprocess.Popen(line, env={**os.environ, "BYTECHECKPOINT_TIER_HOT": f"mem://{memory}/{machine}"})
        for machine in range(3)
    ]
    codes = [flush.wait(100) for flush in flushes]
    assert 0 in codes
    assert load_step(durable(path), rows=4000) == 1
    assert command(["verify", str(durable(path))]) == 0


def test_files_that_a_lost_machine_had_flushed_count(
    start: Start, run: str, memory: str, hot: Path, tmp_path: Path
) -> None:
    """Files that are in the durable storage already need no machine any more, unless they are damaged there."""
    world = start(2)
    for step in (1, 2):
        world.run(jobs.save, f"{run}/{step}", memory, [0, 1], step, str(tmp_path / "never"), tier_replicas=0)
    world.kill()
    for step in (1, 2):
        bytecheckpoint.configure(tier_hot=f"mem://{memory}/0")
        assert command(["flush", f"{run}/{step}"]) == 1, "its half"
    file = next((durable(f"{run}/2") / "model").iterdir())
    file.write_bytes(file.read_bytes()[:-9] + b"nonsense!")
    shutil.copy(step_in(memory, 0, f"{run}/1") / "metadata.parquet", step_in(memory, 1, f"{run}/1"))
    for step in (1, 2):
        for name in ("metadata.parquet", *(f.name for f in step_in(memory, 0, f"{run}/{step}").glob("tier-*"))):
            shutil.copy(step_in(memory, 0, f"{run}/{step}") / name, step_in(memory, 1, f"{run}/{step}"))
    lose(hot, 0)
    start(2).run(jobs.save, f"{run}/3", memory, [0, 1], 3)
    assert load_step(durable(run) / "1") == 1
    assert not (durable(run) / "2" / "metadata.parquet").exists()
    assert load_step(durable(run) / "3") == 3


@pytest.mark.parametrize("machine", [0, 1])
def test_a_damaged_copy_is_read_from_another_machine(
    start: Start, run: str, memory: str, tmp_path: Path, machine: int
) -> None:
    path = f"{run}/1"
    world = start(2)
    world.run(jobs.save, path, memory, [0, 1], 1, str(tmp_path / "never"))
    world.kill()
    for file in (step_in(memory, machine, path) / "model").iterdir():
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
    assert {step for step, _ in start(2).run(jobs.load, path, memory, [0, 1])} == {1}


def test_a_copy_that_cannot_be_read_is_flushed_from_another_machine(start: Start, run: str, memory: str) -> None:
    start(3).run(jobs.save_with_a_failing_disk, f"{run}/1", memory, [0, 1, 1], 1, 1)
    assert load_step(durable(f"{run}/1")) == 1
    assert command(["verify", str(durable(f"{run}/1"))]) == 0


def test_a_damaged_copy_is_flushed_from_another_machine(start: Start, run: str, memory: str, tmp_path: Path) -> None:
    path, gate = f"{run}/1", tmp_path / "gate"
    world = start(2)
    world.run(jobs.save, path, memory, [0, 1], 1, str(gate))
    file = next((step_in(memory, 1, path) / "model").glob("rank-00001*"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    gate.touch()
    world.run(jobs.save, f"{run}/2", memory, [0, 1], 2)
    assert load_step(durable(path)) == 1
    assert command(["verify", str(durable(path))]) == 0


@pytest.mark.parametrize("files", [1, 2, 3])
def test_a_job_that_is_killed_in_the_middle_of_a_flush(
    start: Start, run: str, memory: str, hot: Path, files: int
) -> None:
    path = f"{run}/2"
    world = start(2)
    world.run(jobs.save, f"{run}/1", memory, [0, 1], 1)
    outcomes = world.start(jobs.save_and_die, path, memory, [0, 1], 2, files).outcomes()
    assert all("died with exit code -9" in text for ok, text in outcomes if not ok) and not all(
        ok for ok, _ in outcomes
    )
    assert not (durable(path) / "metadata.parquet").exists()
    assert {step for step, _ in start(3).run(jobs.load, path, memory, [0, 1, 1])} == {2}
    if files == 1:  # the next job flushes it beside its own first step
        start(2).run(jobs.save, f"{run}/3", memory, [0, 1], 3)
        assert load_step(durable(run) / "3") == 3
    elif files == 2:  # by hand, on each machine; the last one commits
        codes = []
        for machine in (0, 1):
            bytecheckpoint.configure(tier_hot=f"mem://{memory}/{machine}")
            codes.append(command(["flush", run]))
        assert codes == [1, 0]
    else:  # one machine is lost, the other flushes what it keeps for it
        lose(hot, 0)
        bytecheckpoint.configure(tier_hot=f"mem://{memory}/1")
        assert command(["flush", path]) == 1
        assert command(["flush", path, "--replicas"]) == 0
    assert load_step(durable(path)) == 2
    assert command(["verify", str(durable(path))]) == 0
    assert command(["ls", str(durable(run))]) == 0


def test_a_flush_that_fails_on_one_rank_fails_on_all(start: Start, run: str, memory: str) -> None:
    path = f"{run}/1"
    durable(path).mkdir(parents=True)
    (durable(path) / "model").write_text("a file where a folder should be")
    for error in start(3).run(jobs.save_and_fail, path, memory, [0, 1, 1], 1):
        assert error.startswith("StorageError") and "flush of tier+file" in error
    assert not (durable(path) / "metadata.parquet").exists()


def test_steps_that_were_replaced_elsewhere_are_not_flushed(
    start: Start, run: str, memory: str, tmp_path: Path
) -> None:
    path = f"{run}/1"
    world = start(2)
    world.run(jobs.save, path, memory, [0, 1], 1, str(tmp_path / "never"))
    world.kill()
    bytecheckpoint.save(durable(path), states(step=7))
    assert {step for step, _ in start(2).run(jobs.load, path, memory, [0, 1])} == {7}
    bytecheckpoint.configure(tier_hot=f"mem://{memory}/0")
    assert command(["flush", path]) == 1
    assert load_step(durable(path)) == 7
    assert os.path.exists(step_in(memory, 0, path))
