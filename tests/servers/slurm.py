"""Slurm: its controller, and two machines of four processors with a daemon each, which see each other over a network.

Debian's packages slurmctld, slurmd and slurm-client. The daemons run as root and believe each other who they are
(auth/none), so there is no munge. The machines share the file system, as a cluster does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.support.namespaces import container, inside, lacks, machines
from tests.support.processes import ROOT, environment, wait_until

__all__ = ["Slurm", "require"]

_CONFIGURATION = """
ClusterName=tests
SlurmctldHost=first(10.99.9.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
KillWait=2
NodeName=first NodeAddr=10.99.9.1 CPUs=4
NodeName=second NodeAddr=10.99.9.2 CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def require(*programs: str) -> None:
    """Skip the test where programs of a cluster are not installed, or fail it if servers are required."""
    missing = [program for program in programs if shutil.which(program) is None]
    if reason := f"{missing[0]} is not installed: run scripts/install-servers.sh launchers" if missing else lacks():
        if os.environ.get("BYTECHECKPOINT_REQUIRE_SERVERS") and os.geteuid() == 0:
            pytest.fail(reason)
        pytest.skip(f"NOT TESTED HERE: {reason}")


class Slurm:
    """A cluster. Use as a context manager: at the end its jobs are cancelled, and its daemons end.

    Args:
        folder: folder for state and logs.
    """

    def __init__(self, folder: Path) -> None:
        require("slurmctld", "slurmd", "srun")
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for name in ("state", "spool.first", "spool.second"):
            (self._folder / name).mkdir(parents=True)
        (self._folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=self._folder))
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # named, and not used
        (hosts := self._folder / "hosts").write_text("127.0.0.1 localhost\n10.99.9.1 first\n10.99.9.2 second\n")
        with self._stack:
            self._machines = self._stack.enter_context(machines(2))
            self._stack.callback(self._end_daemons)
            self._start("slurmctld", 0, *container("first", str(hosts)), "slurmctld", "-D")
            for number, name in enumerate(("first", "second")):
                self._start(name, number, *container(name, str(hosts)), "slurmd", "-D", "-N", name)
            ready = wait_until(lambda: self.call("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * 2, 60)
            assert ready, [log.read_text()[-2000:] for log in self._folder.glob("*.log")]
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self, name: str, machine: int, *command: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [*inside(self._machines[machine]), *command],
                    env=self._environment(),
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                )
            )

    def _end_daemons(self) -> None:
        self.call("scancel", "--signal=KILL", "--full", "--state=RUNNING", "--user=root")
        wait_until(lambda: not self.call("squeue", "-h", "-t", "R,CG"), 10)
        for daemon in self._daemons:  # each is the first process of a container, and all of that end with it
            daemon.kill()
            daemon.wait()

    def _environment(self) -> dict[str, str]:
        facts = {"SLURM_CONF": str(self._folder / "slurm.conf"), "GLOO_SOCKET_IFNAME": "eth0"}
        return environment() | facts | {"PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def begin(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command on the first machine, such as srun; both its outputs are one."""
        return subprocess.Popen(
            [*inside(self._machines[0]), *command], cwd=ROOT, env=self._environment() | variables, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def call(self, *command: str, **variables: str) -> str:
        """Run a command on the first machine; return its output."""
        return self.begin(*command, **variables).communicate(timeout=100)[0]

    def submit(self, options: Sequence[str], script: str, output: Path) -> str:
        """Queue a shell script; return the number of the job."""
        batch = ["sbatch", "--parsable", f"--output={output}", "--open-mode=append", *options, f"--wrap={script}"]
        return self.call(*batch).strip()

    def state(self, job: str) -> str:
        """Return the state of a job, as "RUNNING"."""
        facts = self.call("scontrol", "-o", "show", "job", job)
        return facts.partition("JobState=")[2].partition(" ")[0]
