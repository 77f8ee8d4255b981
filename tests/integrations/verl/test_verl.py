"""verl's real checkpoint manager of FSDP, with states of this package, on ranks of FSDP2 with a Llama of transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from bytecheckpoint.errors import UsageError
from tests.support.torch_layouts import mesh
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(600)

BEFORE, AFTER = 2, 3


def training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh(dp=dist.get_world_size()))
    fully_shard(model, mesh=mesh(dp=dist.get_world_size()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train(run: Any, steps: int) -> list[float]:
    model, optimizer, schedule = run
    losses = []
    for number in range(steps):
        tokens = (torch.arange(8) * 3 + number).reshape(1, 8) % 32
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def managed(seed: int, **config: Any) -> Any:
    import bytecheckpoint.integrations.verl  # before the name is imported from verl

    FSDPCheckpointManager = sys.modules["verl.utils.checkpoint.fsdp_checkpoint_manager"].FSDPCheckpointManager
    assert FSDPCheckpointManager is bytecheckpoint.integrations.verl.CheckpointManager
    run = training(seed)
    return FSDPCheckpointManager(*run, checkpoint_config=config), run


def save(path: str) -> list[float]:
    manager, run = managed(0)
    for step in (1, 2):
        train(run, 1)
        manager.save_checkpoint(f"{path}/global_step_{step}/actor", global_step=step, max_ckpt_to_keep=1)
        dist.barrier()
    stock = type(manager).__mro__[1](*run, checkpoint_config={})
    stock.save_checkpoint(f"{path}/stock", global_step=2)
    return train(run, AFTER)


def load(path: str, step: str) -> list[float]:
    manager, run = managed(1)
    train(run, 1)
    manager.load_checkpoint(f"{path}/{step}")
    return train(run, AFTER)


def refuse(path: str) -> None:
    manager, run = managed(0, save_lora_only=True)
    run[0].peft_config = {}
    with pytest.raises(UsageError, match="save_lora_only is not supported"):
        manager.save_checkpoint(path)
    manager.save_checkpoint(None)
    manager.load_checkpoint(None)


def test_a_training_continues_at_any_number_of_ranks(worlds: Worlds, tmp_path: Path) -> None:
    expected, *_ = worlds.run(2, save, str(tmp_path), timeout=300)
    assert not (tmp_path / "global_step_1" / "actor").exists(), "verl keeps one step"
    assert (tmp_path / "global_step_2/actor/huggingface/config.json").exists()
    for step, ranks in [("global_step_2/actor", 2), ("stock", 2), ("global_step_2/actor", 3)]:
        found, *_ = worlds.run(ranks, load, str(tmp_path), step, timeout=300)
        assert found == pytest.approx(expected, rel=1e-4 if ranks == 3 else 1e-12)


def test_refusals(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, refuse, str(tmp_path), timeout=300)


def test_the_engine_of_verl_takes_the_manager() -> None:
    code = "import verl.workers.engine.fsdp.transformer_impl as engine; print(engine.FSDPCheckpointManager.__module__)"
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "bytecheckpoint.integrations.verl"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.stdout.split()[-1:] == ["bytecheckpoint.integrations.verl.manager"], result.stderr[-2000:]
