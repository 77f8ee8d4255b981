"""States that real ranks load as they were saved: dtypes, steps and settings of every parameter, at another layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import bytecheckpoint
from tests.support.comparisons import assert_same
from tests.support.tiny_model import source_values, target_values
from tests.support.torch_layouts import WORLD_SIZE, Trainer, build, mesh
from tests.support.worlds import Worlds, on_ranks

MIB = 1 << 20


@on_ranks(2)
def test_parameters_without_optimizer_state_load(path: str) -> None:
    """DCP of torch fails to load them."""
    source, fresh = build("fsdp2", source_values), build("fsdp2", target_values)
    for name, parameter in source.parameters().items():
        if "experts" not in name and parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    source.optimizer.step()
    bytecheckpoint.save(path, {"model": source.model, "optimizer": source.optimizer})
    fresh.train(1)  # all parameters have some state, which must go
    report = bytecheckpoint.load(path, {"model": fresh.model, "optimizer": fresh.optimizer})
    assert any("no state" in note for note in report.notes)
    assert_same(source.snapshot(), fresh.snapshot())


@on_ranks(2)
def test_a_cast_takes_consent(path: str) -> None:
    """DCP of torch casts silently."""
    whole = torch.linspace(0, 1, 12).reshape(6, 2)
    saved, target = (
        distribute_tensor(tensor, mesh(dp=2), [Shard(0)], src_data_rank=None)
        for tensor in (whole, torch.zeros(6, 2).half())
    )
    bytecheckpoint.save(path, {"model": {"w": saved}})
    with pytest.raises(bytecheckpoint.IncompatibleCheckpointError, match="float32 in the checkpoint and float16 here"):
        bytecheckpoint.load(path, {"model": {"w": target}})
    assert isinstance(target, DTensor) and not target.to_local().any()
    report = bytecheckpoint.load(path, {"model": {"w": target}}, cast=True)
    assert torch.equal(target.full_tensor(), whole.half())
    assert list(report.cast) == ["model/w"]


def save_ddp(path: str) -> int:
    """Return the bytes that this rank writes of a DDP model of 4 MiB."""
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16))))
    return bytecheckpoint.save(path, {"model": model}).result().bytes_written


@pytest.mark.parametrize("size", [2, 4])
def test_every_ddp_rank_writes_its_part(worlds: Worlds, size: int, path: str) -> None:
    """Every rank of torch_checkpointing writes everything, and rank 0 alone in ByteCheckpoint's public release."""
    written = worlds.run(size, save_ddp, path)
    assert 4 * MIB <= sum(written) < 4.07 * MIB
    assert max(written) < 1.07 * 4 * MIB / size
    assert min(written) > 0.9 * 4 * MIB / size


def start_filled(layout: str) -> Trainer:
    """Start a run of bf16 parameters with fp32 state, a `step` of its own for each, and a rate for each group."""
    filled = build(layout, source_values, dtype=torch.bfloat16)
    filled.fill_optimizer(torch.float32)
    return filled


def save_filled(layout: str, path: str) -> None:
    filled = start_filled(layout)
    bytecheckpoint.save(path, {"model": filled.model, "optimizer": filled.optimizer})


def load_filled(layout: str, path: str) -> None:
    """Load every parameter's state, which must never have been bf16, its `step` into memory of its own, and settings."""
    fresh = build(layout, target_values, dtype=torch.bfloat16)
    bytecheckpoint.load(path, {"model": fresh.model, "optimizer": fresh.optimizer})
    states = fresh.optimizer.state.values()
    assert {value.dtype for state in states for value in state.values()} == {torch.float32}
    assert len({state["step"].data_ptr() for state in states}) == len(states), "no two parameters share one step tensor"
    assert len({group["lr"] for group in fresh.optimizer.param_groups}) == 2
    assert_same(start_filled(layout).snapshot(), fresh.snapshot())


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        pytest.param("tp2", "pp2", id="tp-to-pp"),
        pytest.param("pp2", "tp2", id="pp-to-tp"),
        pytest.param("ep2-fsdp2", "one", id="ep-to-one"),
        pytest.param("ep2-fsdp2", "tp2", id="ep-to-tp", marks=pytest.mark.slow),
        pytest.param("fsdp3", "fsdp2", id="settings-of-groups"),
        pytest.param("fsdp3", "one", id="sharded-fp32-state"),
        pytest.param("ddp2", "fsdp3", id="replicated-fp32-state"),
    ],
)
def test_state_steps_and_settings_at_another_layout(worlds: Worlds, source: str, destination: str, path: str) -> None:
    """Megatron cannot change TP, PP or EP and shares one `step`; DeepSpeed takes the settings of group 0; DCP casts."""
    worlds.run(WORLD_SIZE[source], save_filled, source, path)
    worlds.run(WORLD_SIZE[destination], load_filled, destination, path)
