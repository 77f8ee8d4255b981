"""The jobs that ranks run in test_peer_faults.py."""

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
from tests.distributed.matrix_jobs import differences, source_values, target_values


def async_on_cpu(layout: str, path: str) -> list[str]:
    """Save a sharded model on CPU asynchronously; return problems of a load."""
    trainer = build(layout, source_values)
    trainer.train(1)
    expected = trainer.snapshot()
    handle = bytecheckpoint.save(path, trainer.states(), async_checkpoint=True)
    trainer.train(1)
    handle.result(60)
    fresh = build(layout, target_values)
    bytecheckpoint.load(path, fresh.states())
    return differences(expected, fresh.snapshot())


def nested_extra_states(path: str) -> list[str]:
    """Load nested extra states into an empty dict, under FSDP."""
    trainer = build("fsdp2", source_values)
    extra = {"a": {"b": [1, (2, {"c": torch.arange(4)})], 3: None}, "rank": dist.get_rank()}
    bytecheckpoint.save(path, {"model": trainer.model, "extra_states": extra})
    found: dict[str, Any] = {}
    bytecheckpoint.load(path, {"model": trainer.model, "extra_states": found})
    same = torch.equal(found["a"]["b"][1][1].pop("c"), extra["a"]["b"][1][1].pop("c"))  # type: ignore[index]
    return [] if same and found == extra else [str(found)]


def without_state(path: str) -> list[str]:
    """Save and load an optimizer in which only some parameters have state; return problems."""
    source = build("fsdp2", source_values)
    for name, parameter in source.parameters().items():
        if "experts" not in name and parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    source.optimizer.step()
    bytecheckpoint.save(path, {"model": source.model, "optimizer": source.optimizer})
    fresh = build("fsdp2", target_values)
    fresh.train(1)  # all parameters have some state, which must go
    report = bytecheckpoint.load(path, {"model": fresh.model, "optimizer": fresh.optimizer})
    assert any("no state" in note for note in report.notes)
    return differences(source.snapshot(), fresh.snapshot())


def everyone_writes(path: str) -> int:
    """Return the bytes that this rank writes of a DDP model of 4 MiB."""
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16))))
    return bytecheckpoint.save(path, {"model": model}).result().bytes_written


def a_64th(path: str) -> tuple[int, list[int]]:
    """Load 1/64 of a tensor of 64 MiB; return (bytes read, local shape)."""
    whole = torch.arange(64 * 256 * 1024, dtype=torch.int32).reshape(64, -1)
    if dist.get_rank() == 0:
        group = dist.new_group([0], use_local_synchronization=True)
        bytecheckpoint.save(path, {"model": {"w": whole}}, process_group=group)
    dist.barrier()
    rows = whole[dist.get_rank() : dist.get_rank() + 1]
    target = Rows(whole.shape, dist.get_rank(), torch.zeros_like(rows))
    report = bytecheckpoint.load(path, {"model": {"w": target}}, overlap_loading=False, strict=False)
    assert torch.equal(target.data, rows)
    return report.bytes_read, list(target.data.shape)


class Rows:
    """Some rows of a matrix, which lists its own shards."""

    def __init__(self, whole: torch.Size, first: int, data: torch.Tensor) -> None:
        self.whole, self.first, self.data = whole, first, data

    def __bytecheckpoint_shards__(self) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        return [(tuple(self.whole), (self.first, 0), self.data)]


def a_hole(path: str) -> str:
    """Return the error of saving shards with a hole between them, which is raised before anything is written."""
    rank = dist.get_rank()
    rows = torch.full((3, 4), float(rank))
    with pytest.raises(bytecheckpoint.IncompatibleCheckpointError) as caught:
        bytecheckpoint.save(path, {"model": {"w": Rows(torch.Size((8, 4)), 4 * rank, rows)}})
    return str(caught.value)


def no_silent_cast(path: str) -> list[str]:
    """Load fp32 into fp16: refused without `cast=True`; return the error and the cast keys."""
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
    """Save replicas that differ with `check_replicas=True`; return the reported differences."""
    states = {"model": {"same": torch.ones(5), "drifted": torch.full((5,), float(dist.get_rank()))}}
    return list(bytecheckpoint.save(path, states, check_replicas=True).result().replica_differences)


def save_steps(layout: str, path: str) -> None:
    """Save a state in which every parameter has its own `step`."""
    filled = build(layout, source_values)
    filled.fill_optimizer()
    bytecheckpoint.save(path, {"model": filled.model, "optimizer": filled.optimizer})


def load_steps(layout: str, path: str) -> list[str]:
    """Load a `step` of its own for every parameter, in its own memory, and every group's settings; return problems."""
    expected = build(layout, source_values)
    expected.fill_optimizer()
    fresh = build(layout, target_values)
    bytecheckpoint.load(path, {"model": fresh.model, "optimizer": fresh.optimizer})
    steps = [state["step"] for state in fresh.optimizer.state.values()]
    assert len({t.data_ptr() for t in steps}) == len(steps), "no two parameters share one step tensor"
    assert len({g["lr"] for g in fresh.optimizer.param_groups}) == 2
    return differences(expected.snapshot(), fresh.snapshot())
