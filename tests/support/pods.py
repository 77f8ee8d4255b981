"""Pods as Kubernetes makes them, without Kubernetes: containers whose network, name, memory and processes are their own."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.worlds import RankError, World

__all__ = ["Pod", "run_in_pods"]

_MOUNTS, _NAMES, _IPC, _PROCESSES, _NETWORK = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000


class Pod(NamedTuple):
    """A pod of one node.

    Attributes:
        network: name of its network namespace; "": that of the node (hostNetwork).
        hostname: name of the pod.
        ranks: number of its ranks.
    """

    network: str
    hostname: str
    ranks: int


def run_in_pods(folder: Path, pods: Sequence[Pod], address: str, port: int, job: Callable[..., Any]) -> list[Any]:
    """Run a function on every rank of a job that is spread over pods; return the results, in order of rank.

    Args:
        folder: new.
        pods: all of one node. Ranks are numbered in their order.
        address: MASTER_ADDR, of the first pod.
        port: MASTER_PORT.
        job: importable. Gets the folder; returns what JSON can hold.

    Raises:
        RankError: a rank has failed.
    """
    world = World(len(pods), folder / "pods", group=False)
    try:
        world.run(_be_pods, str(folder), [tuple(pod) for pod in pods], address, port, job.__module__, job.__name__)
    finally:
        world.close()
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(sum(pod.ranks for pod in pods))]
    if failed := [text for ok, text in found if not ok]:
        raise RankError("\n".join(failed))
    return [result for _, result in found]


def _be_pods(folder: str, pods: list[Any], address: str, port: int, module: str, name: str) -> None:
    """Start one pod, that whose number the name of the world's log says, and wait for its end."""
    number = int(Path(os.readlink("/proc/self/fd/1")).stem.removeprefix("rank"))
    if (child := os.fork()) == 0:
        try:
            _be_pod(folder, [Pod(*pod) for pod in pods], number, address, port, module, name)
        except BaseException:  # noqa: BLE001  into the log
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _be_pod(folder: str, pods: Sequence[Pod], number: int, address: str, port: int, module: str, name: str) -> None:
    pod = pods[number]
    libc = ctypes.CDLL(None, use_errno=True)
    if pod.network:
        with open(f"/run/netns/{pod.network}") as namespace:
            assert libc.setns(namespace.fileno(), _NETWORK) == 0
    assert libc.unshare(_MOUNTS | _NAMES | _IPC) == 0
    socket.sethostname(pod.hostname)
    private = "mount --make-rprivate / && mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm"
    subprocess.run(["sh", "-c", private], check=True)
    assert libc.unshare(_PROCESSES) == 0
    first = sum(other.ranks for other in pods[:number])
    size = sum(other.ranks for other in pods)
    children = []
    for rank in range(first, first + pod.ranks):
        if (child := os.fork()) == 0:
            try:
                if rank == first:  # process 1 of the pod
                    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
                _be_rank(folder, rank, size, address, port, module, name)
            finally:
                os._exit(0)
        children.append(child)
    for child in reversed(children):  # the others of a pod end with its process 1
        os.waitpid(child, 0)


def _be_rank(folder: str, rank: int, size: int, address: str, port: int, module: str, name: str) -> None:
    import importlib

    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=address, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="eth0"
    )
    try:
        dist.init_process_group("gloo")
        outcome = True, getattr(importlib.import_module(module), name)(folder)
        dist.barrier()
    except BaseException:  # noqa: BLE001  told to the test
        outcome = False, f"rank {rank}: {traceback.format_exc()}"
    path = Path(folder, f"rank{rank}.json")
    path.write_text(json.dumps(outcome))
    if outcome[0]:
        dist.barrier()  # process 1 of a pod ends last
        dist.destroy_process_group()
