"""torchtitan's small Llama 3 with the checkpoints of this package: a config registry for torchtitan's own program.

In a clone of torchtitan, where its tokenizer and data are, on a machine with GPUs:

    PYTHONPATH=<folder of this file> torchrun --nproc-per-node 8 -m torchtitan.train \
        --module torchtitan_llama --config llama3_debugmodel --training.steps 1000 --checkpoint.interval 100

Kill it at any time and start it again: it goes on where it was, also with other options of `--parallelism`.
"""

from __future__ import annotations

from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

from bytecheckpoint.integrations.torchtitan import CheckpointManager


def llama3_debugmodel() -> Trainer.Config:
    return with_checkpoints(config_registry.llama3_debugmodel())


def with_checkpoints(config: Trainer.Config) -> Trainer.Config:
    config.checkpoint = CheckpointManager.Config(
        enable=True,
        interval=50,
        keep_latest_k=3,
        last_save_model_only=False,  # so that a longer training goes on from the last step
        preemption_grace=60.0,  # seconds between SIGTERM and the end of the job
    )
    return config
