"""VeOmni's real checkpointer with the writer and reader of this package, on two ranks of FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from tests.support.tiny_model import train_rows
from tests.support.torch_layouts import mesh
from tests.support.worlds import on_ranks

pytestmark = pytest.mark.timeout(300)


def make(seed: int, *, sharded: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    if sharded:
        fully_shard(model, mesh=mesh(dp=2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def prepared() -> Any:
    """Return the checkpointer that VeOmni's trainer gets, in a process whose accelerator is the CPU."""
    from veomni.checkpoint import build_checkpointer
    from veomni.distributed.parallel_state import init_parallel_state

    import bytecheckpoint.integrations.veomni

    torch.cpu.empty_cache = lambda: None  # VeOmni frees the memory of its accelerator after a save
    init_parallel_state(dp_size=2, dp_mode="fsdp2", device_type="cpu")
    checkpointer = build_checkpointer("dcp", "fsdp2")
    assert checkpointer is bytecheckpoint.integrations.veomni.Checkpointer
    return checkpointer


@on_ranks(2, timeout=250)
def test_a_training_continues(path: str) -> None:
    checkpointer = prepared()
    for save_async in (False, True):
        folder = f"{path}/{save_async}"
        model, optimizer = make(0)
        train_rows(model, optimizer, 2)
        states = {"model": model, "optimizer": optimizer, "extra_state": {"global_step": 5}}
        checkpointer.save(folder, states, save_async=save_async, global_steps=5)
        expected = train_rows(model, optimizer, 3)
        checkpointer.wait_for_pending_save()
        step = f"{folder}/global_step_5"
        model, optimizer = make(1)
        train_rows(model, optimizer, 1)
        states = checkpointer.load(step, {"model": model, "optimizer": optimizer, "extra_state": {}})
        assert states["extra_state"] == {"global_step": 5}
        assert train_rows(model, optimizer, 3) == expected
        model, optimizer = make(2, sharded=False)
        bytecheckpoint.load(step, {"model": model, "optimizer": optimizer})
        assert train_rows(model, optimizer, 3) == pytest.approx(expected)


@on_ranks(2, timeout=250)
def test_exports_and_older_folders(path: str) -> None:
    from veomni.checkpoint.checkpointer import ckpt_to_state_dict
    from veomni.checkpoint.dcp_checkpointer import DistributedCheckpointer

    checkpointer = prepared()
    model, optimizer = make(0)
    train_rows(model, optimizer, 2)
    states = {"model": model, "optimizer": optimizer, "extra_state": {}}
    checkpointer.save(path, states)
    exported = ckpt_to_state_dict(path)
    assert torch.equal(exported["0.weight"], model[0].weight.full_tensor())
    DistributedCheckpointer.save(f"{path}-own", states)
    expected = train_rows(model, optimizer, 3)
    model, optimizer = make(1)
    train_rows(model, optimizer, 1)
    checkpointer.load(f"{path}-own", {"model": model, "optimizer": optimizer, "extra_state": {}})
    assert train_rows(model, optimizer, 3) == expected
