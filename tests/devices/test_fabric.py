"""Loads over the fabric onto the pretend device, whose work runs late. A group of gloo stands in for one of NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.collectives import current
from bytecheckpoint.engine import fabric
from bytecheckpoint.tuning import tuned
from tests.support import pretend_device as pretend
from tests.support.layouts import coded
from tests.support.memory import as_on_disk
from tests.support.settings import using
from tests.support.variants import crossed
from tests.support.warned import warned
from tests.support.worlds import on_ranks

pytestmark = [
    pytest.mark.timeout(600),  # the first run compiles
    pytest.mark.skipif(pretend.compiler() is None, reason="NOT TESTED HERE: the pretend device needs a C++ compiler"),
]
MIB = 1 << 20
SHAPE = (2001, 777)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if pretend.compiler() is not None:
        pretend.build()


class DeviceGroup:
    """Carries tensors of a device as NCCL does: operations of a batch begin together, and streams wait for them.

    Attributes:
        received: bytes that have arrived on the device.
    """

    supports_coalescing = True
    received = 0

    def __init__(self, store: Any, rank: int, size: int, timeout: float, device: torch.device) -> None:
        assert torch.accelerator.current_device_index() == device.index, "NCCL uses the current device"
        self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        self._device = device
        self._batch: list[tuple[Any, torch.Tensor, int, int]] | None = None

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        found = tensors[0].cpu()
        self._group.allreduce([found]).wait()
        tensors[0].copy_(found)
        return Done()

    def _start_coalescing(self) -> None:
        assert self._batch is None
        self._batch = []

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        assert self._batch is not None
        self._batch.append((self._group.send, tensors[0], rank, tag))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        assert self._batch is not None
        self._batch.append((self._group.recv, tensors[0], rank, tag))

    def _end_coalescing(self) -> Any:
        batch, self._batch = self._batch, None
        assert batch
        assert all(tensor.device == self._device for _, tensor, _, _ in batch)
        # NCCL matches by order, not by tags.
        moved = [(call, tensor, tensor.cpu(), rank) for call, tensor, rank, _ in batch]
        for work in [call([host], rank, 0) for call, _, host, rank in moved]:
            work.wait()
        for call, tensor, host, _ in moved:
            if call == self._group.recv:
                tensor.copy_(host, non_blocking=True)
                DeviceGroup.received += host.nbytes
        torch.accelerator.current_stream().synchronize()
        return Done()

    def shutdown(self) -> None:
        self._group.shutdown()

    abort = shutdown


class Done:
    def wait(self) -> None: ...


@pytest.mark.parametrize(
    ("case", "hosts"), crossed(["replicas", "strided", "cast", "some on the host"], ["ABC", "AAB"])
)
@on_ranks(3)
def test_a_load_onto_a_device(path: str, hosts: str, case: str) -> None:
    pretend.load()
    rank = dist.get_rank()
    device = pretend.device(rank % 2)
    wanted = {name: coded(SHAPE, torch.float32, salt) for salt, name in enumerate("abcd")}
    bytecheckpoint.save(path, {"model": wanted})
    state = {name: torch.zeros_like(tensor).to(device) for name, tensor in wanted.items()}
    if case == "strided":
        state = {name: torch.zeros(SHAPE[::-1]).to(device).t() for name in wanted}
    elif case == "cast":
        state = {name: tensor.double() for name, tensor in state.items()}
    elif case == "some on the host":
        state["b"] = torch.zeros(SHAPE)
    collective, before = current(), DeviceGroup.received
    host, collective.host = collective.host, hosts[rank]
    torch.accelerator.set_device_index(device.index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fabric, "_backends_of", lambda collective: {"pretend": "nccl", "cpu": "gloo"})
        patch.setitem(fabric._BUILDERS, "nccl", DeviceGroup)
        try:
            with (
                tuned(min_exchange_bytes=0, min_fabric_bytes=0, fabric_bytes=3 * MIB),
                using(chunk_bytes=MIB, timeout=60),
                pretend.delays(kernel=5, to_host=5, to_device=5),
                warned() as warnings,
            ):
                report = bytecheckpoint.load(as_on_disk(path), {"model": state}, cast=case == "cast")
                with torch.Stream(device):  # which waits for no other
                    for name, tensor in state.items():
                        assert torch.equal(tensor.cpu().float(), wanted[name]), name
        finally:
            collective.host = host
            torch.accelerator.set_device_index(0)
    assert not warnings
    received = DeviceGroup.received - before
    if hosts == "ABC":
        assert received == report.bytes_received > 0, (received, report)
    else:
        assert (received > 0) or rank == 0
