"""Saves and loads of tensors on a device whose work runs late: a wait that is missing shows as wrong bytes.

The ranks of `tests/support/worlds.py` load the pretend device; this process never does.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint.engine import device_copies, pinning
from bytecheckpoint.engine.device_copies import DeviceCopies
from bytecheckpoint.engine.pinning import host_buffer, lock_pages, unlock_pages
from bytecheckpoint.tuning import tuned
from tests.support import pretend_device as pretend
from tests.support.layouts import Declared, bits, coded
from tests.support.modes import MODES
from tests.support.settings import undisturbed, using
from tests.support.variants import crossed
from tests.support.warned import warned
from tests.support.worlds import on_ranks

pytestmark = [
    pytest.mark.timeout(600),  # the first run compiles
    pytest.mark.skipif(pretend.compiler() is None, reason="NOT TESTED HERE: the pretend device needs a C++ compiler"),
]

_LATE = 40  # milliseconds, for each of several copies
KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16)
_BUSY = 500  # milliseconds: longer than a save takes until it copies, once its modules are imported
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "matrix": ((600, 1111), torch.float32),
    "sixteen_bits": ((70, 99), torch.bfloat16),
    "integers": ((7,), torch.int64),
    "single": ((), torch.float64),
}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if pretend.compiler() is not None:
        pretend.build()


def expected(salt: int = 0) -> dict[str, torch.Tensor]:
    return {name: coded(shape, dtype, salt) for name, (shape, dtype) in SHAPES.items()}


def on_device(tensors: dict[str, torch.Tensor], index: int = 0) -> dict[str, torch.Tensor]:
    """Return copies on a device, one of them not contiguous there."""
    found = {name: tensor.to(pretend.device(index)) for name, tensor in tensors.items()}
    found["matrix"] = found["matrix"].t().contiguous().t()
    return found


def zeros_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    torch.accelerator.synchronize(pretend.device(next(iter(found.values())).device.index))
    return found


def module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return a module that shares these tensors: what ranks hold alike in a module is saved once."""
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def be_busy(index: int = 0) -> None:
    """Keep the current stream busy: what is queued next runs late."""
    with pretend.delays(kernel=_BUSY):
        torch.zeros(1, device=pretend.device(index))


def save(path: str, states: dict[str, Any], mode: str, **arguments: Any) -> bytecheckpoint.SaveHandle:
    """Save, and return when the caller may change the state."""
    handle = bytecheckpoint.save(path, states, **MODES[mode], **arguments)
    handle.staged.result(60)
    return handle


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(bits(found[name].cpu()), bits(tensor)), name


def assert_stored(path: str, wanted: dict[str, torch.Tensor], state: str = "model") -> None:
    with bytecheckpoint.open(path) as checkpoint:
        assert_equal({name: checkpoint[f"{state}/{name}"][...] for name in wanted}, wanted)


# A pool for the whole state, or one that chunks pass through.
@pytest.mark.parametrize(("mode", "staging_bytes", "stream"), crossed(list(MODES), [0, 2 << 20], ["default", "own"]))
@on_ranks(1)
def test_a_save_waits_for_what_the_caller_had_queued(path: str, mode: str, staging_bytes: int, stream: str) -> None:
    pretend.load()
    wanted = expected()
    source = on_device(wanted)
    state = zeros_like(source)
    with (
        using(staging_bytes=staging_bytes, chunk_bytes=1 << 20),
        pretend.on_own_stream() if stream == "own" else nullcontext(),
    ):
        be_busy()
        torch._foreach_copy_(list(state.values()), list(source.values()))
        save(path, {"model": module_of(state), "extra_states": state}, mode).result(60)
    assert_stored(path, wanted)
    assert_stored(path, wanted, state="extra_states")


@pytest.mark.parametrize(("mode", "staging_bytes"), crossed(list(MODES), [2 << 20, 0]))
@on_ranks(1)
def test_a_save_waits_for_its_copies(path: str, mode: str, staging_bytes: int) -> None:
    pretend.load()
    wanted = expected()
    state = on_device(wanted)
    with using(staging_bytes=staging_bytes, chunk_bytes=1 << 20), pretend.delays(to_host=_LATE):
        handle = save(path, {"model": module_of(state)}, mode)
        for tensor in state.values():
            tensor.zero_()
        handle.result(60)
    assert_stored(path, wanted)


@pytest.mark.parametrize(("mode", "full"), crossed(list(MODES), [False, True]))
@on_ranks(1)
def test_small_tensors_are_joined_and_large_ones_are_cut(path: str, mode: str, full: bool) -> None:
    """If the device has memory for that."""
    cat = torch.cat

    def allocating(tensors: Any, **options: Any) -> torch.Tensor:
        if full and len(tensors) > 1 and all(tensor.dim() == 1 for tensor in tensors) and not tensors[0].is_cpu:
            raise torch.OutOfMemoryError
        return cat(tensors, **options)

    pretend.load()
    wanted = {
        f"{size} {dtype}".replace(".", "_"): coded((size,), dtype, size)
        for dtype in KINDS
        for size in (0, 1, 3, 50, 300, 5000, 9001)
    }
    state = {name: tensor.to(pretend.device()) for name, tensor in wanted.items()}
    state["strided"] = coded((90, 60), torch.float32).to(pretend.device()).t()
    wanted["strided"] = coded((90, 60), torch.float32).t()
    with (
        patch.multiple(device_copies, _QUEUED_BYTES=8000, _SMALL_BYTES=2000, _JOINED_BYTES=3000),
        patch.object(torch, "cat", side_effect=allocating) as joined,
        pretend.delays(to_host=1),
    ):
        handle = save(path, {"model": module_of(state)}, mode)
        for tensor in state.values():
            tensor.zero_()
        handle.result(60)
    assert_stored(path, wanted)
    assert mode == "sync" or joined.call_count > 3


@pytest.mark.parametrize("few", [True, False])
@on_ranks(1)
def test_copies_of_the_training_come_between(few: bool) -> None:
    pretend.load()
    sources = [torch.ones(3000, device=pretend.device()) for _ in range(8)]
    targets = list(torch.zeros(8, 3000))
    copies = DeviceCopies([pretend.device()], to_host=True)
    with (
        pretend.delays(to_host=_LATE),
        patch.multiple(device_copies, _QUEUED_BYTES=24_000, _SMALL_BYTES=0),
        copies.queued(),
    ):
        device_copies.copy_to_host(targets, sources, few=few)
        done = sum(bool(target.all()) for target in targets)
    assert done >= 6 if few else done < 4
    assert all(target.all() for target in targets)


@on_ranks(1)
def test_a_save_keeps_tensors_that_the_caller_drops(path: str) -> None:
    pretend.load()
    wanted = expected()
    state = on_device(wanted)
    with pretend.delays(to_host=_LATE):
        handle = bytecheckpoint.save(path, {"model": module_of(state)}, async_checkpoint=True, staging="background")
        del state
        handle.result(60)
    assert_stored(path, wanted)


@pytest.mark.parametrize("stream", ["default", "own"])
@on_ranks(1)
def test_a_load_waits_for_what_the_caller_had_queued(path: str, stream: str) -> None:
    pretend.load()
    wanted = expected()
    bytecheckpoint.save(path, {"model": wanted})
    state = on_device(expected(salt=1))
    with pretend.on_own_stream() if stream == "own" else nullcontext():
        be_busy()
        for tensor in state.values():
            tensor.zero_()
        bytecheckpoint.load(path, {"model": module_of(state)})
        assert_equal(state, wanted)


@pytest.mark.parametrize("cast", [False, True])
@on_ranks(1)
def test_a_load_waits_for_its_copies(path: str, cast: bool) -> None:
    pretend.load()
    wanted = expected()
    bytecheckpoint.save(path, {"model": wanted})
    state = on_device(expected(salt=1))
    if cast:
        state["matrix"] = torch.zeros_like(state["matrix"], dtype=torch.float64)
        wanted["matrix"] = wanted["matrix"].double()
    with using(chunk_bytes=1 << 20), pretend.delays(to_device=_LATE):
        bytecheckpoint.load(path, {"model": module_of(state)}, cast=cast)
        with torch.Stream(pretend.device()):  # which waits for no other
            assert_equal(state, wanted)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(1)
def test_many_pieces_in_one_memory(path: str, mode: str) -> None:
    pretend.load()
    shape, count = (300, 5), 300
    whole = coded(shape, torch.bfloat16)
    table = np.stack([np.arange(count) * 5, np.arange(count)[::-1] * 5, np.full(count, 5)], axis=1)
    memory = torch.zeros(5 * count, dtype=whole.dtype, device=pretend.device())
    source = whole.flip(0).flatten().to(pretend.device())
    be_busy()
    memory.copy_(source)
    with using(writer="thread"):
        save(path, {"model": {"w": Declared((shape, table, memory))}}, mode).result(60)
    assert_stored(path, {"w": whole})
    memory.zero_()
    bytecheckpoint.load(path, {"model": {"w": Declared((shape, table, memory))}})
    assert torch.equal(bits(memory.cpu()), bits(source.cpu()))


@pytest.mark.parametrize("mode", MODES)
@on_ranks(1)
def test_both_devices(path: str, mode: str) -> None:
    pretend.load()
    wanted = expected()
    source = {name: tensor.to(pretend.device(i % 2)) for i, (name, tensor) in enumerate(wanted.items())}
    state = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    state["host"] = wanted["host"] = coded((300, 700), torch.float32, salt=2)
    for index in range(2):
        be_busy(index)
    for name, tensor in source.items():
        state[name].copy_(tensor)
    save(path, {"model": module_of(state)}, mode).result(60)
    assert_stored(path, wanted)
    for index in range(2):
        be_busy(index)
    for tensor in state.values():
        tensor.zero_()
    bytecheckpoint.load(path, {"model": module_of(state)})
    assert_equal(state, wanted)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(1)
def test_the_other_device_is_left_alone(path: str, mode: str) -> None:
    """A rank of a job uses one device, which need not be the first; a context on another takes memory there."""
    pretend.load()
    wanted = expected()
    state = on_device(wanted, index=1)
    torch.accelerator.set_device_index(1)
    synchronizations = pretend.device_synchronizations()
    try:
        with pretend.contexts() as found:
            save(path, {"model": module_of(state)}, mode).result(60)
            bytecheckpoint.load(path, {"model": module_of(state)})
        assert found == {1}
        assert torch.accelerator.current_device_index() == 1
    finally:
        torch.accelerator.set_device_index(0)
    assert pretend.device_synchronizations() == synchronizations, "a device-wide wait stops the caller's computations"
    assert_equal(state, wanted)


@on_ranks(2)
def test_ranks_exchange_what_both_want(path: str) -> None:
    pretend.load()
    rank = torch.distributed.get_rank()
    wanted = expected()
    state = on_device(wanted, index=rank)
    with pretend.delays(to_host=5, to_device=5), using(chunk_bytes=1 << 20), tuned(min_exchange_bytes=0):
        save(path, {"model": module_of(state)}, "background").result(60)
        be_busy(rank)
        for tensor in state.values():
            tensor.zero_()
        report = bytecheckpoint.load(path, {"model": module_of(state)})
        assert_equal(state, wanted)
    assert 0 < report.bytes_received < sum(t.nbytes for t in wanted.values())


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_replicas_are_compared_by_what_the_caller_had_queued(path: str, mode: str) -> None:
    pretend.load()
    rank = torch.distributed.get_rank()
    source = on_device(expected())
    state = on_device(expected(salt=1 + rank))
    with pretend.on_own_stream():
        be_busy()
        torch._foreach_copy_(list(state.values()), list(source.values()))
        save(path, {"model": module_of(state)}, mode, check_replicas=True).result(60)


@on_ranks(1)
def test_training_resumes_exactly(path: str) -> None:
    pretend.load()

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(pretend.device())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for _ in range(3):
            loss = model(torch.ones(4, 8, device=pretend.device())).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(loss.item())
        return found

    model, optimizer = build()
    losses(model, optimizer)
    with pretend.delays(kernel=2, to_host=2, to_device=2):
        handle = save(path, {"model": model, "optimizer": optimizer}, "async")
        wanted = losses(model, optimizer)
        handle.result(60)
        other, fresh = build()
        bytecheckpoint.load(path, {"model": other, "optimizer": fresh})
        assert losses(other, fresh) == wanted


@pytest.mark.parametrize("mode", MODES)
@on_ranks(1)
def test_a_save_during_a_capture_is_refused(path: str, mode: str) -> None:
    pretend.load()
    state = on_device(expected())
    module = torch.get_device_module(pretend.device())
    with pytest.MonkeyPatch.context() as patch, undisturbed():
        patch.setattr(module, "is_current_stream_capturing", lambda: True, raising=False)
        with pytest.raises(bytecheckpoint.UsageError, match="captured"):
            bytecheckpoint.save(path, {"model": module_of(state)}, **MODES[mode])
    save(path, {"model": module_of(state)}, mode).result(60)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(1)
def test_work_of_the_caller_that_hangs(path: str, mode: str) -> None:
    pretend.load()
    state = on_device(expected())
    save(path, {"model": module_of(state)}, mode).result(60)
    says = r"on .*:0 before the call has not ended within 0.5 s"
    with pretend.delays(kernel=pretend.HELD):
        torch.zeros(1, device=pretend.device())
        with pytest.raises(bytecheckpoint.CheckpointTimeoutError, match=says):
            save(path, {"model": module_of(state)}, mode, timeout=0.5).result(60)
    save(path, {"model": module_of(state)}, mode).result(60)
    assert_stored(path, expected())


@on_ranks(1)
def test_copies_that_fail_are_waited_for() -> None:
    """The memory of both sides is free for others then."""
    pretend.load()
    source = coded((5,), torch.int64).to(pretend.device())
    target = torch.zeros(5, dtype=torch.int64)
    copies = DeviceCopies([source.device], to_host=True)

    def fail() -> None:
        with copies.queued():
            target.copy_(source, non_blocking=True)
            raise ZeroDivisionError

    with pretend.delays(to_host=_LATE), pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(target, coded((5,), torch.int64))


@on_ranks(1)
def test_buffers_are_pinned_for_the_device_of_the_tensors() -> None:
    pretend.load()
    buffers = []
    with pretend.contexts() as found:
        thread = threading.Thread(target=lambda: buffers.append(host_buffer(5000, [pretend.device(1)])))
        thread.start()
        thread.join()
    assert found == {1}
    buffers.append(host_buffer(5000, []))
    assert [b.is_pinned() for b in buffers] == [True, False]
    assert all(b.data_ptr() % 4096 == 0 and b.numel() == 5000 for b in buffers)


@on_ranks(1)
def test_pages_that_cannot_be_locked_are_reported_once() -> None:
    """CUDA's calls are replaced: what is tested is on which device they are made."""
    pretend.load()
    pinning._warn_once.cache_clear()
    codes = [0, 2, 2]
    devices = []

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            devices.append(torch.accelerator.current_device_index())
            return codes.pop(0)

        def cudaHostUnregister(self, address: int) -> int:
            devices.append(torch.accelerator.current_device_index())
            return 0

    cuda, memory = torch.device("cuda", 1), np.zeros(4096, np.uint8).ctypes.data
    with pytest.MonkeyPatch.context() as patch, warned() as messages:
        patch.setattr(torch.cuda, "cudart", Runtime)
        patch.setattr(torch, "zeros", lambda size, device: None)
        assert lock_pages(memory, 4096, cuda)
        unlock_pages(memory, cuda)
        assert not lock_pages(memory, 4096, cuda)
        assert not lock_pages(memory, 4096, cuda)
        assert not lock_pages(memory, 4096, pretend.device())
        assert not lock_pages(memory, 4096, pretend.device())
    assert devices == [1, 1, 1, 1]
    assert torch.accelerator.current_device_index() == 0
    assert ["error 2" in messages[0], "pretend" in messages[1], len(messages)] == [True, True, 2]


@on_ranks(1)
def test_the_pretend_device_shows_missing_waits(tmp_path: Path) -> None:
    """The tests above can fail."""
    pretend.load()
    tensor = torch.zeros(1000, device=pretend.device())
    target, stream = torch.zeros(1000), torch.Stream(pretend.device())
    torch.accelerator.synchronize(pretend.device())
    with pretend.delays(kernel=pretend.HELD):
        tensor.fill_(1)
        with stream:
            target.copy_(tensor, non_blocking=True)
        stream.synchronize()
        assert not target.any(), "another stream does not wait"
    with pretend.delays(kernel=_BUSY):
        tensor.fill_(2)
        assert (tensor.cpu() == 2).all(), "the same stream does"
    with pretend.delays(to_host=pretend.HELD):
        target.copy_(tensor, non_blocking=True)
        assert not target.any(), "the host does not wait"
    torch.accelerator.synchronize(pretend.device())
    assert (target == 2).all()


@pytest.mark.parametrize(("mode", "look"), crossed(list(MODES), [1 << 30, 5000]))
@on_ranks(1)
def test_frozen_parameters_on_a_device_are_shared(path: str, mode: str, look: int) -> None:
    """And a change that the caller has only queued is seen."""
    pretend.load()
    frozen = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in on_device(expected()).items()}
    layer = torch.nn.ParameterDict(frozen)

    def adopted(number: int) -> int:
        states = {"model": layer}
        report = bytecheckpoint.save(f"{path}/{number}", states, incremental=True, **MODES[mode]).result(60)
        return report.bytes_adopted

    with torch.no_grad(), pretend.delays(to_host=_LATE), tuned(frozen_look_bytes=look):
        assert adopted(1) == 0 < adopted(2)
        changed = on_device(expected(salt=1))
        be_busy()
        torch._foreach_copy_([layer[name] for name in changed], list(changed.values()))
        assert adopted(3) == 0 < adopted(4)
    assert_stored(f"{path}/4", expected(salt=1))
