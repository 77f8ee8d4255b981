"""Jobs of demo/elastic.py under torchrun's agents, of which several on this machine stand for as many machines."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.servers.process import free_port
from tests.support.processes import ROOT, environment, python, running, wait_until

#: Agents must come within this many seconds of the first one to be in its round, and so long a round waits for more.
_LAST_CALL = 15


#: Else torch's workers find in the store what those of the attempt before have written there (torch 2.13), gloo's addresses
#: among it.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class ElasticJob:
    """A job of demo/elastic.py. Use as a context manager: what is left of it at the end is killed.

    Args:
        folder: for the run, the losses and the logs.
        steps: number of steps.
        pace: seconds for each.
        host: address at which the agents meet.
    """

    def __init__(self, folder: Path, steps: int, pace: float, host: str = "127.0.0.1") -> None:
        self.folder, self.root, self.record = folder, folder / "run", folder / "losses.jsonl"
        self._program = [
            ROOT / "demo" / "elastic.py", f"--root={self.root}", f"--record={self.record}", f"--steps={steps}",
            f"--pace={pace}",
        ]  # fmt: skip
        self._endpoint = f"{host}:{free_port()}"
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(
        self, nodes: str, ranks: int, *, within: Sequence[str] = (), address: str = "127.0.0.1", **further: str
    ) -> int:
        """Start an agent; return its number.

        Args:
            nodes: how many agents there are at least and at most, as for torchrun.
            ranks: of this agent.
            within: what the command is put behind, as `ip netns exec`.
            address: at which the other agents reach this one.
            **further: variables of its environment.
        """
        number = len(self.agents)
        launch = [
            "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}", "--max-restarts=20",
            "--monitor-interval=0.1", "--rdzv-backend=c10d", f"--rdzv-endpoint={self._endpoint}", "--rdzv-id=job",
            f"--rdzv-conf=last_call_timeout={_LAST_CALL},keep_alive_interval=1,join_timeout=120,is_host={not number}",
            f"--local-addr={address}",
        ]  # fmt: skip
        with (self.folder / f"agent{number}.log").open("wb") as log:
            self.agents.append(
                subprocess.Popen(
                    [*within, *python(*launch, *self._program)],
                    cwd=ROOT,
                    env={**environment(), **ENVIRONMENT, **further},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        if not number:
            time.sleep(1.0)  # it is the one that keeps the meeting point
        return number

    def tree(self, agent: int) -> list[psutil.Process]:
        """Return an agent, and its ranks."""
        process = psutil.Process(self.agents[agent].pid)
        return [process, *process.children(recursive=True)]

    def losses(self) -> list[dict[str, Any]]:
        """Return what rank 0 has noted at each step, in the order of time."""
        return [*map(json.loads, self.record.read_text().splitlines())] if self.record.exists() else []

    def wait_for(self, step: int) -> None:
        """Wait until a step is done."""
        assert wait_until(lambda: any(facts["step"] >= step for facts in self.losses()), 120), self.log

    def wait(self, agents: Sequence[int]) -> None:
        """Wait until agents have ended well."""
        assert [self.agents[agent].wait(200) for agent in agents] == [0] * len(agents), self.log

    @property
    def log(self) -> str:
        """What all agents and ranks have written."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("agent*.log")))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, agent in enumerate(self.agents):
            if agent.poll() is None:
                kill(self.tree(number))
            agent.wait(30)


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, whose ranks are in sessions of their own, at once."""
    for process in processes:
        process.kill()
    assert wait_until(lambda: not any(running(process.pid) for process in processes), 30)
