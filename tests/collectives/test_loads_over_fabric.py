"""A load by ranks of several machines over a process group of its own: here one of gloo, with tensors of the host."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.engine import fabric
from bytecheckpoint.engine.exchange_chunks import ChunkMover
from bytecheckpoint.engine.fabric import Fabric, Transfers
from bytecheckpoint.storage.testing.fault_rule import FaultRule
from bytecheckpoint.tuning import tuned
from tests.support.layouts import bits, coded
from tests.support.memory import as_on_disk
from tests.support.processes import wait_until
from tests.support.settings import using
from tests.support.variants import crossed
from tests.support.warned import warned
from tests.support.worlds import Worlds, on_ranks

MIB = 1 << 20
SHAPE = (1801, 1999)  # 13.7 MiB, not divisible by any number of ranks
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "replicated": ((4,), [Replicate()]),
    "columns": ((4,), [Shard(1)]),
    "rows twice": ((2, 2), [Replicate(), Shard(0)]),
    "columns twice": ((2, 2), [Shard(1), Replicate()]),
}
HOSTS = {"two": "AABB", "uneven": "ABBB", "four": "ABCD", "mixed": "ABAB"}


@contextlib.contextmanager
def pretended(hosts: str) -> Iterator[None]:
    """Let each rank count as one of the machine that its letter names; exchange, and stage little at a time."""
    collective = current()
    before = collective.host
    collective.host = hosts[collective.rank]
    try:
        with tuned(min_exchange_bytes=0, fabric_bytes=3 * MIB), using(chunk_bytes=MIB, timeout=60):
            yield
    finally:
        collective.host = before


@contextlib.contextmanager
def counted(group: dist.ProcessGroup | None = None) -> Iterator[list[int]]:
    """Collect the sizes of what this rank receives over a fabric, and refuse arrays over sockets."""
    found: list[int] = []
    transfer, collective = Fabric._transfer, current(group)

    def count(self: Fabric, transfers: Transfers) -> None:
        transfer(self, transfers)
        found.extend(data.numel() for _, _, data in transfers.receives)

    def refuse(tag: str, outgoing: object, incoming: object, *, timeout: float) -> None:
        assert not outgoing and not incoming, f"{tag} goes over sockets"

    Fabric._transfer = count  # type: ignore[method-assign]
    collective.exchange = refuse  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        Fabric._transfer = transfer  # type: ignore[method-assign]
        del collective.exchange  # type: ignore[method-assign]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize(("layout", "hosts"), crossed(list(LAYOUTS), list(HOSTS)))
@on_ranks(4)
def test_the_bytes_are_those_that_sockets_bring(path: str, layout: str, hosts: str) -> None:
    full = coded(SHAPE, torch.float32)
    bytecheckpoint.save(path, {"model": {"w": full, "b": coded((77,), torch.int64)}})
    mesh, placements = init_device_mesh("cpu", LAYOUTS[layout][0]), LAYOUTS[layout][1]
    with pretended(HOSTS[hosts]):
        found = {}
        for mode in ("off", "on"):
            states = {
                "w": distribute_tensor(torch.zeros(SHAPE), mesh, placements),
                "b": torch.zeros(77, dtype=torch.int64),
            }
            with using(fabric=mode), counted() if mode == "on" else contextlib.nullcontext([]) as sizes:
                report = bytecheckpoint.load(as_on_disk(path), {"model": states})
            found[mode] = [bits(local(tensor)) for tensor in states.values()], report
    assert all(map(torch.equal, found["on"][0], found["off"][0]))
    assert torch.equal(found["on"][0][0], bits(local(distribute_tensor(full, mesh, placements))))
    assert max(sizes, default=0) <= MIB
    assert sum(sizes) <= found["on"][1].bytes_received
    assert found["on"][1].bytes_read == found["off"][1].bytes_read
    totals: list[Any] = [None] * 4
    dist.all_gather_object(totals, (sum(sizes), found["off"][1].bytes_read))
    over_fabric, read = (sum(column) for column in zip(*totals, strict=True))
    assert over_fabric > MIB, "bytes went over the fabric"
    assert full.nbytes <= read < 1.1 * full.nbytes, "the storage is read once"


# --- ranks that differ, and failures -----------------------------------------------------------------------------


def load(path: str, hosts: str, **settings: Any) -> list[str]:
    """Load replicas as a rank of some machine; return the warnings. The default group works afterwards."""
    filled = torch.zeros(SHAPE)
    with pretended(hosts), using(fabric="on"), using(**settings), warned() as found:
        bytecheckpoint.load(as_on_disk(path), {"model": {"w": filled}})
    assert torch.equal(filled, coded(SHAPE, torch.float32))
    ended = wait_until(lambda: not any("fabric" in thread.name for thread in threading.enumerate()), 20)
    assert ended, "the group's thread has ended"
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return found


def save(path: str) -> None:
    bytecheckpoint.save(path, {"model": {"w": coded(SHAPE, torch.float32)}})


@pytest.mark.parametrize("mode", ["off", "auto"])
@on_ranks(3)
def test_sockets_where_one_rank_has_another_setting(path: str, mode: str) -> None:
    save(path)
    rank = dist.get_rank()
    found = load(path, "ABC", fabric=mode if rank == 1 else "on")
    assert len(found) == (rank == 0), found
    assert rank or "not over the fabric: rank 1: " in found[0]


@on_ranks(3)
def test_sockets_without_a_word_where_nobody_asks(path: str) -> None:
    save(path)
    with tuned(min_fabric_bytes=0):
        assert not load(path, "ABC", fabric="auto"), "gloo is slower than sockets"


@on_ranks(3)
def test_sockets_where_the_group_does_not_start(path: str) -> None:
    save(path)
    rank, build = dist.get_rank(), fabric._BUILDERS["gloo"]

    def broken(*args: Any) -> Any:
        raise RuntimeError("no such interface")

    fabric._BUILDERS["gloo"] = broken if rank == 2 else build
    try:
        with tuned(fabric_start=3.0):
            found = load(path, "ABC")
    finally:
        fabric._BUILDERS["gloo"] = build
    assert len(found) == (rank == 0), found
    with counted() as sizes:
        assert not load(path, "ABC")
    assert sizes, "the next load uses the fabric"


@on_ranks(3)
def test_the_ranks_of_a_group(path: str) -> None:
    """The others are at something else, and the ranks have other numbers in the group."""
    save(path)
    group = dist.new_group([1, 2])
    if dist.get_rank():
        current(group).host = str(dist.get_rank())
        filled = torch.zeros(SHAPE)
        with using(fabric="on"), counted(group) as sizes:
            bytecheckpoint.load(as_on_disk(path), {"model": {"w": filled}}, process_group=group)
        assert sizes
        assert torch.equal(filled, coded(SHAPE, torch.float32))


#: What a rank calls: when the group starts, in the middle of the transfers, between two of them.
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "start": (fabric.dist, "ProcessGroupGloo", 0),
    "transfer": (Fabric, "_transfer", 3),
    "delivery": (ChunkMover, "deliver", 3),
}


@contextlib.contextmanager
def fail_in(moment: str, action: Callable[[], None], rank: int) -> Iterator[None]:
    """Let a rank do something else at a moment."""
    owner, name, skip = MOMENTS[moment]
    original, rule = getattr(owner, name), FaultRule(lambda caller: caller == rank, skip=skip)

    def faulty(*args: Any) -> Any:
        if rule.hit(dist.get_rank()):
            action()
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, faulty)
        yield


def break_down() -> None:
    raise RuntimeError("the cable is broken")


@pytest.mark.parametrize(("moment", "rank"), [("transfer", 0), ("transfer", 2), ("delivery", 1)])
@on_ranks(3)
def test_a_failure_of_one_rank_fails_the_load_everywhere(path: str, moment: str, rank: int) -> None:
    save(path)
    with fail_in(moment, break_down, rank), pytest.raises(Exception, match="the cable is broken") as raised:
        load(path, "ABC")
    if moment == "transfer":
        assert f"rank {rank}: an exchange over gloo cpu failed" in str(raised.value)
        assert "fabric='off' loads" in str(raised.value)
    with counted() as sizes:
        assert not load(path, "ABC")
    assert sizes


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_hung() -> None:
    time.sleep(60)


def load_with_a_fault(
    path: str, moment: str, action: Callable[[], None], rank: int, timeout: float
) -> tuple[str, str, float]:
    """Return the error of a load in which a rank does something else, and the seconds until then."""
    save(path)
    begun = time.monotonic()
    with fail_in(moment, action, rank), pytest.raises(bytecheckpoint.CheckpointError) as raised:
        load(path, "ABCA", timeout=timeout)
    return type(raised.value).__name__, str(raised.value), time.monotonic() - begun


@pytest.mark.parametrize(
    ("moment", "action", "lost", "timeout"),
    [("transfer", be_killed, 0, 60.0), ("start", be_killed, 2, 60.0), ("transfer", be_hung, 2, 4.0)],
    ids=["killed", "killed at the start", "hung"],
)
def test_a_rank_that_is_gone_is_named(
    worlds: Worlds, tmp_path: Path, moment: str, action: Callable[[], None], lost: int, timeout: float
) -> None:
    world = worlds.fresh(4)
    path = str(tmp_path / "step")
    found = world.start(load_with_a_fault, path, moment, action, lost, timeout).outcomes(80, grace=50)
    world.kill()
    for rank in {0, 1, 2, 3} - {lost}:
        ok, got = found[rank]
        assert ok, got
        name, message, seconds = got
        if action is be_killed:
            assert name == "PeerLostError" and f"lost rank {lost}" in message, message
            assert seconds < 30
        else:
            assert name == "CheckpointTimeoutError" and seconds < 45, message
    assert worlds.run(4, load, path, "ABCA") == [[]] * 4, "another world loads"
