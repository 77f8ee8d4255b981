"""What ranks run in test_peer_faults.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import bytecheckpoint
from tests.distributed.layouts import build, mesh
from tests.distributed.matrix_jobs import differences, other, trained


def async_on_cpu(layout: str, path: str) -> list[str]:
    """A sharded model on CPU saves asynchronously."""
    trainer = build(layout, trained)
    trainer.train(1)
    expected = trainer.snapshot()
    handle = bytecheckpoint.save(path, trainer.states(), async_checkpoint=True)
    trainer.train(1)
    handle.result(60)
    fresh = build(layout, other)
    bytecheckpoint.load(path, fresh.states())
    return differences(expected, fresh.snapshot())


def nested_extra_states(path: str) -> list[str]:
    """Nested extra states go into an empty dict, under FSDP."""
    trainer = build("fsdp2", trained)
    extra = {"a": {"b": [1, (2, {"c": torch.arange(4)})], 3: None}, "rank": dist.get_rank()}
    bytecheckpoint.save(path, {"model": trainer.model, "extra_states": extra})
    found: dict[str, Any] = {}
    bytecheckpoint.load(path, {"model": trainer.model, "extra_states": found})
    same = torch.equal(found["a"]["b"][1][1].pop("c"), extra["a"]["b"][1][1].pop("c"))  # type: ignore[index]
    return [] if same and found == extra else [str(found)]


def without_state(path: str) -> list[str]:
    """Parameters that had no gradient yet have no optimizer state, before and after; their neighbours have theirs."""
    source = build("fsdp2", trained)
    for name, parameter in source.parameters().items():
        if "experts" not in name and parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    source.optimizer.step()
    bytecheckpoint.save(path, {"model": source.model, "optimizer": source.optimizer})
    fresh = build("fsdp2", other)
    fresh.train(1)  # all parameters have some state, which must go
    report = bytecheckpoint.load(path, {"model": fresh.model, "optimizer": fresh.optimizer})
    assert any("no state" in note for note in report.notes)
    return differences(source.snapshot(), fresh.snapshot())


def everyone_writes(path: str) -> int:
    """Bytes that this rank writes of a DDP model of 4 MiB."""
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16))))
    return bytecheckpoint.save(path, {"model": model}).result().bytes_written


def a_64th(path: str) -> tuple[int, list[int]]:
    """(bytes read, local shape) of a rank that wants 1/64 of each tensor of a checkpoint of 64 MiB."""
    whole = torch.arange(64 * 256 * 1024, dtype=torch.int32).reshape(64, -1)
    if dist.get_rank() == 0:
        group = dist.new_group([0], use_local_synchronization=True)
        bytecheckpoint.save(path, {"model": {"w": whole}}, process_group=group)
    dist.barrier()
    rows = whole[dist.get_rank() : dist.get_rank() + 1]
    leaf = Rows(whole.shape, dist.get_rank(), torch.zeros_like(rows))
    report = bytecheckpoint.load(path, {"model": {"w": leaf}}, overlap_loading=False, strict=False)
    assert torch.equal(leaf.data, rows)
    return report.bytes_read, list(leaf.data.shape)


class Rows:
    """Some rows of a matrix, by the public protocol for sharding schemes of one's own."""

    def __init__(self, whole: torch.Size, first: int, data: torch.Tensor) -> None:
        self.whole, self.first, self.data = whole, first, data

    def __bytecheckpoint_shards__(self) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        return [(tuple(self.whole), (self.first, 0), self.data)]


def a_hole(path: str) -> str:
    """Shards that leave a hole between them are refused before anything is written; the message."""
    rank = dist.get_rank()
    rows = torch.full((3, 4), float(rank))
    with pytest.raises(bytecheckpoint.IncompatibleCheckpointError) as caught:
        bytecheckpoint.save(path, {"model": {"w": Rows(torch.Size((8, 4)), 4 * rank, rows)}})
    return str(caught.value)


def no_silent_cast(path: str) -> list[str]:
    """fp32 into fp16 is refused, and converted only when asked for."""
    whole = torch.linspace(0, 1, 12).reshape(6, 2)
    bytecheckpoint.save(path, {"model": {"w": distribute_tensor(whole, mesh(dp=2), [Shard(0)], src_data_rank=None)}})
    target = distribute_tensor(torch.zeros(6, 2).half(), mesh(dp=2), [Shard(0)], src_data_rank=None)
    try:
        bytecheckpoint.load(path, {"model": {"w": target}})
    except bytecheckpoint.IncompatibleCheckpointError as error:
        message = str(error)
    assert isinstance(target, DTensor) and not target.to_local().any()
    report = bytecheckpoint.load(path, {"model": {"w": target}}, cast=True)
    assert torch.equal(target.full_tensor(), whole.half())
    return [message, *report.cast]


def replicas_that_differ(path: str) -> list[str]:
    """A replica that has drifted is reported when the caller asks for the comparison."""
    states = {"model": {"same": torch.ones(5), "drifted": torch.full((5,), float(dist.get_rank()))}}
    return list(bytecheckpoint.save(path, states, check_replicas=True).result().replica_differences)


def save_steps(layout: str, path: str) -> None:
    """A state in which every parameter has a `step` of its own."""
    filled = build(layout, trained)
    filled.fill_optimizer()
    bytecheckpoint.save(path, {"model": filled.model, "optimizer": filled.optimizer})


def load_steps(layout: str, path: str) -> list[str]:
    """Every parameter gets its own `step`, in memory of its own, and its own group's settings."""
    expected = build(layout, trained)
    expected.fill_optimizer()
    fresh = build(layout, other)
    bytecheckpoint.load(path, {"model": fresh.model, "optimizer": fresh.optimizer})
    steps = [state["step"] for state in fresh.optimizer.state.values()]
    assert len({t.data_ptr() for t in steps}) == len(steps), "no two parameters share one step tensor"
    assert len({g["lr"] for g in fresh.optimizer.param_groups}) == 2
    return differences(expected.snapshot(), fresh.snapshot())
