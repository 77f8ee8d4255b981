"""Jobs that real launchers start: Slurm on two machines, and MPI."""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.process import free_port
from tests.servers.slurm import Slurm, require
from tests.support.processes import ROOT, environment, python, wait_until
from tests.support.programs import forked

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]
_JOB = python(ROOT / "tests" / "support" / "cluster_job.py")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def meet(port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "10.99.9.1", "MASTER_PORT": str(port)}


def noted(run: Path, what: str) -> list[str]:
    """Return what ranks of a job have noted, in order of rank."""
    log = run.with_name(f"{run.name}.log")
    lines = log.read_text().splitlines() if log.exists() else []
    return sorted(line for line in lines if what in line)


def test_slurm(slurm: Slurm, tmp_path: Path) -> None:
    """Ranks that srun starts save; torchrun, which srun starts on each machine, goes on at another number of ranks."""
    run = tmp_path / "run"
    done = slurm.call("srun", "-N2", "-n3", *_JOB, str(run), "2", **meet(29500))
    assert noted(run, "ends") == [f"rank {rank} of 3 ends at 2" for rank in range(3)], done
    assert {line.split()[5] for line in noted(run, "begins")} == {"first", "second"}, "two machines"
    launch = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    launch += ["--rdzv-endpoint=10.99.9.1:29501", "--rdzv-id=$SLURM_JOB_ID"]
    script = " ".join(["srun", *python(*launch, *_JOB[1:], run, 1)])
    output = tmp_path / "output"
    job = slurm.submit(["-N2", "--ntasks-per-node=1"], script, output)
    assert wait_until(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), 100)
    assert len(noted(run, "of 2 on")) == 2 and all("begins at 2" in line for line in noted(run, "of 2 on")), output
    assert noted(run, "ends at 3") == [f"rank {rank} of 2 ends at 3" for rank in range(2)], output.read_text()


def test_slurm_requeues_a_job(slurm: Slurm, tmp_path: Path) -> None:
    """The same job, with the same number, begins anew on the same machines while its saves are under way."""
    run, output = tmp_path / "run", tmp_path / "output"
    script = "export MASTER_ADDR=10.99.9.1 MASTER_PORT=29502; echo restarts: $SLURM_RESTART_COUNT; "
    script += shlex.join(["srun", *_JOB, str(run), "6", "--pace=0.4"])
    job = slurm.submit(["-N2", "-n2", "--requeue"], script, output)
    assert wait_until((run / "step_00000002" / "metadata.parquet").exists, 100), output.read_text()
    slurm.call("scontrol", "requeue", job)
    requeued = time.monotonic()

    def ended() -> bool:
        time.sleep(0.5)  # a controller that answers all the time schedules late
        # Slurm waits two minutes. It revokes what it has issued to the job up to a second, and so the next run's in that.
        if slurm.state(job) == "PENDING" and time.monotonic() > requeued + 4:
            slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
        return len(noted(run, "ends")) == 2

    assert wait_until(ended, 100), (output.read_text(), slurm.call("scontrol", "show", "job", job))
    begun = {int(line.rpartition(" ")[2]) for line in noted(run, "begins")}
    assert len(begun) == 2 and min(begun) == 0 and max(begun) >= 2, begun
    assert noted(run, "ends") == [f"rank {rank} of 2 ends at {max(begun) + 6}" for rank in range(2)], output.read_text()
    assert "restarts: 1" in output.read_text()


def test_two_jobs_of_slurm_with_one_folder(slurm: Slurm, tmp_path: Path) -> None:
    """By mistake. The one that came first is told so, and the folder stays whole."""
    run = tmp_path / "run"
    first = slurm.begin("srun", "-N2", "-n2", *_JOB, str(run), "1000", "--pace=0.2", **meet(29503))
    assert wait_until((run / "step_00000001" / "metadata.parquet").exists, 100)
    second = slurm.call("srun", "-N2", "-n2", *_JOB, str(run), "3", **meet(29504))
    last = int(re.findall(r"ends at (\d+)", "".join(noted(run, "ends")))[-1])
    assert last >= 4, second
    told = first.communicate(timeout=100)[0]
    assert first.returncode != 0 and told.count("another job manages") >= 2, told
    third = slurm.call("srun", "-N1", "-n1", *_JOB, str(run), "1", **meet(29505))
    # The first job may have committed another step before it was told.
    (begun,) = re.findall(r"of 1 on first begins at (\d+)", "".join(noted(run, "of 1 on first begins")))
    assert int(begun) >= 4 and (run / f"step_{int(begun):08d}" / "metadata.parquet").exists(), third


def test_two_jobs_of_mpirun(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """At once on one machine, with one secret each and ports of their own."""
    require("mpirun")
    jobs = []
    for name in "ab":
        options = ["--oversubscribe", "--allow-run-as-root", "-np", "2"]
        # A folder of its own: Open MPI fails if two jobs of a user make their first one at the same moment.
        folder = tempfile.TemporaryDirectory(prefix="mpi-", dir="/tmp")  # a short path, for its sockets
        request.addfinalizer(folder.cleanup)
        options += ["--mca", "orte_tmpdir_base", folder.name]
        variables = environment() | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        jobs.append(
            subprocess.Popen(
                ["mpirun", *options, *forked(*_JOB[1:], tmp_path / name, 2)],
                cwd=ROOT,
                env=variables,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    for name, job in zip("ab", jobs, strict=True):
        output = job.communicate(timeout=200)[0]
        assert noted(tmp_path / name, "ends") == [f"rank {rank} of 2 ends at 2" for rank in range(2)], output
