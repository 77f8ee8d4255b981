"""Train a small network with Lightning. Kill it at any time and start it again: it goes on where it was.

    python demo/lightning_trainer.py /tmp/run
    torchrun --nproc-per-node 2 demo/lightning_trainer.py /tmp/run

Both take the same samples in a step and in the same order, so that one may go on with what the other began. At the end the
losses of all steps are in losses.json, and weights.ckpt beside it is a file for `load_from_checkpoint`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bytecheckpoint.integrations.lightning import ModelCheckpoint, export_ckpt

SAMPLES_PER_STEP = 8


class Net(pl.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
        self.losses: dict[int, float] = {}

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        rows, wanted = batch
        loss = torch.nn.functional.mse_loss(self.layers(rows).squeeze(1), wanted)
        self.losses[self.global_step + 1] = float(self.trainer.strategy.reduce(loss.detach().clone()))
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = self.losses

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.losses = checkpoint["losses"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: str, steps: int) -> None:
    pl.seed_everything(0)
    rows = torch.randn(400, 8)
    dataset = TensorDataset(rows, rows.sin().sum(1))
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    loader = DataLoader(
        dataset, batch_size=SAMPLES_PER_STEP // ranks, sampler=DistributedSampler(dataset, ranks, rank, seed=0)
    )
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=-1, keep=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp" if ranks > 1 else "auto",
        devices=ranks,
        max_steps=steps,
        precision="64-true",  # so that the losses of one rank and of two, which add in another order, are the same
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
    )
    net = Net()
    trainer.fit(net, loader, ckpt_path="last")
    if trainer.is_global_zero:
        Path(folder, "losses.json").write_text(json.dumps(net.losses))
        export_ckpt(checkpoints.best_model_path, Path(folder, "weights.ckpt"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200)
