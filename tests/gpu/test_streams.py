"""Streams, several devices, graphs and device groups, on real devices. `tests/devices` has the same on a pretend one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from tests.support.layouts import coded
from tests.support.modes import MODES
from tests.support.worlds import on_ranks

pytestmark = pytest.mark.gpu

_COUNT = torch.accelerator.device_count()
_TWO_DEVICES = pytest.mark.skipif(_COUNT < 2, reason=f"NOT TESTED HERE: needs two devices, there are {_COUNT}")
_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED HERE: needs CUDA or ROCm")
_ACCELERATOR = torch.accelerator.current_accelerator()
_DEVICE_GROUP = pytest.mark.skipif(
    _ACCELERATOR is None or _ACCELERATOR.type not in dist.Backend.default_device_backend_map,
    reason="NOT TESTED HERE: torch.distributed has no backend for this device",
)
_ELEMENTS = 16 << 20


def device(index: int = 0) -> torch.device:
    assert _ACCELERATOR is not None
    return torch.device(_ACCELERATOR.type, index)


def be_busy(index: int = 0) -> None:
    """Keep the current stream of a device busy for some tenths of a second."""
    a = torch.ones(4096, 4096, device=device(index))
    for _ in range(200 if torch.cuda.is_available() else 1):
        torch.mm(a, a)


def module_of(tensor: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("w", tensor)
    return module


def stored(path: str) -> torch.Tensor:
    with bytecheckpoint.open(path) as checkpoint:
        return checkpoint["model/w"][...]


@pytest.mark.parametrize("mode", MODES)
def test_a_save_waits_for_the_callers_stream(path: str, mode: str) -> None:
    wanted = coded((_ELEMENTS,), torch.float32)
    source = wanted.to(device())
    tensor = torch.zeros_like(source)
    torch.accelerator.synchronize()
    with torch.Stream(device()) as stream:
        be_busy()
        tensor.copy_(source)
        handle = bytecheckpoint.save(path, {"model": module_of(tensor)}, **MODES[mode])
        handle.staged.result(60)
        tensor.zero_()
        handle.result(60)
    stream.synchronize()
    assert torch.equal(stored(path), wanted)


def test_a_load_waits_for_the_callers_stream(path: str) -> None:
    wanted = coded((_ELEMENTS,), torch.float32)
    bytecheckpoint.save(path, {"model": module_of(wanted)})
    tensor = torch.ones(_ELEMENTS, device=device())
    torch.accelerator.synchronize()
    with torch.Stream(device()):
        be_busy()
        tensor.zero_()
        bytecheckpoint.load(path, {"model": module_of(tensor)})
        assert torch.equal(tensor.cpu(), wanted)


@_TWO_DEVICES
@pytest.mark.parametrize("mode", MODES)
def test_two_devices_in_one_process(path: str, mode: str) -> None:
    wanted = [coded((_ELEMENTS,), torch.float32, salt) for salt in range(2)]
    sources = [tensor.to(device(i)) for i, tensor in enumerate(wanted)]
    state = {str(i): torch.zeros_like(tensor) for i, tensor in enumerate(sources)}
    for i, tensor in enumerate(sources):
        be_busy(i)
        state[str(i)].copy_(tensor)
    bytecheckpoint.save(path, {"model": state}, **MODES[mode]).result(60)
    for i, tensor in enumerate(state.values()):
        be_busy(i)
        tensor.zero_()
    bytecheckpoint.load(path, {"model": state})
    assert all(torch.equal(tensor.cpu(), wanted[i]) for i, tensor in enumerate(state.values()))


@_CUDA
@_TWO_DEVICES
@pytest.mark.parametrize("mode", MODES)
@on_ranks(1)
def test_a_rank_of_the_second_device_leaves_the_first_alone(path: str, mode: str) -> None:
    """In a process of its own: this one has a context on the first device."""
    torch.cuda.set_device(1)
    tensor = coded((_ELEMENTS,), torch.float32).to(device(1))
    bytecheckpoint.save(path, {"model": module_of(tensor)}, **MODES[mode]).result(60)
    bytecheckpoint.load(path, {"model": module_of(tensor)})
    assert not torch._C._cuda_hasPrimaryContext(0)


@_CUDA
@pytest.mark.parametrize("mode", ["async", "background"])
def test_a_graph_is_captured_beside_a_save(path: str, mode: str) -> None:
    """Nothing that the save does in the background breaks the capture, or is broken by it."""
    wanted = coded((_ELEMENTS,), torch.float32)
    tensor, other = wanted.to(device()), torch.ones(1000, device=device())
    bytecheckpoint.save(path, {"model": module_of(tensor)})  # the pool is ready then
    handle = bytecheckpoint.save(path, {"model": module_of(tensor)}, **MODES[mode])
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            other.mul_(2)
    graph.replay()
    handle.result(60)
    assert torch.equal(other.cpu(), torch.full((1000,), 2.0))
    assert torch.equal(stored(path), wanted)


@_CUDA
def test_a_save_during_a_capture_is_refused(path: str) -> None:
    tensor = torch.ones(1000, device=device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(bytecheckpoint.UsageError, match="captured"):
        bytecheckpoint.save(path, {"model": module_of(tensor)})
    bytecheckpoint.save(path, {"model": module_of(tensor)})


@_CUDA
def test_the_pool_is_page_locked(path: str) -> None:
    from bytecheckpoint.collectives import current
    from bytecheckpoint.world import world_of

    tensor = torch.ones(_ELEMENTS, device=device())
    thread = threading.Thread(target=lambda: bytecheckpoint.prepare({"model": module_of(tensor)}).result(60))
    thread.start()
    thread.join()
    bytecheckpoint.save(path, {"model": module_of(tensor)}, async_checkpoint=True).result(60)
    assert world_of(current()).resources.pools.shared.tensor().is_pinned()


@_DEVICE_GROUP
def test_one_rank_with_a_device_group(tmp_path: Path) -> None:
    """A group without a CPU backend, such as NCCL's, sends rank 0's address over the device."""
    backend = dist.get_default_backend_for_device(device().type)
    torch.accelerator.set_device_index(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device())
    try:
        check_group(str(tmp_path / "s"), 0)
    finally:
        dist.destroy_process_group()


@_DEVICE_GROUP
@_TWO_DEVICES
@on_ranks(2)
def test_two_ranks_with_a_device_group(path: str) -> None:
    rank = dist.get_rank()
    torch.accelerator.set_device_index(rank)
    group = dist.new_group(backend=dist.get_default_backend_for_device(device().type))
    check_group(path, rank, group)


def check_group(path: str, rank: int, group: dist.ProcessGroup | None = None) -> None:
    wanted = coded((_ELEMENTS,), torch.float32)
    tensor = wanted.to(device(rank))
    bytecheckpoint.save(path, {"model": module_of(tensor)}, process_group=group)
    tensor.zero_()
    bytecheckpoint.load(path, {"model": module_of(tensor)}, process_group=group)
    assert torch.equal(tensor.cpu(), wanted)
