"""Loads whose bytes pass between pretended machines over NCCL, from device to device; tests/devices has a stand-in."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.engine.fabric import Fabric, Transfers
from bytecheckpoint.tuning import tuned
from tests.support.layouts import coded
from tests.support.memory import as_on_disk
from tests.support.warned import warned
from tests.support.worlds import Worlds, on_ranks

_COUNT = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        _COUNT < 2 or not dist.is_nccl_available(),
        reason=f"NOT TESTED HERE: needs NCCL and two devices, there are {_COUNT}",
    ),
]
SHAPE = (4000, 3001)


def load(path: str, group: dist.ProcessGroup, killed: int = -1) -> int:
    """Load replicas as one rank; return the bytes that came over NCCL."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    wanted = {str(salt): coded(SHAPE, torch.float32, salt) for salt in range(3)}
    bytecheckpoint.save(path, {"model": wanted}, process_group=group)
    state = {name: torch.zeros(SHAPE, device=device) for name in wanted}
    current(group).host = str(rank)
    received: list[int] = []
    transfer = Fabric._transfer

    def watched(self: Fabric, transfers: Transfers) -> None:
        if rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        assert all(data.device == device for _, _, data in [*transfers.sends, *transfers.receives])
        received.extend(data.numel() for _, _, data in transfers.receives)
        transfer(self, transfers)

    with pytest.MonkeyPatch.context() as patch, tuned(min_fabric_bytes=0, fabric_bytes=32 << 20), warned() as warnings:
        patch.setattr(Fabric, "_transfer", watched)
        bytecheckpoint.load(as_on_disk(path), {"model": state}, process_group=group, timeout=60)
    assert not warnings
    for name, tensor in state.items():
        assert torch.equal(tensor.cpu(), wanted[name]), name
    total = torch.ones(1, device=device)
    dist.all_reduce(total, group=group)
    assert total.item() == group.size(), "the training's group works"
    return sum(received)


def nccl_group() -> dist.ProcessGroup:
    torch.cuda.set_device(dist.get_rank())
    return dist.new_group(backend="nccl")


@on_ranks(min(_COUNT, 4))
def test_bytes_pass_over_nccl(path: str) -> None:
    group = nccl_group()
    assert load(path, group) > 0
    assert load(path, group) > 0, "again, over a new group"


def load_with_a_lost_rank(path: str) -> str:
    with pytest.raises(bytecheckpoint.PeerLostError) as raised:
        load(path, nccl_group(), killed=1)
    return str(raised.value)


def test_a_lost_rank_is_named(worlds: Worlds, tmp_path: Path) -> None:
    """NCCL's watchdog would end the process."""
    world = worlds.fresh(2)
    (ok, message), _ = world.start(load_with_a_lost_rank, str(tmp_path / "step")).outcomes(100, grace=80)
    world.kill()
    assert ok and "lost rank 1" in message, message
