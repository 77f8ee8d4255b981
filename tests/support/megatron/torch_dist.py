"""Save as Megatron's training program does: `dist_checkpointing.save` of the model, the optimizer and the rest."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.megatron.models import Layout
from tests.support.megatron.training import Trainer


def start_with_own_shards(layout: Layout, lr: float, **options: Any) -> Trainer:
    """Start a run in which the shards of tensor-parallel ranks differ: `Trainer` gives all of them the same values.

    Args:
        layout: how the model is spread.
        lr: largest learning rate.
        **options: further arguments of `Trainer`.
    """
    from megatron.core import parallel_state

    trainer = Trainer(layout, seed=4, lr=lr, **options)
    with torch.no_grad():
        for _, parameter in trainer.named_parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                parameter.mul_(1 + 0.25 * parallel_state.get_tensor_model_parallel_rank())
    trainer.optimizer.reload_model_params()
    return trainer


def save_torch_dist(trainer: Trainer, path: str, kind: str) -> None:
    """Save a checkpoint of Megatron.

    Args:
        trainer: the run.
        path: new folder.
        kind: form of the optimizer: "fully_reshardable" or "dp_reshardable".
    """
    from megatron.core import dist_checkpointing

    Path(path).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    metadata: dict[str, Any] = {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True}
    names = ["model"] if len(trainer.bare) == 1 else [f"model{number}" for number in range(len(trainer.bare))]
    state: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, trainer.bare, strict=True)
    }
    of_model = state["model"] if len(names) == 1 else dict(state)
    state["optimizer"] = trainer.optimizer.sharded_state_dict(of_model, metadata=metadata)
    state["opt_param_scheduler"] = trainer.scheduler.state_dict()
    state["args"] = Namespace(tensor_model_parallel_size=trainer.layout.tp, hidden_size=16)
    state |= {"iteration": trainer.step, "checkpoint_version": 3.0}
    dist_checkpointing.save(state, path, content_metadata=metadata)
