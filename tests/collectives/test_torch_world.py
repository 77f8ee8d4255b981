"""Worlds of real processes on torch.distributed; this file is also the program that each rank runs."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest

from bytecheckpoint.collectives import Collective, SingleProcess, current, host_id
from bytecheckpoint.errors import CheckpointTimeoutError, PeerLostError, UsageError
from tests.servers.process import free_port
from tests.support.processes import environment
from tests.support.programs import forked

MIB = 1 << 20


def launch(scenario: str) -> tuple[list[int], str]:
    """Run a scenario on three ranks, which one program forks; return their exit statuses and what they printed."""
    job = environment() | {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    program = subprocess.Popen(
        forked(__file__, scenario),
        env=job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = program.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    assert program.returncode == 0, errors
    return json.loads(output), errors


def test_a_world_of_processes() -> None:
    statuses, errors = launch("everything")
    assert statuses == [0, 0, 0], errors


def test_stopped_killed_and_lost_ranks() -> None:
    statuses, errors = launch("faults")
    assert statuses == [-signal.SIGKILL, 0, -signal.SIGKILL], errors


# ---- what ranks run ----


def everything() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    c = current()
    assert current() is c and (c.rank, c.world_size) == (dist.get_rank(), 3)
    assert set(c.all_gather("ids", f"{c.world_id} {c.host}".encode(), timeout=30)) == {
        f"{c.world_id} {host_id()}".encode()
    }
    check_descriptors(c)
    check_exchange(c)
    check_refusal(c)
    check_subgroup(c)
    check_fork(c)
    got = c.gather("gather", b"%d" % c.rank, timeout=30)
    assert got == ([b"0", b"1", b"2"] if c.rank == 0 else None)
    assert c.scatter("scatter", got, timeout=30) == b"%d" % c.rank

    # The world survives the training's groups; a new default group gets a new world.
    c.barrier("destroy", timeout=30)
    destroyed = dist.group.WORLD  # as torch's caches of DTensors keep it
    dist.destroy_process_group()
    assert isinstance(current(), SingleProcess)
    c.barrier("after destroy", timeout=30)
    check_exchange(c, "after destroy")
    os.environ["MASTER_PORT"] = c.broadcast(
        "port", str(free_port()).encode() if c.rank == 0 else None, timeout=30
    ).decode()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    new = current()
    assert destroyed is not None and destroyed is not dist.group.WORLD
    assert new is not c and new.world_id != c.world_id
    new.barrier("new", timeout=30)
    c.barrier("old still works", timeout=30)
    loops = c._loops  # type: ignore[attr-defined]
    assert len(loops) == 2
    del c
    gc.collect()  # tracebacks of the checks above are in circles; when the collector runs by itself is chance
    assert all(loop.join(20) for loop in loops), "an old world that nobody holds any more must go away"
    new.barrier("new still works", timeout=30)

    # Rank 0 ends at once; an executor's thread is still sending when its main thread is done.
    dist.destroy_process_group()
    if new.rank == 0:
        ThreadPoolExecutor(1).submit(
            lambda: [time.sleep(0.5), *(new.send(r, "last", b"z" * (64 * MIB)) for r in (1, 2))]
        )
    else:
        time.sleep(0.2 if new.rank == 1 else 2.0)
        assert new.recv(0, "last", timeout=30) == b"z" * (64 * MIB)
        with pytest.raises(PeerLostError, match="rank 0"):
            new.recv(0, "never", timeout=30)


def check_descriptors(c: Collective) -> None:
    """Ranks that exchange nothing with others open nothing, and start no thread."""

    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def no_more_than(descriptors: int, threads: int) -> bool:
        now = used()  # threads of earlier checks may end meanwhile
        return now[0] <= before[0] + descriptors and now[1] <= before[1] + threads

    before = used()
    empty = {rank: np.zeros(0, np.uint8) for rank in range(c.world_size)}
    c.exchange("nothing", empty, {rank: array.copy() for rank, array in empty.items()}, timeout=30)
    own = np.zeros(5, np.uint8)
    c.exchange("own", {c.rank: np.arange(5, dtype=np.uint8)}, {c.rank: own}, timeout=30)
    assert own.tolist() == [0, 1, 2, 3, 4]
    c.barrier("exchanged nothing", timeout=30)
    assert no_more_than(0, 0)
    if c.rank == 1:
        c.exchange("pair", {2: np.ones(3, np.uint8)}, {}, timeout=30)
    if c.rank == 2:
        c.exchange("pair", {}, {1: own[:3]}, timeout=30)
        assert own.tolist() == [1, 1, 1, 3, 4]
    c.barrier("exchanged in a pair", timeout=30)
    # Selector, wake-up pair, connection, and one listener.
    assert no_more_than(0, 0) if c.rank == 0 else no_more_than(5, 1)


def check_exchange(c: Collective, tag: str = "x") -> None:
    sizes = [[5 * MIB, 1, 0], [7, 3, 3 * MIB], [100_001, 0, 2]]
    incoming = {i: np.zeros(sizes[i][c.rank], np.uint8) for i in range(3)}
    outgoing = {j: np.full(sizes[c.rank][j], 10 * c.rank + j, np.uint8) for j in range(3)}
    outgoing[0].flags.writeable = False
    c.exchange(tag, outgoing, incoming, timeout=60)
    for i, array in incoming.items():
        assert (array == 10 * i + c.rank).all()


def check_refusal(c: Collective) -> None:
    """All ranks get the error of a rank 0 that cannot serve their world; then the same group works."""
    import torch.distributed as dist

    trio = dist.new_group([0, 1, 2])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if c.rank == 0:
        needed = len(os.listdir("/proc/self/fd")) + 10
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, limits[1]))
        refuse = mock.patch.object(resource, "setrlimit", side_effect=PermissionError)
    else:
        refuse = mock.patch.object(resource, "getrlimit")
    with refuse, pytest.raises(UsageError, match=r"rank 0 of a world of 3 needs .* run `ulimit -n"):
        current(trio)
    if c.rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    c.barrier("refused", timeout=30)  # a rank that is slow would hear rank 0's second try alone
    assert current(trio).all_gather("trio", b"x", timeout=30) == [b"x"] * 3
    current(trio).close()


def check_subgroup(c: Collective) -> None:
    import torch.distributed as dist

    # Rank 2 knows one group more than the others: names of groups would differ.
    dist.new_group([2], use_local_synchronization=True) if c.rank == 2 else None
    pair = dist.new_group([2, 1])
    if c.rank == 0:
        with pytest.raises(UsageError, match="rank 0 is not in"):
            current(pair)
    else:
        sub = current(pair)
        assert sub.world_size == 2 and sub.rank == dist.get_rank(pair) and sub.world_id != c.world_id
        assert sub.all_gather("sub", str(c.rank).encode(), timeout=30) == [
            str(r).encode() for r in dist.get_process_group_ranks(pair)
        ]
        assert current(pair) is sub is not current()
    alone = dist.new_group([0])
    if c.rank == 0:
        assert isinstance(current(alone), SingleProcess)
    c.barrier("subgroup", timeout=30)


def check_fork(c: Collective) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for attempt in (
                current,
                lambda: c.send(0, "fork", b""),
                lambda: c.recv(0, "fork", timeout=60),
                lambda: c.exchange("fork", {}, {}, timeout=60),
            ):
                with pytest.raises(UsageError, match="forked child"):
                    attempt()
            assert SingleProcess().all_gather("t", b"", timeout=1) == [b""]
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    c.barrier("fork", timeout=30)


def faults() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    c = current()
    pids = [int(pid) for pid in c.all_gather("pids", str(os.getpid()).encode(), timeout=30)]
    # Connections of which the forked child below inherits one end.
    others = [r for r in range(3) if r != c.rank]
    c.exchange("all", {r: np.ones(5, np.uint8) for r in others}, {r: np.zeros(5, np.uint8) for r in others}, timeout=30)
    if c.rank == 2:
        time.sleep(600)
    # A child that outlives its parent must not keep the parent's connections alive.
    if c.rank == 0 and os.fork() == 0:
        os.close(1), os.close(2)
        time.sleep(40)
        os._exit(0)
    if c.rank == 0:
        # Hung rank: a time-out that names it. Killed rank: noticed at once, though the time-out is long.
        os.kill(pids[2], signal.SIGSTOP)
        c.send(1, "step", b"")
        with pytest.raises(CheckpointTimeoutError, match=r"'hung'.*rank 2 "):
            c.collect((1, 2), "hung", timeout=1)
        c.send(2, "to a hung rank", b"x" * (64 * MIB))  # returns
        with pytest.raises(CheckpointTimeoutError, match="from rank 2 within 1 s"):
            c.exchange("hung", {}, {2: np.zeros(9, np.uint8)}, timeout=1)
        # An exchange that failed is no obstacle to others.
        c.exchange("later", {1: np.full(9, 7, np.uint8)}, {}, timeout=30)
        threading.Timer(0.5, os.kill, (pids[2], signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(PeerLostError, match="lost rank 2"):
            c.gather("killed", b"", timeout=60)
        with pytest.raises(PeerLostError, match="lost rank 2"):
            c.exchange("with a dead rank", {2: np.zeros(9, np.uint8)}, {}, timeout=60)
        assert time.monotonic() - started < 30
        c.send(2, "to a dead rank", b"x")
        c.send(1, "step", b"")
        time.sleep(600)
    c.recv(0, "step", timeout=30)
    c.send(0, "hung", b"")
    later = np.zeros(9, np.uint8)
    c.exchange("later", {}, {0: later}, timeout=30)
    assert (later == 7).all()
    with pytest.raises(PeerLostError, match="lost rank 2"):
        c.recv(2, "from the dead", timeout=60)
    c.recv(0, "step", timeout=30)
    # Rank 0 hangs: nothing that we do hangs with it.
    os.kill(pids[0], signal.SIGSTOP)
    started = time.monotonic()
    c.send(0, "to a hung rank", b"x" * (64 * MIB))
    with pytest.raises(CheckpointTimeoutError, match="rank 0 "):
        c.recv(0, "from a hung rank", timeout=1)
    assert time.monotonic() - started < 30
    # Rank 0 dies: everyone who waits learns of it.
    threading.Timer(0.5, os.kill, (pids[0], signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="lost rank 0"):
        c.exchange("from the dead", {}, {0: np.zeros(9, np.uint8)}, timeout=60)
    with pytest.raises(PeerLostError, match="rank 0 was killed"):
        c.recv(0, "from the dead", timeout=60)
    assert time.monotonic() - started < 30
    with pytest.raises(PeerLostError, match="rank 0 was killed"):
        c.send(0, "to the dead", b"")
    with pytest.raises(PeerLostError, match="rank 0 was killed"):
        c.exchange("with the dead", {0: np.zeros(9, np.uint8)}, {}, timeout=60)


def main() -> None:
    """Fork the ranks, which end as any program does; print their exit statuses."""
    import torch.distributed  # noqa: F401  once for all ranks

    gc.freeze()  # else the end of each rank visits all of torch
    ranks = []
    for rank in range(3):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.environ["RANK"] = str(rank)
            faulthandler.dump_traceback_later(100, exit=True)
            {"everything": everything, "faults": faults}[sys.argv[1]]()
            return
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]))


if __name__ == "__main__":
    main()
