"""A load by ranks of several machines over a process group of its own: here one of gloo, with tensors of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.engine.fabric import Fabric, Transfers
from bytecheckpoint.tuning import tuned
from tests.support.layouts import bits, coded
from tests.support.memory import as_on_disk
from tests.support.settings import using
from tests.support.worlds import on_ranks

MIB = 1 << 20
SHAPE = (3001, 1999)  # 23 MiB, not divisible by any number of ranks
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
def counted() -> Iterator[list[int]]:
    """Collect the sizes of what this rank receives over a fabric, and refuse arrays over sockets."""
    found: list[int] = []
    transfer, collective = Fabric._transfer, current()

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


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("layout", LAYOUTS)
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
    total = [None] * 4
    dist.all_gather_object(total, sum(sizes))
    assert sum(total) > MIB, "bytes went over the fabric"  # type: ignore[arg-type]
