"""Save as Megatron's training program does: `dist_checkpointing.save` of the model, the optimizer and the rest."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

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


def save_torch_dist(trainer: Trainer, path: str, kind: str, **options: Any) -> Any:
    """Save a checkpoint of Megatron.

    Args:
        trainer: the run.
        path: new folder.
        kind: form of the optimizer: "fully_reshardable" or "dp_reshardable".
        **options: further arguments of `dist_checkpointing.save`.

    Returns:
        The result of `dist_checkpointing.save`: the request of an asynchronous save.
    """
    from megatron.core import dist_checkpointing

    Path(path).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    metadata: dict[str, Any] = {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True}
    state = _model_state(trainer, metadata)
    state["optimizer"] = trainer.optimizer.sharded_state_dict(_of_optimizer(state), metadata=metadata)
    state["opt_param_scheduler"] = trainer.scheduler.state_dict()
    state["args"] = Namespace(tensor_model_parallel_size=trainer.layout.tp, hidden_size=16)
    state |= {"iteration": trainer.step, "checkpoint_version": 3.0}
    return dist_checkpointing.save(state, path, content_metadata=metadata, **options)


def load_torch_dist(trainer: Trainer, path: str, optimizer: bool = True, strategy: Any = None) -> dict[str, Any]:
    """Load a checkpoint of Megatron, with its optimizer and scheduler or the model alone; return its common values."""
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_content_metadata(path)
    assert metadata is not None
    state = _model_state(trainer, metadata)
    names = list(state)
    if optimizer:
        arguments = {"is_loading": True, "metadata": metadata}
        state["optimizer"] = trainer.optimizer.sharded_state_dict(_of_optimizer(state), **arguments)
    loaded: dict[str, Any] = dist_checkpointing.load(state, path, strategy)
    for name, chunk in zip(names, trainer.bare, strict=True):
        chunk.load_state_dict(loaded.pop(name))
    if optimizer:
        with _steps_of_torch(trainer):
            trainer.optimizer.load_state_dict(loaded.pop("optimizer"))
        trainer.scheduler.num_steps = 0  # it adds those of the checkpoint
        trainer.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    else:
        trainer.optimizer.reload_model_params()
    trainer.step = loaded["iteration"]
    return loaded


@contextmanager
def _steps_of_torch(trainer: Trainer) -> Iterator[None]:
    """Let Megatron 0.19 load an optimizer of torch, which has a step for each parameter; it expects those of Apex or TE."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    plain = DistributedOptimizer._set_main_param_and_optimizer_states

    def without_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        with torch.no_grad():
            plain(self, parameter, {**tensors, "step": None})

    with mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", without_step):
        yield
    for one in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        for state in one.optimizer.state.values():
            state["step"] = state["step"].clone()  # Megatron gives all parameters the same tensor


def _model_state(trainer: Trainer, metadata: dict[str, Any]) -> dict[str, Any]:
    names = ["model"] if len(trainer.bare) == 1 else [f"model{number}" for number in range(len(trainer.bare))]
    return {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, trainer.bare, strict=True)}


def _of_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    of_model: dict[str, Any] = state["model"] if len(state) == 1 else dict(state)
    return of_model
