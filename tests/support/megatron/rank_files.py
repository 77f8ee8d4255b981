"""Save as Megatron's training program does with `--ckpt-format torch`: a file of each model-parallel rank."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.megatron.training import Trainer


def save_rank_files(trainer: Trainer, folder: str, *, optimizer: bool = True, **args: Any) -> None:
    """Save the files of the ranks, by `generate_state_dict` and `get_checkpoint_name` of Megatron's training program.

    Args:
        trainer: the run.
        folder: folder of the checkpoints.
        optimizer: save the flat tensors of a distributed optimizer, too.
        **args: further arguments of the training program, which the files have.
    """
    from megatron.core import parallel_state
    from megatron.training import checkpointing

    layout = trainer.layout
    saved = Namespace(
        ckpt_format="torch", no_save_optim=False, no_save_rng=True, tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp, untie_embeddings_and_output_weights=not layout.tied,
        expert_model_parallel_size=layout.ep, num_experts=4 if layout.moe else None, **args,
    )  # fmt: skip
    state = checkpointing.generate_state_dict(
        saved, trainer.bare, trainer.optimizer, trainer.scheduler, None, iteration=trainer.step
    )
    path = checkpointing.get_checkpoint_name(
        folder,
        trainer.step,
        pipeline_parallel=layout.pp > 1,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        expert_parallel=layout.ep > 1,
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if parallel_state.get_data_parallel_rank() == 0 or parallel_state.get_expert_data_parallel_rank() == 0:
        torch.save(state, path)
    if optimizer and layout.distributed:
        trainer.optimizer.save_parameter_state(checkpointing.get_distributed_optimizer_checkpoint_name(path))
    dist.barrier()
