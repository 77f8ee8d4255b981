"""Measures loads of replicas by ranks that pretend to be machines of their own: over sockets, and over a group of gloo.

    torchrun --nproc-per-node 4 -m tests.collectives.fabric_speed [MiB]

Prints one JSON object: for each way the best and the median milliseconds of five loads in turns, of which the start of the
group, and the seconds that all ranks' processors worked per GiB that some rank received.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.engine.fabric import Fabric
from tests.support.memory import as_on_disk

ROUNDS = 5


def measure(mib: int) -> None:
    """Save and load as one rank; rank 0 prints the times."""
    dist.init_process_group("gloo")
    collective = current()
    collective.host = str(collective.rank)
    folder: list[Any] = [tempfile.mkdtemp(dir="/dev/shm") if collective.rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = f"{folder[0]}/step"
    state = {str(n): torch.full((16 << 18,), n, dtype=torch.float32) for n in range(mib // 16)}
    bytecheckpoint.save(path, {"model": state})
    start, starts = Fabric.__init__, []

    def timed(self: Fabric, *args: Any) -> None:
        begun = time.perf_counter()
        start(self, *args)
        starts.append(time.perf_counter() - begun)

    Fabric.__init__ = timed  # type: ignore[method-assign]
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    work: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(ROUNDS):
        for mode, taken in seconds.items():
            bytecheckpoint.configure(fabric=mode)
            dist.barrier()
            begun, before = time.perf_counter(), os.times()
            report = bytecheckpoint.load(as_on_disk(path), {"model": state})
            dist.barrier()
            taken.append(time.perf_counter() - begun)
            after = os.times()
            used = torch.tensor([after.user + after.system - before.user - before.system, report.bytes_received])
            dist.all_reduce(used)
            work[mode].append(float(used[0] / used[1] * (1 << 30)))
    if collective.rank == 0:
        found: dict[str, object] = {"MiB": mib, "ranks": collective.world_size}
        for mode, name in (("off", "sockets"), ("on", "gloo")):
            taken = sorted(seconds[mode])
            found[f"{name} (best, median ms)"] = [round(taken[0] * 1e3), round(taken[ROUNDS // 2] * 1e3)]
            found[f"{name} core-s/GiB"] = round(sorted(work[mode])[ROUNDS // 2], 2)
        found["start of the group (ms)"] = round(sorted(starts)[ROUNDS // 2] * 1e3)
        print(json.dumps(found))
        shutil.rmtree(folder[0])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    measure(int(sys.argv[1] if len(sys.argv) > 1 else 256))
