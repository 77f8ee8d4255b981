"""Train a tiny language model with Hugging Face Trainer. Kill it at any time and start it again: it goes on where it was.

    python demo/trainer.py /tmp/run
    torchrun --nproc-per-node 2 demo/trainer.py /tmp/run

Both take the same samples in a step, so that one may go on with what the other began. At the end the losses of all steps
are in losses.json, and the weights for `from_pretrained` beside it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from bytecheckpoint.integrations.transformers import attach

SAMPLES_PER_STEP, LENGTH = 8, 32


def texts() -> list[dict[str, Any]]:
    """Return this file, as rows of bytes."""
    rows = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, LENGTH, 8)
    rows = rows[: len(rows) // SAMPLES_PER_STEP * SAMPLES_PER_STEP]
    return [{"input_ids": row, "labels": row} for row in rows]


def main(folder: str, steps: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
    )
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=SAMPLES_PER_STEP // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=steps,
        save_steps=10,
        save_total_limit=2,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        dataloader_pin_memory=False,
    )
    # In double precision the losses of one rank and of two, which add in another order, are the same.
    trainer = Trainer(model=LlamaForCausalLM(config).double(), args=arguments, train_dataset=texts())
    attach(trainer, hf_weights="last")
    trainer.train(resume_from_checkpoint="auto")
    if trainer.is_world_process_zero():
        losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        Path(folder, "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200)
