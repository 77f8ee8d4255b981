"""Tiers of several machines: replicas, lost machines, other world sizes, killed jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint.cli.main import run as command
from tests.support.coded import check_steps, files_of, load_step, states
from tests.support.damage import damage, storage_file
from tests.support.memory import durable_folder, hot_folder
from tests.support.mounts import small_tmpfs
from tests.support.processes import environment
from tests.support.programs import forked
from tests.support.variants import quick
from tests.support.worlds import World
from tests.tiers import machines as jobs

pytestmark = pytest.mark.timeout(240)

#: A gate that stays closed.
NEVER = Path("/nowhere")


class Job:
    """A world of processes, of which rank r runs on machine number `machines[r]`."""

    def __init__(self, world: World, memory: str, machines: Sequence[int]) -> None:
        self.world = world
        self._memory, self._machines = memory, list(machines)

    def run(self, function: Callable[..., Any], path: str, *args: Any, **options: Any) -> list[Any]:
        """Run a function of tests.tiers.machines on every rank."""
        return self.world.run(function, path, self._memory, self._machines, *args, **options)

    def save(self, path: str, step: int, gate: Path | str = "", **options: Any) -> list[Any]:
        """Save; with a gate, only until the step is restorable: the flush waits until the file `gate` exists."""
        return self.run(jobs.save, path, step, str(gate), **options)

    def kill(self) -> None:
        """Kill all processes."""
        self.world.kill()


class Cluster:
    """Simulated machines: folders in memory."""

    def __init__(self, hot: Path, folder: Path) -> None:
        self._hot, self._folder = hot, folder
        self.jobs: list[Job] = []

    def start(self, *machines: int) -> Job:
        """Start a job that has a rank on each of these machines."""
        world = World(len(machines), self._folder / f"world-{len(self.jobs)}")
        self.jobs.append(Job(world, self._hot.name, machines))
        return self.jobs[-1]

    def save_and_kill(self, path: str, step: int, *machines: int, **options: Any) -> None:
        """Save from a job that is killed while the step is in memory only."""
        job = self.start(*machines)
        job.save(path, step, NEVER, **options)
        job.kill()

    def load(self, path: str, *machines: int, **options: Any) -> set[int]:
        """Return the steps that the ranks of a new job load."""
        return {step for step, _ in self.start(*machines).run(jobs.load, path, **options)}

    def memory(self, machine: int) -> str:
        """The URL of a machine's memory."""
        return f"mem://{self._hot.name}/{machine}"

    def flush(self, machine: int, path: str, *options: str) -> int:
        """Flush by hand on a machine; return the exit code."""
        bytecheckpoint.configure(tier_hot=self.memory(machine))
        return command(["flush", path, *options])

    def step_in(self, machine: int, path: str) -> Path:
        """The folder of a step in a machine's memory."""
        bytecheckpoint.configure(tier_hot=self.memory(machine))
        return hot_folder(path)

    def lose(self, machine: int) -> None:
        """Lose what a machine has in memory."""
        shutil.rmtree(self._hot / str(machine))


@pytest.fixture
def cluster(hot: Path, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(hot, tmp_path)
    yield made
    for job in made.jobs:
        if job.world.usable:
            job.world.close()
        else:
            job.world.kill()


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def ranks_in(folder: Path) -> set[int]:
    return {int(file.name.split("-")[1][:5]) for file in (folder / "model").iterdir()}


def test_partners_hold_replicas(cluster: Cluster, run: str, tmp_path: Path) -> None:
    path, gate = f"{run}/1", tmp_path / "gate"
    job = cluster.start(0, 0, 1, 1, 2)
    assert not any(rank["committed"] for rank in job.save(path, 1, gate, writer="process"))
    for machine, ranks in enumerate([{0, 1, 4}, {0, 1, 2, 3}, {2, 3, 4}]):
        assert ranks_in(cluster.step_in(machine, path)) == ranks
        assert (cluster.step_in(machine, path) / "metadata.parquet").exists()
    gate.touch()
    job.save(f"{run}/2", 2, writer="process")
    check_steps(durable_folder(run), 1, 2)
    for machine in range(3):
        assert steps_in(cluster.step_in(machine, path).parent) == ["2"], "flushed steps go, but for the newest"


def test_a_step_that_a_manager_deletes_goes_from_all_machines(cluster: Cluster, run: str) -> None:
    """With the next flush, or when a manager on another machine meets it."""
    job = cluster.start(0, 1)
    job.run(jobs.train, run, [1, 2, 3], tier_keep=3)
    held = [steps_in(cluster.step_in(machine, f"{run}/-").parent) for machine in (0, 1)]
    assert held == [["step_00000003"], ["step_00000002", "step_00000003"]]
    assert cluster.start(1, 0).run(jobs.train, run, [4], tier_keep=3)[0] == [4]


@pytest.mark.parametrize("replicas", [0, 2])
def test_the_number_of_replicas(cluster: Cluster, run: str, replicas: int) -> None:
    path = f"{run}/1"
    cluster.start(0, 1, 2).save(path, 1, tier_replicas=replicas)
    for machine in range(3):
        assert ranks_in(cluster.step_in(machine, path)) == ({0, 1, 2} if replicas else {machine})
    assert load_step(durable_folder(path)) == 1


@pytest.mark.parametrize(
    ("lost", "new"),
    quick([(0, [0, 1]), (1, [0, 1]), (1, [0, 1, 2, 2]), (0, [0, 1, 2, 2]), (0, [2, 3]), (0, [0, 0, 1])], every=2),
)
def test_a_lost_machine_loses_nothing(cluster: Cluster, run: str, lost: int, new: list[int]) -> None:
    """The durable storage has nothing yet, and the job that loads may have other ranks, on new machines."""
    path = f"{run}/1"
    cluster.save_and_kill(path, 1, 0, 0, 1, 1, rows=4000)
    cluster.lose(lost)
    assert not durable_folder(path).joinpath("metadata.parquet").exists()
    if new == [2, 3]:  # no rank runs on the machine that is left: nobody can reach its memory
        errors = cluster.start(*new).run(jobs.load_and_fail, path)
        assert all(error.startswith("CheckpointNotFoundError") for error in errors)
        return
    assert cluster.load(path, *new, rows=4000) == {1}


def test_containers_of_one_name_are_machines_of_their_own(cluster: Cluster, run: str) -> None:
    """Pods in their host's network have its name and boot, and memories of their own."""
    path = f"{run}/1"
    cluster.save_and_kill(path, 1, 0, 1, rows=4000, one_name=True)
    assert ranks_in(cluster.step_in(0, path)) == ranks_in(cluster.step_in(1, path)) == {0, 1}
    cluster.lose(0)
    assert cluster.load(path, 0, 1, rows=4000) == {1}


def test_a_new_machine_keeps_no_folder_of_steps_that_it_never_had(cluster: Cluster, run: str) -> None:
    """It takes part in the flush of a killed job's step, of which it has no files."""
    cluster.save_and_kill(f"{run}/1", 1, 0, 1)
    cluster.lose(1)
    cluster.start(0, 1).save(f"{run}/2", 2)
    assert load_step(durable_folder(run) / "1") == 1
    for machine in range(2):
        assert steps_in(cluster.step_in(machine, f"{run}/1").parent) == ["2"]


@pytest.mark.parametrize("away", quick([True, False], every=2))
def test_a_job_killed_before_other_machines_heard_of_the_commit(cluster: Cluster, run: str, away: bool) -> None:
    """The files are there without a catalog; loads find the step, and so does the next flush that works."""
    cluster.save_and_kill(f"{run}/1", 1, 0, 1, tier_replicas=0)
    here = cluster.step_in(1, f"{run}/1")
    for name in ("metadata.parquet", *(file.name for file in here.glob("tier*"))):
        (here / name).unlink()
    assert cluster.load(f"{run}/1", 0, 1) == {1}
    job = cluster.start(0, 1)
    if away:
        (durable_folder(run) / "1").mkdir(parents=True)
        (durable_folder(run) / "1" / "model").write_text("a file where a folder should be")
    job.save(f"{run}/2", 2)
    if away:
        (durable_folder(run) / "1" / "model").unlink()
        job.save(f"{run}/3", 3)
    assert load_step(durable_folder(run) / "1") == 1
    assert steps_in(here.parent) == ["3" if away else "2"]


def test_without_replicas_a_lost_machine_loses_the_step(cluster: Cluster, run: str) -> None:
    """A load then finds the durable step before it."""
    path = f"{run}/s"
    job = cluster.start(0, 1)
    job.save(path, 1, tier_replicas=0)
    job.save(path, 2, NEVER, tier_replicas=0)
    job.kill()
    assert cluster.load(path, 0, 1) == {2}
    cluster.lose(1)
    assert cluster.load(path, 0, 1, 1) == {1}


@pytest.mark.parametrize("new", quick([[0, 0, 1, 2], [0, 1, 2], [2]], every=3))
def test_two_lost_machines(cluster: Cluster, run: str, new: list[int]) -> None:
    """One replica does not survive two neighbours: a load finds an older durable step, or its error names the files."""
    path, other = f"{run}/s", f"{run}/t"
    job = cluster.start(0, 1, 2)
    job.save(path, 1)
    job.save(path, 2, NEVER)
    job.kill()
    cluster.save_and_kill(other, 7, 0, 1, 2)
    for machine in (0, 1):
        cluster.lose(machine)
    assert cluster.load(path, *new) == {1}
    for error in cluster.start(*new).run(jobs.load_and_fail, other):
        assert error.startswith("CheckpointNotFoundError") and other in error
        assert "files are on " in error and "-00000." in error and "use another step" in error


def test_a_partner_without_room(cluster: Cluster, run: str, tmp_path: Path) -> None:
    """The step goes to the durable storage all the same, and is restorable as soon as it is there."""
    small = tmp_path / "small"
    folders = [str(tmp_path / "roomy"), str(small)]
    with small_tmpfs(small, "1500k"):
        for step in (1, 2):
            got = cluster.start(0, 1).world.run(jobs.save_where, f"{run}/{step}", folders, step, 3000)
            assert got == [True, True], "it is not restorable before"
            assert load_step(durable_folder(f"{run}/{step}"), rows=3000) == step
        assert files_of(small) == [], "what nobody would find is removed"


def test_machines_that_flush_at_the_same_time(cluster: Cluster, run: str) -> None:
    """By hand, after a job was killed: whichever is the last one commits."""
    path = f"{run}/1"
    cluster.save_and_kill(path, 1, 0, 1, 2, rows=4000)
    line = forked("-m", "bytecheckpoint.cli.main", "flush", path)
    flushes = [
        subprocess.Popen(line, env={**environment(), "BYTECHECKPOINT_TIER_HOT": cluster.memory(machine)})
        for machine in range(3)
    ]
    assert 0 in [flush.wait(100) for flush in flushes]
    assert load_step(durable_folder(path), rows=4000) == 1
    assert command(["verify", str(durable_folder(path))]) == 0


def test_files_that_a_lost_machine_had_flushed_count(cluster: Cluster, run: str) -> None:
    """Files that are in the durable storage already need no machine any more, unless they are damaged there."""
    job = cluster.start(0, 1)
    for step in (1, 2):
        job.save(f"{run}/{step}", step, NEVER, tier_replicas=0)
    job.kill()
    for step in (1, 2):
        assert cluster.flush(0, f"{run}/{step}") == 1, "its half"
    damage(storage_file(durable_folder(f"{run}/2")))
    for step in (1, 2):
        here, there = (cluster.step_in(machine, f"{run}/{step}") for machine in (0, 1))
        for name in ("metadata.parquet", *(file.name for file in here.glob("tier-*"))):
            shutil.copy(here / name, there)
    cluster.lose(0)
    cluster.start(0, 1).save(f"{run}/3", 3)
    assert load_step(durable_folder(run) / "1") == 1
    assert not (durable_folder(run) / "2" / "metadata.parquet").exists()
    assert load_step(durable_folder(run) / "3") == 3


@pytest.mark.parametrize("machine", [0, 1])
def test_a_damaged_copy_is_read_from_another_machine(cluster: Cluster, run: str, machine: int) -> None:
    path = f"{run}/1"
    cluster.save_and_kill(path, 1, 0, 1)
    for file in (cluster.step_in(machine, path) / "model").iterdir():
        damage(file)
    assert cluster.load(path, 0, 1) == {1}


def test_a_copy_that_cannot_be_read_is_flushed_from_another_machine(cluster: Cluster, run: str) -> None:
    cluster.start(0, 1, 1).run(jobs.save_with_a_failing_disk, f"{run}/1", 1, 1)
    assert load_step(durable_folder(f"{run}/1")) == 1
    assert command(["verify", str(durable_folder(f"{run}/1"))]) == 0


def test_a_damaged_copy_is_flushed_from_another_machine(cluster: Cluster, run: str, tmp_path: Path) -> None:
    path, gate = f"{run}/1", tmp_path / "gate"
    job = cluster.start(0, 1)
    job.save(path, 1, gate)
    damage(storage_file(cluster.step_in(1, path), rank="00001"))
    gate.touch()
    job.save(f"{run}/2", 2)
    assert load_step(durable_folder(path)) == 1
    assert command(["verify", str(durable_folder(path))]) == 0


@pytest.mark.parametrize("files", quick([3, 2, 1], every=3))
def test_a_job_that_is_killed_in_the_middle_of_a_flush(cluster: Cluster, run: str, hot: Path, files: int) -> None:
    path = f"{run}/2"
    job = cluster.start(0, 1)
    job.save(f"{run}/1", 1)
    outcomes = job.world.start(jobs.save_and_die, path, hot.name, [0, 1], 2, files).outcomes()
    died = [text for ok, text in outcomes if not ok]
    assert died and all("died with exit code -9" in text for text in died)
    assert not (durable_folder(path) / "metadata.parquet").exists()
    assert cluster.load(path, 0, 1, 1) == {2}
    if files == 1:  # the next job flushes it beside its own first step
        cluster.start(0, 1).save(f"{run}/3", 3)
        assert load_step(durable_folder(run) / "3") == 3
    elif files == 2:  # by hand, on each machine; the last one commits
        assert [cluster.flush(machine, run) for machine in (0, 1)] == [1, 0]
    else:  # one machine is lost, the other flushes what it keeps for it
        cluster.lose(0)
        assert cluster.flush(1, path) == 1
        assert cluster.flush(1, path, "--replicas") == 0
    assert load_step(durable_folder(path)) == 2
    assert command(["verify", str(durable_folder(path))]) == 0
    assert command(["ls", str(durable_folder(run))]) == 0


def test_a_flush_that_fails_on_one_rank_fails_on_all(cluster: Cluster, run: str) -> None:
    path = f"{run}/1"
    durable_folder(path).mkdir(parents=True)
    (durable_folder(path) / "model").write_text("a file where a folder should be")
    for error in cluster.start(0, 1, 1).run(jobs.save_and_fail, path, 1):
        assert error.startswith("StorageError") and "flush of tier+file" in error
    assert not (durable_folder(path) / "metadata.parquet").exists()


def test_steps_that_were_replaced_elsewhere_are_not_flushed(cluster: Cluster, run: str) -> None:
    path = f"{run}/1"
    cluster.save_and_kill(path, 1, 0, 1)
    bytecheckpoint.save(durable_folder(path), states(step=7))
    assert cluster.load(path, 0, 1) == {7}
    assert cluster.flush(0, path) == 1
    assert load_step(durable_folder(path)) == 7
    assert os.path.exists(cluster.step_in(0, path))
