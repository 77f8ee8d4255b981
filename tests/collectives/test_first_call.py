"""The first call for a process group: within its own time limit, without a trace in the training's group."""

from __future__ import annotations

import json
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from bytecheckpoint import CheckpointTimeoutError, PeerLostError
from bytecheckpoint.collectives import current
from bytecheckpoint.collectives.base import host_id
from bytecheckpoint.collectives.process_group import _KEY
from tests.support.worlds import on_ranks


@on_ranks(3)
def test_a_rank_that_makes_no_call() -> None:
    rank = dist.get_rank()
    for absent in (2, 0):
        group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=90))
        begun = time.monotonic()
        if rank != absent:
            says = "ranks .2. of 3 did not connect|not every rank connected|rank 0 has not told|rank 0 went away"
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
                "secret": "00" * 32,
                "hosts": [],
                "host": host_id(),
                "tree": False,
                "nonce": "earlier",
            }
            told["port"] = other.getsockname()[1]
            group.get_group_store().set(_KEY, json.dumps(told))  # type: ignore[attr-defined]
        if not listening:
            other.close()
        dist.barrier()
        if rank == 0:
            for _ in range(2 if listening else 0):
                other.accept()[0].close()
        current(group, timeout=60).barrier("all here", timeout=30)
