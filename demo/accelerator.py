"""Train a tiny model with Hugging Face Accelerate. Kill it at any time and start it again: it goes on where it was.

    python demo/accelerator.py /tmp/run
    torchrun --nproc-per-node 2 demo/accelerator.py /tmp/run

Both take the same samples in a step, so that one may go on with what the other began. At the end the losses of all steps
are in losses.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bytecheckpoint.integrations.accelerate import attach

SAMPLES_PER_STEP, LENGTH = 8, 32


class Losses:
    """What the program itself keeps: accelerate saves and loads it because it is registered."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def texts() -> TensorDataset:
    """Return this file, as rows of bytes."""
    rows = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, LENGTH, 8)
    return TensorDataset(rows[: len(rows) // SAMPLES_PER_STEP * SAMPLES_PER_STEP].clone())


def main(folder: str, steps: int) -> None:
    torch.manual_seed(0)
    # A batch is divided among the ranks, so that a step and the schedule are the same at any number of them.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    # In double precision the losses of one rank and of two, which add in another order, are the same.
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 256)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loader = DataLoader(texts(), batch_size=SAMPLES_PER_STEP, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    losses = Losses()
    accelerator.register_for_checkpointing(losses)
    attach(accelerator, folder, keep=2)

    accelerator.load_state()
    while len(losses.values) < steps:
        for (rows,) in loader:
            loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.values.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(losses.values) % 10 == 0:
                accelerator.save_state(step=len(losses.values))
            if len(losses.values) == steps:
                break
    if accelerator.is_main_process:
        Path(folder, "losses.json").write_text(json.dumps(losses.values))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200)
