"""The first call for a process group: within its own time limit, without a trace in the training's group."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint import CheckpointError, CheckpointTimeoutError, PeerLostError, UsageError
from bytecheckpoint.collectives import current
from bytecheckpoint.collectives.base import host_id
from bytecheckpoint.collectives.rendezvous import KEY
from tests.support.certificates import certificates
from tests.support.worlds import on_ranks


@on_ranks(3)
def test_a_rank_that_makes_no_call() -> None:
    rank = dist.get_rank()
    for absent in (2, 0):
        group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=90))
        begun = time.monotonic()
        if rank != absent:
            says = (
                r"ranks .(1, )?2. of 3 did not connect to port \d+ within [\d.]{1,4} s; every rank makes this call|"
                "not every rank connected|rank 0 has not published|rank 0 went away"
            )
            with pytest.raises((CheckpointTimeoutError, PeerLostError), match=says):
                current(group, timeout=2.0)
            assert time.monotonic() - begun < 60
        else:
            time.sleep(3.5)
        for _ in range(2):  # the training goes on
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total.item() == 3
        collective = current(group, timeout=60)
        collective.barrier("all here", timeout=30)
        assert current(group) is collective


@on_ranks(3)
@pytest.mark.parametrize("listening", [False, True])
def test_what_an_earlier_group_left_in_the_store(listening: bool) -> None:
    """Its rank 0 was killed, or its store cannot delete. Its port is free, or somebody else's by now."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=90))
    with socket.create_server(("127.0.0.1", 0)) as other:
        if rank == 0:
            told = {
                "world": "0" * 16,
                "version": bytecheckpoint.__version__,
                "tls": False,
                "secret": "00" * 32,
                "hosts": [],
                "host": host_id(),
                "tree": False,
                "nonce": "earlier",
            }
            told["port"] = other.getsockname()[1]
            group.get_group_store().set(KEY, json.dumps(told))  # type: ignore[attr-defined]
        if not listening:
            other.close()
        dist.barrier()
        if rank == 0:
            for _ in range(2 if listening else 0):
                other.accept()[0].close()
        current(group, timeout=60).barrier("all here", timeout=30)


@on_ranks(2)
def test_first_calls_for_two_groups_from_two_threads() -> None:
    """One rank connects the first group while the other one connects the second: neither waits for the other group."""
    rank, ranks = dist.get_rank(), [0, 1]
    first, second = (dist.new_group(ranks, timeout=timedelta(seconds=90)) for _ in range(2))
    begun = time.monotonic()
    delayed = threading.Event()

    def call(group: dist.ProcessGroup, *, late: bool) -> str:
        if late:
            delayed.wait(2)  # the other thread is within its call, and the other rank is within the other one
        current(group, timeout=60).barrier("all here", timeout=30)
        return current(group).world_id

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call, group, late=rank == number) for number, group in enumerate((first, second))]
        one, other = (call.result(60) for call in calls)
    assert one != other
    assert time.monotonic() - begun < 30


@on_ranks(4)
def test_first_calls_crosswise() -> None:
    """Groups that overlap in a ring, each rank in two of them, the threads in opposite order on neighbours."""
    rank = dist.get_rank()
    edges = [dist.new_group(sorted({n, (n + 1) % 4}), timeout=timedelta(seconds=90)) for n in range(4)]
    everyone = [dist.new_group(range(4), timeout=timedelta(seconds=90)) for _ in range(2)]
    mine = [edges[rank], edges[rank - 1]]
    begun = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        order = [*mine, *everyone] if rank % 2 else [*reversed(everyone), *reversed(mine)]
        calls = [pool.submit(lambda g=g: current(g, timeout=60).all_gather("ids", b"", timeout=30)) for g in order]
        assert sorted(len(call.result(60)) for call in calls) == [2, 2, 4, 4]
    assert time.monotonic() - begun < 30


WRONG = {
    "address": "rank 2, connect: setting listen_address is '192.0.2.1': not of this machine",
    "TLS": "rank 2 uses TLS, and rank 0 does not",
    "TLS on rank 0": r"rank [12] does not use TLS, and rank 0 does:",
    "authority": "rank 2, connect: ",
}


@on_ranks(3)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_rank_with_other_settings(wrong: str, tmp_path: Path) -> None:
    """No rank waits for one that cannot come: it says so through the store. The next attempt succeeds."""
    rank, odd = dist.get_rank(), 0 if wrong == "TLS on rank 0" else 2
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=90))
    plain = {"listen_address": "", "tls_certificate": "", "tls_key": "", "tls_authority": ""}
    if rank == odd or wrong == "authority":
        # Two folders have two authorities.
        tls = certificates(tmp_path / ("odd" if rank == odd else f"own {rank}")) if "address" not in wrong else {}
        if wrong == "authority" and rank != odd:
            shared = str(tmp_path / "shared")
            tls = certificates(Path(shared)) if rank == 0 else {name: f"{shared}/{name[4:]}" for name in tls}
        bytecheckpoint.configure(**(tls or {"listen_address": "192.0.2.1"}))  # type: ignore[arg-type]
    dist.barrier()  # the files are there
    begun = time.monotonic()
    try:
        with pytest.raises(CheckpointError) as raised:
            current(group, timeout=80.0)
        if rank == 0:
            assert re.search(WRONG[wrong], str(raised.value))
        elif rank != odd:
            assert f"rank {odd}" in str(raised.value) or wrong == "TLS on rank 0"
        assert time.monotonic() - begun < 60
    finally:
        bytecheckpoint.configure(**plain)  # type: ignore[arg-type]
    dist.barrier()  # a rank that still waits would join the next attempt of rank 0
    current(group, timeout=60).barrier("all here", timeout=30)


@on_ranks(3)
def test_a_rank_that_comes_after_the_others_have_failed() -> None:
    """It hears why, and does not wait for a rank 0 that has given up. The next attempt succeeds."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=90))
    try:
        bytecheckpoint.configure(listen_address="192.0.2.1" if rank == 2 else "")
        if rank == 1:
            dist.barrier()
        with pytest.raises(CheckpointError, match=r"192\.0\.2\.1"):
            current(group, timeout=80.0)
        if rank != 1:
            dist.barrier()
    finally:
        bytecheckpoint.configure(listen_address="")
    dist.barrier()
    current(group, timeout=60).barrier("all here", timeout=30)


@on_ranks(3)
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_of_another_version(odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank hears it, whatever the messages of that version look like."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=90))
    begun = time.monotonic()
    with monkeypatch.context() as patch:
        if dist.get_rank() == odd:
            patch.setattr("bytecheckpoint.collectives.store_collective.__version__", "9.9")
            patch.setattr("bytecheckpoint.collectives.transport.star.PLACES", None)
        with pytest.raises(UsageError, match=r"rank [12] runs bytecheckpoint .* and rank 0 .*: install one version"):
            current(group, timeout=80.0)
    assert time.monotonic() - begun < 60
    dist.barrier()
    current(group, timeout=60).barrier("all here", timeout=30)
