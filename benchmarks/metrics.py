"""Measure the cost of metrics: `python -m benchmarks.metrics [--rounds 20] [--mib 256] [--tensors 2000]`.

Saves with metrics and without take turns. Seconds are medians of single saves. Core-seconds are those of this process and
its helper, with what the metrics' threads do afterwards. A step is a piece of Python that runs beside asynchronous saves.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import psutil
import torch

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.monitoring import delivery
from bytecheckpoint.monitoring.record import ROW, RankRecord
from bytecheckpoint.monitoring.sinks.files import encode_table
from bytecheckpoint.monitoring.table import operation_record
from bytecheckpoint.tracing.operation import Operation, span
from bytecheckpoint.world import world_of

__all__ = ["main"]

_SPANS = 200_000


def _core_seconds() -> float:
    """Return the processor time of this process and of its running children."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return own.ru_utime + own.ru_stime + sum(times.user + times.system for times in children)


def _save(folder: str, states: dict[str, object], *, asynchronous: bool, found: dict[str, list[float]]) -> None:
    core = _core_seconds()
    begun = time.perf_counter()
    handle = bytecheckpoint.save(f"{folder}/step_1", states, async_checkpoint=asynchronous)
    found["call s"].append(time.perf_counter() - begun)
    steps = 0
    while not handle.done():
        sum(range(1000))  # a step that needs the interpreter all the time
        steps += 1
    found["end to end s"].append(time.perf_counter() - begun)
    if asynchronous:
        found["steps per s"].append(steps / (time.perf_counter() - begun))
    world_of(current()).collector.close()
    delivery.finish()
    found["core s"].append(_core_seconds() - core)


def _spans() -> float:
    """Return the microseconds of one span."""
    with Operation("save", "/").running():
        begun = time.process_time()
        for _ in range(_SPANS):
            with span("write", 1 << 20, "file"):
                pass
        return (time.process_time() - begun) / _SPANS * 1e6


def _joined(ranks: int) -> tuple[float, int]:
    """Return the core-seconds in which rank 0 joins and encodes the records of many ranks, and the bytes of the file."""
    strings = ["wait", "capture", "plan", "stage", "write", "finish", "commit", "", "file"]
    rows = np.zeros(30, ROW)
    rows["level"][:8], rows["level"][8:18], rows["level"][18:] = 1, 2, 3
    rows["name"], rows["seconds"] = np.arange(30) % 8, np.random.default_rng(0).random(30)
    reported = 1.0, 0.1, 1, strings, rows.tobytes()
    records = [
        RankRecord("save", 1, "/run/step_1", 1, 0.0, rank, f"host{rank // 8}", {"dp": rank}, 1, "", "", *reported)
        for rank in range(ranks)
    ]
    begun = time.process_time()
    data = encode_table(operation_record(records, "world", ranks).table)
    return time.process_time() - begun, len(data)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--folder", default="/dev/shm")
    options = parser.parse_args(arguments)
    length = (options.mib << 20) // 4 // options.tensors
    states: dict[str, object] = {"model": {str(i): torch.rand(length) for i in range(options.tensors)}}
    print(f"load average {os.getloadavg()[0]:.1f}; {time.ctime()}; a span takes {_spans():.2f} us")
    for ranks in (1000, 8960):
        seconds, nbytes = _joined(ranks)
        print(f"{ranks} ranks: joined and encoded in {seconds:.2f} core-seconds, {nbytes / 1e6:.1f} MB")
    print(f"{options.rounds} saves of {options.mib} MiB in {options.tensors} tensors each, in turns (median)")
    for asynchronous in (False, True):
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for number in range(2 * options.rounds + 4):
                metrics = ("off", "files", "files", "off")[number % 4]  # each comes as often after the other
                bytecheckpoint.configure(metrics=metrics)
                _save(
                    folder,
                    states,
                    asynchronous=asynchronous,
                    found=found[metrics] if number >= 4 else defaultdict(list),
                )
        print("asynchronous" if asynchronous else "synchronous")
        for name in found["off"]:
            off, on = (statistics.median(found[metrics][name]) for metrics in ("off", "files"))
            print(f"  {name:14} off {off:10.4f}  on {on:10.4f}  ratio {on / off:.3f}")


if __name__ == "__main__":
    main()
