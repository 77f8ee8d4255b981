"""Jobs of torchrun with worker processes: killed in the middle of a save, they go on exactly, and leave no process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.dataloader.segments import newest_step
from tests.dataloader.training_job import EVERY, Training
from tests.support.processes import ROOT, environment, python, running, wait_until

STOP = 6 * EVERY


class Job:
    """One start of `training_job`.

    Args:
        folder: of the checkpoints, the notes and the logs of all jobs.
        name: of the job.
        ranks: how many.
        workers: of each rank's loader.
        **options: the other arguments of the program.
    """

    def __init__(self, folder: Path, name: str, ranks: int, workers: int, **options: object) -> None:
        self.folder, self.name, self.ranks, self.workers_each = folder, name, ranks, workers
        arguments = {"name": name, "workers": workers, "stop": STOP, **options}
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in arguments.items()]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--monitor-interval=0.1"]
        with (folder / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                python(*launch, "-m", "tests.dataloader.training_job", folder, *flags),
                cwd=ROOT,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def wait_until_held(self) -> None:
        """Wait until the save is under way that the job is not to end."""
        held = self.folder / f"{self.name}.held"
        assert wait_until(lambda: held.exists() or self.process.poll() is not None, 120), self.log
        assert held.exists(), self.log

    def processes(self) -> list[psutil.Process]:
        """Return torchrun and everything that it has started: ranks, workers, and the helpers of both."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def pid_of(self, rank: int) -> int:
        """Return the process of a rank."""
        for process in psutil.Process(self.process.pid).children():
            if process.environ().get("RANK") == str(rank):
                return process.pid
        raise AssertionError(f"no process of rank {rank}\n{self.log}")

    def notes(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank has written down: first its workers, then each step."""
        return [*map(json.loads, (self.folder / f"{self.name}.{rank}.jsonl").read_text().splitlines())]

    def workers(self) -> list[int]:
        """Return the pids of the loader workers of all ranks."""
        return [pid for rank in range(self.ranks) for pid in self.notes(rank)[0]["workers"]]

    def fed(self) -> dict[int, tuple[str, float]]:
        """Return what each step was fed (its hash), and its loss; fail if ranks disagree."""
        found: dict[int, tuple[str, float]] = {}
        for rank in range(self.ranks):
            for facts in self.notes(rank)[1:]:
                assert found.setdefault(facts["step"], (facts["fed"], facts["loss"])) == (facts["fed"], facts["loss"])
        return found


@contextlib.contextmanager
def started(*arguments: Any, **options: Any) -> Iterator[Job]:
    """Start a job for the time of a block; what is left of it at the end is killed."""
    job = Job(*arguments, **options)
    try:
        yield job
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in job.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        job.process.wait(30)


def check_ended(job: Job, others: list[psutil.Process] | None = None) -> None:
    """Fail unless the job ends with an error, and with it all loader workers and the `others`."""
    assert job.process.wait(120) != 0, job.log
    pids = {*job.workers(), *(process.pid for process in others or ())}
    assert len(job.workers()) == job.ranks * job.workers_each
    assert wait_until(lambda: not any(map(running, pids)), 60), (
        f"{[*filter(running, pids)]} of {others} outlive the job\n{job.log}"
    )


@pytest.mark.slow  # most of the time is torch's import
@pytest.mark.timeout(600)
@pytest.mark.parametrize("deaths", [("rank",), ("rank", "term", "worker")], ids=["once", "again_and_again"])
def test_a_run_that_is_killed_goes_on_exactly(tmp_path: Path, deaths: tuple[str, ...]) -> None:
    wanted: dict[int, tuple[str, float]] = {}
    with contextlib.ExitStack() as stack:
        alone = Training(0, 1, 0)
        stack.enter_context(alone.loader)
        for facts in (alone.step() for _ in range(STOP)):
            wanted[facts["step"]] = facts["fed"], facts["loss"]

    def check(job: Job, first: int, committed: int) -> None:
        """Check what a job was fed from its first step on, and what it has committed."""
        found = job.fed()
        assert [*found] == [*range(first, first + len(found))], job.log
        assert {step: fed for step, (fed, _) in found.items()} == {step: wanted[step][0] for step in found}
        for step, (_, loss) in found.items():
            assert loss == pytest.approx(wanted[step][1], rel=1e-9), step
        assert newest_step(tmp_path) == committed, job.log

    # kill -9 of a rank that has written a part of its file.
    with started(tmp_path, "rank", 2, 2, held_at=2 * EVERY, victim=1) as job:
        job.wait_until_held()
        processes = job.processes()
        assert len(processes) >= 1 + 2 + 4, processes
        os.kill(job.pid_of(1), signal.SIGKILL)
        check_ended(job, processes)
        check(job, 0, EVERY)

    committed = EVERY
    if "term" in deaths:  # SIGTERM to torchrun when all files are written, and the checkpoint is not committed yet
        with started(tmp_path, "term", 3, 2, held_at=3 * EVERY, writer="process") as job:
            job.wait_until_held()
            processes = job.processes()
            job.process.terminate()
            check_ended(job, processes)
            check(job, EVERY, 2 * EVERY)
        committed = 2 * EVERY

    if "worker" in deaths:  # kill -9 of a loader worker, between two saves
        with started(tmp_path, "worker", 2, 1, worker_dies_at=4 * EVERY + 1, victim=1) as job:
            check_ended(job)
            message = r"PeerLostError: data loader worker 0 of 1, which feeds streams 4 to 6, died with exit code -9"
            assert re.search(message, job.log), job.log
            check(job, 2 * EVERY, 4 * EVERY)
        committed = 4 * EVERY

    with started(tmp_path, "last", 1, 3, writer="process") as job:
        assert job.process.wait(120) == 0, job.log
        check(job, committed, STOP)
        assert not any(map(running, job.workers()))
        assert [*job.fed()] == [*range(committed, STOP)]
