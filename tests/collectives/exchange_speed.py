"""How quick the data plane is between two processes of this machine: `python -m tests.collectives.exchange_speed [MiB]`.

Prints, for one way and for both at once: milliseconds of the first exchange, which connects, and of the best and the
median of seven; then microseconds of a small one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np

from tests.collectives.test_torch_world import free_port

ROUNDS = 7


def rank(size: int) -> None:
    import torch.distributed as dist

    from bytecheckpoint.collectives import current

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    collective = current()
    me, other = collective.rank, 1 - collective.rank
    source, target = np.full(size, me + 1, np.uint8), np.zeros(size, np.uint8)
    found: dict[str, object] = {"MiB": size >> 20}
    for name in ("one way", "both ways"):
        outgoing = {other: source} if name == "both ways" or me == 0 else {}
        incoming = {other: target} if name == "both ways" or me == 1 else {}
        seconds = []
        for number in range(ROUNDS):
            collective.barrier(f"{name} {number} begins", timeout=60)
            started = time.perf_counter()
            collective.exchange(f"{name} {number}", outgoing, incoming, timeout=60)
            collective.barrier(f"{name} {number} ends", timeout=60)
            seconds.append(time.perf_counter() - started)
        first, best, median = seconds[0], min(seconds), sorted(seconds)[ROUNDS // 2]
        found[f"{name} (first, best, median ms)"] = [round(value * 1e3, 1) for value in (first, best, median)]
    small = np.zeros(64, np.uint8)
    started = time.perf_counter()
    for number in range(100):
        collective.exchange(f"small {number}", {other: small}, {other: target[:64]}, timeout=60)
    found["64 bytes both ways (us)"] = round((time.perf_counter() - started) * 1e4)
    if me == 0:
        print(json.dumps(found))


def main() -> None:
    if "RANK" in os.environ:
        rank(int(sys.argv[1]) << 20)
        return
    size = sys.argv[1] if len(sys.argv) > 1 else "256"
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port().decode(), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.collectives.exchange_speed", size], env=os.environ | world | {"RANK": str(r)}
        )
        for r in range(2)
    ]
    sys.exit(max(process.wait() for process in ranks))


if __name__ == "__main__":
    main()
