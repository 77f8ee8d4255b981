"""What a process uses, and that it does not grow."""

from __future__ import annotations

import gc
import os
import time

import psutil

from bytecheckpoint.concurrency import _CallThread
from bytecheckpoint.world import _finish_all


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("bytecheckpoint")}


def measure(process: psutil.Process) -> dict[str, int]:
    """Return counts that must not grow, of this process and its helpers."""
    _finish_all()  # a preparation of the next save reads files of /proc in the background
    gc.collect()
    children = [c for c in process.children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE]
    return {
        "threads": _lasting_threads(process),
        "descriptors": process.num_fds(),
        "children": len(children),
        "child descriptors": sum(c.num_fds() for c in children),
        "child threads": sum(c.num_threads() for c in children),
        "shared memory files": len(shared_memory()),
        "resident": process.memory_info().rss,
        "child resident": sum(c.memory_info().rss for c in children),
    }


def _lasting_threads(process: psutil.Process) -> int:
    """Return the least number of threads in a fifth of a second: some of each rank may be about to end.

    Idle threads of storage calls are not counted: their number is that of the calls which were under way together, by
    chance more in one step than in another, and they end after some seconds.
    """
    counts = []
    for _ in range(11):
        counts.append(process.num_threads() - len(_CallThread.idle))
        time.sleep(0.02)
    return min(counts)


def check_growth(first: dict[str, int], last: dict[str, int], allowance: int) -> None:
    for name, before in first.items():
        # A thread that is about to end may still be counted.
        allowed = allowance if "resident" in name else 1 if "threads" in name else 0
        assert last[name] <= before + allowed, f"{name}: {before} -> {last[name]}"
