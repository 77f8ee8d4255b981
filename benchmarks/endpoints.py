"""Many ranks on one machine: `python -m benchmarks.endpoints [--ranks 64 256 1024] [--processes 16]`.

Each rank is a thread with sockets of its own, and goes through the real code of a save and a load with tiny tensors; eight
ranks stand for one machine. Rank 0 has a process to itself, whose messages, bytes, memory and descriptors are printed,
with the seconds of each step, for a star and for a tree. From these the cost at 10,000 ranks is estimated. The barrier of
torch.distributed with gloo is measured beside, with connections made when they are first needed: with all pairs connected
1,024 ranks would open a million sockets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.collectives import ThreadWorld
from bytecheckpoint.collectives.store_collective import StoreCollective
from bytecheckpoint.collectives.transport.hub import Hub
from bytecheckpoint.collectives.transport.link import Link
from bytecheckpoint.collectives.transport.wire import Kind

#: Bytes that one rank reports at the end of a save: the sums of the blocks of some files.
_SUMS = 4096
#: What rank 0 sends of the catalog of 30 million shards to all ranks of a load.
_HEAD = 10 << 20
_PER_MACHINE = 8
_TIMEOUT = 900.0
_BARRIERS = 5
_PROGRAM = (sys.executable, "-m", "benchmarks.endpoints")
_COLUMNS = ("blocking", "core s", "messages in", "messages out", "KiB in", "KiB out", "MiB", "descriptors")


class _Part(ThreadWorld):
    """The ranks of one process of the world.

    Args:
        ranks: numbers of the ranks of this process.
        size: number of ranks in the world.
        port: port of the store.
    """

    def __init__(self, ranks: list[int], size: int, port: int) -> None:
        self.size = len(ranks)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_TIMEOUT))
        joined: dict[int, StoreCollective] = {}

        def join(rank: int) -> None:
            host = f"machine {rank // _PER_MACHINE}"
            joined[rank] = StoreCollective(store, rank, size, timeout=_TIMEOUT, host=host)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.ranks = [joined[rank] for rank in ranks]  # type: ignore[misc]


def _steps(part: _Part, folder: str) -> dict[str, Callable[[], object]]:
    """Return what the ranks do, step by step."""

    def barrier(c: Any) -> float:
        begun = time.perf_counter()
        for number in range(_BARRIERS):
            c.barrier(f"barrier/{number}", timeout=_TIMEOUT)
        return (time.perf_counter() - begun) / _BARRIERS

    def report(c: Any) -> None:
        sums = np.random.default_rng(c.rank).bytes(_SUMS)
        c.gather_scatter("sums", sums, lambda all_sums: [b"ok"] * len(all_sums), timeout=_TIMEOUT)

    def head(c: Any) -> None:
        found = c.gather_scatter("head", b"", lambda ranks: [head_bytes] * len(ranks), timeout=_TIMEOUT)
        assert len(found) == _HEAD

    def states(c: Any) -> dict[str, Any]:
        return {"model": {f"layers.{c.rank}.weight": torch.full((16,), float(c.rank))}}

    def save(c: Any) -> None:
        bytecheckpoint.save(folder, states(c))

    def again(c: Any, number: int) -> float:
        return bytecheckpoint.save(f"{folder}-{number}", states(c), async_checkpoint=True).result().blocking_seconds

    def load(c: Any) -> None:
        wanted = {"model": {f"layers.{c.rank}.weight": torch.zeros(16)}}
        bytecheckpoint.load(folder, wanted, strict=False)
        assert wanted["model"][f"layers.{c.rank}.weight"].tolist() == [float(c.rank)] * 16

    head_bytes = bytes(_HEAD)
    work = {
        "barrier": barrier, "sums": report, "head": head, "save": save, "async save": lambda c: again(c, 2),
        "async save again": lambda c: again(c, 3), "load": load, "last rank": lambda c: c.barrier("end", timeout=_TIMEOUT),
    }  # fmt: skip
    return {name: (lambda body=body: part.run(body, timeout=_TIMEOUT)) for name, body in work.items()}


def _serve_ranks(first: int, last: int, size: int, port: int, folder: str) -> None:
    """Be the ranks of one process but rank 0, which says when a step begins."""
    # A thread that waits for the interpreter asks for it 200 times a second, which takes all of two cores from 500 ranks.
    sys.setswitchinterval(0.2)
    bytecheckpoint.configure(writer="thread", staging_bytes=1 << 20, write_threads=1)
    part = _Part([*range(first, last)], size, port)
    for name, step in _steps(part, folder).items():
        part.ranks[0].recv(0, f"begin {name}", timeout=_TIMEOUT)
        step()
    for each in part.ranks:
        each.close()


class _Counting:
    """Counts the frames and bytes that go over the connections of this process while it is in force."""

    def __init__(self) -> None:
        self.frames: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        post, frame = Link.post, Hub._on_frame

        def counted_post(link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Any) -> bool:
            self.frames["out"] += 1
            self.bytes["out"] += len(payload)
            return post(link, kind, source, to, tag, payload)

        def counted_frame(hub: Hub, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: Any) -> None:
            self.frames["in"] += 1
            self.bytes["in"] += len(payload)
            frame(hub, link, kind, source, to, tag, payload)

        Link.post, Hub._on_frame = counted_post, counted_frame  # type: ignore[method-assign]


def _measure(size: int, processes: int, shape: str) -> list[dict[str, Any]]:
    """Be rank 0 of a world, and return a row for each step."""
    bytecheckpoint.configure(
        writer="thread", staging_bytes=1 << 20, write_threads=1, message_tree="on" if shape == "tree" else "off"
    )
    counting = _Counting()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    bounds = np.linspace(1, size, processes + 1).astype(int).tolist()
    others = [
        subprocess.Popen([*_PROGRAM, "--serve", str(first), str(last), str(size), str(store.port), folder])
        for first, last in itertools.pairwise(bounds)
    ]
    rows = []
    try:
        begun, cpu = time.perf_counter(), time.process_time()
        part = _Part([0], size, store.port)
        rows.append(_row(size, shape, "connect", time.perf_counter() - begun, cpu, counting))
        (own,) = part.ranks
        for name, step in _steps(part, f"{folder}/step").items():
            counting.frames.clear()
            counting.bytes.clear()
            begun, cpu = time.perf_counter(), time.process_time()
            for first in bounds[:-1]:
                own.send(first, f"begin {name}", b"")
            found = step()
            seconds = time.perf_counter() - begun
            row = _row(size, shape, name, found[0] if name == "barrier" else seconds, cpu, counting)  # type: ignore[index]
            rows.append(row | ({"blocking": found[0]} if name.startswith("async") else {}))  # type: ignore[index]
        own.close()
        for other in others:
            other.wait(120)
    finally:
        for other in others:
            other.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def _row(size: int, shape: str, step: str, seconds: float, cpu: float, counting: _Counting) -> dict[str, Any]:
    print(f"{size} ranks, {shape}: {step} {seconds:.2f} s", file=sys.stderr)
    return {
        "ranks": size, "shape": shape, "step": step, "seconds": seconds, "core s": time.process_time() - cpu,
        "messages in": counting.frames["in"], "messages out": counting.frames["out"],
        "KiB in": counting.bytes["in"] / 1024, "KiB out": counting.bytes["out"] / 1024,
        "MiB": psutil.Process().memory_info().rss / 2**20, "descriptors": psutil.Process().num_fds(),
    }  # fmt: skip


def _gloo_ranks(first: int, last: int, size: int, port: int) -> list[dict[str, Any]]:
    """Be the ranks of one process in a world of gloo, and return a row for each step."""
    stores: dict[int, dist.TCPStore] = {}
    groups: dict[int, Any] = {}

    def each(body: Callable[[int], object]) -> float:
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(first, last)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begun

    def connect(rank: int) -> None:
        # A client of its own: it makes the other threads of its process wait while it waits for a key.
        store = stores[rank] = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_TIMEOUT))
        groups[rank] = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=_TIMEOUT))
        groups[rank].barrier().wait()

    def barriers(rank: int) -> None:
        for _ in range(_BARRIERS):
            groups[rank].barrier().wait()

    connected = each(connect)
    seconds = each(barriers) / _BARRIERS
    stores[first].set(f"done/{first}", b"")
    return [
        {"ranks": size, "shape": "gloo", "step": name, "seconds": took, "descriptors": psutil.Process().num_fds()}
        for name, took in (("connect", connected), ("barrier", seconds))
    ]


def _gloo(size: int, processes: int) -> list[dict[str, Any]]:
    """Return the seconds of gloo's barrier."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    bounds = np.linspace(1, size, processes + 1).astype(int).tolist()
    others = [
        subprocess.Popen([*_PROGRAM, "--serve-gloo", str(first), str(last), str(size), str(store.port)])
        for first, last in itertools.pairwise(bounds)
    ]
    try:
        rows = _gloo_ranks(0, 1, size, store.port)
        store.wait([f"done/{first}" for first in bounds[:-1]], timedelta(seconds=_TIMEOUT))
    finally:
        for other in others:
            other.kill()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--shapes", nargs="+", default=["star", "tree", "gloo"])
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--serve", nargs=5)
    parser.add_argument("--serve-gloo", nargs=4, type=int)
    parser.add_argument("--one", nargs=2)
    arguments = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    threading.stack_size(512 << 10)
    if arguments.serve_gloo:
        _gloo_ranks(*arguments.serve_gloo)
    elif arguments.serve:
        first, last, size, port, folder = arguments.serve
        _serve_ranks(int(first), int(last), int(size), int(port), f"{folder}/step")
    elif arguments.one:
        size, shape = int(arguments.one[0]), arguments.one[1]
        rows = _gloo(size, arguments.processes) if shape == "gloo" else _measure(size, arguments.processes, shape)
        print(json.dumps(rows))
    else:
        rows = []
        for size, shape in itertools.product(arguments.ranks, arguments.shapes):
            command = [*_PROGRAM, "--one", str(size), shape, "--processes", str(arguments.processes)]
            environment = os.environ | {"TORCH_GLOO_LAZY_INIT": "1"}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            rows += json.loads(done.stdout)
        _print(rows)


def _print(rows: list[dict[str, Any]]) -> None:
    """Print a line for each measurement, and what rank 0 alone would need at 10,000 ranks."""
    columns = ("ranks", "shape", "step", "seconds", *_COLUMNS)
    print("".join(f"{name:>14}" for name in columns))
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        print("".join(f"{cell:>14.3f}" if isinstance(cell, float) else f"{cell:>14}" for cell in cells))
    for shape, step in dict.fromkeys((row["shape"], row["step"]) for row in rows):
        found = [row for row in rows if (row["shape"], row["step"]) == (shape, step) and "core s" in row]
        if len(found) > 1:
            slope, start = np.polyfit([row["ranks"] for row in found], [row["core s"] for row in found], 1)
            print(f"{shape}, {step}: rank 0 would take {start + 10_000 * slope:.2f} s of a core at 10,000 ranks")


if __name__ == "__main__":
    main()
