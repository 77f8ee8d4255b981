"""Trainings of a tiny Llama with torchtitan's own Trainer, as the ranks of a world run them.

torchtitan is imported inside of functions: pytest collects these tests where it is not installed, too.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.conformance import Training, after
from tests.integrations.torchtitan.shims import load_training
from tests.support import runs

__all__ = [
    "PARALLELISM",
    "after",
    "config_of",
    "conform",
    "make",
    "prepare_rank",
    "run",
    "run_noting_random",
    "steps_in",
    "train",
]

STEPS = 12


def config_of(*, stock: bool = False, **options: Any) -> Any:
    """Return a configuration of a checkpoint manager, ours or torchtitan's own, that saves every four steps."""
    training = load_training()
    kind = training.StockManager if stock else training.CheckpointManager
    return kind.Config(**{"enable": True, "interval": 4, **options})


def prepare_rank() -> None:
    """Let torchtitan look at this process as a rank that torchrun has started."""
    logging.getLogger().setLevel(logging.ERROR)
    os.environ["LOCAL_RANK"] = "0"
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def make(
    folder: Path, *, steps: int = STEPS, checkpoint: dict[str, Any] | None = None, batch: int = 4,
    parallelism: dict[str, Any] | None = None, streams: bool = False, workers: int = 0, own_container: bool = False,
    dropout: bool = False, at: dict[int, Callable[[], object]] | None = None,
) -> Any:  # fmt: skip
    """Return a trainer.

    Args:
        folder: `dump_folder`.
        steps: `training.steps`.
        checkpoint: options of the checkpoint manager; see `config_of`.
        batch: `training.local_batch_size`.
        parallelism: options of `ParallelismConfig`.
        streams: feed the data by a loader with streams.
        workers: number of processes of the loader.
        own_container: train with optimizers in a container with a state of its own.
        dropout: draw random numbers in every forward pass.
        at: functions to call at the end of steps, before the save.
    """
    prepare_rank()
    made = load_training().make_config(
        folder, checkpoint=config_of(**(checkpoint or {})), steps=steps, batch=batch, parallelism=parallelism or {},
        streams=streams, workers=workers, own_container=own_container,
    )  # fmt: skip
    trainer = made.build()
    if workers:
        trainer.dataloader.multiprocessing_context = "fork"  # as in a program; ranks of a world would start anew
    if dropout:
        trainer.model_parts[0].norm.register_forward_hook(lambda _, __, out: torch.nn.functional.dropout(out, 0.2))
    log = trainer.metrics_processor.log

    def log_and_act(step: int, *args: Any, **kwargs: Any) -> None:
        log(step, *args, **kwargs)
        if at and step in at:
            at[step]()

    trainer.metrics_processor.log = log_and_act
    return trainer


def train(trainer: Any) -> dict[int, float]:
    """Train as torchtitan's program does; return the losses."""
    try:
        trainer.train()
    finally:
        trainer.close()
    found: dict[int, float] = trainer.metrics_processor.found
    return found


def run(folder: Path, **options: Any) -> dict[int, float]:
    """Train; return the losses."""
    return train(make(folder, **options))


def run_noting_random(folder: Path, **options: Any) -> dict[int, tuple[float, float]]:
    """Train; return the losses, each with a random number that the process drew behind the step."""
    trainer = make(folder, **options)
    losses = train(trainer)
    return {step: (loss, trainer.metrics_processor.random[step]) for step, loss in losses.items()}


def steps_in(folder: Path) -> list[int]:
    """Return the committed steps."""
    return runs.steps_in(folder / "checkpoint")


#: Layout of the conformance suite -> options of `ParallelismConfig`.
PARALLELISM: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {},
    "tp": {"tensor_parallel_degree": 2},
    "hsdp": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
}


def conform(folder: str, training: Training) -> dict[int, float]:
    """Train as the conformance suite says."""
    checkpoint = {
        "enable": training.attached, "folder": folder, "interval": training.every, "keep_latest_k": training.keep or 0,
        "on_error": training.on_error, "preemption_grace": 60.0 if training.preempted else 0.0,
        "last_save_model_only": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as own:
        return run(
            Path(own), steps=training.until or training.steps, checkpoint=checkpoint, at=dict(training.at),
            parallelism=PARALLELISM[training.layout], dropout=training.dropout and training.layout != "tp",
        )  # fmt: skip
