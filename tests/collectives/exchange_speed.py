"""Measures exchanges between two processes of this machine.

    torchrun --nproc-per-node 2 -m tests.collectives.exchange_speed [MiB]

Prints one JSON object. For arrays that go one way, and for arrays that go both ways: the milliseconds of the first
exchange, which connects the ranks, and the best and the median of seven exchanges. Then the microseconds of an exchange
of 64 bytes.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from bytecheckpoint.collectives import current

ROUNDS = 7


def measure(size: int) -> None:
    """Exchange arrays of `size` bytes as one rank; rank 0 prints the times."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    collective = current()
    me, other = collective.rank, 1 - collective.rank
    source, target = np.full(size, me + 1, np.uint8), np.zeros(size, np.uint8)
    times: dict[str, object] = {"MiB": size >> 20}
    for name in ("one way", "both ways"):
        outgoing = {other: source} if name == "both ways" or me == 0 else {}
        incoming = {other: target} if name == "both ways" or me == 1 else {}
        seconds = []
        for round_ in range(ROUNDS):
            collective.barrier(f"{name} {round_} begins", timeout=60)
            started = time.perf_counter()
            collective.exchange(f"{name} {round_}", outgoing, incoming, timeout=60)
            collective.barrier(f"{name} {round_} ends", timeout=60)
            seconds.append(time.perf_counter() - started)
        first, best, median = seconds[0], min(seconds), sorted(seconds)[ROUNDS // 2]
        times[f"{name} (first, best, median ms)"] = [round(value * 1e3, 1) for value in (first, best, median)]
    small = np.zeros(64, np.uint8)
    started = time.perf_counter()
    for number in range(100):
        collective.exchange(f"small {number}", {other: small}, {other: target[:64]}, timeout=60)
    times["64 bytes both ways (us)"] = round((time.perf_counter() - started) * 1e4)
    if me == 0:
        print(json.dumps(times))


if __name__ == "__main__":
    measure(int(sys.argv[1] if len(sys.argv) > 1 else 256) << 20)
