"""Trainings of a tiny model with Lightning, as the ranks of a world run them."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bytecheckpoint.manager import Preemption, SaveOptions
from tests.integrations.conformance import Training

if importlib.util.find_spec("lightning"):
    import lightning.pytorch as pl

    from bytecheckpoint.integrations.lightning import ModelCheckpoint, export_ckpt
else:  # the tests are collected, and skipped by a line that says so
    pl, ModelCheckpoint, export_ckpt = SimpleNamespace(LightningModule=object), Any, Any

SAMPLES, WIDTH = 48, 6  # an epoch has 6 batches of 8 samples


class Net(pl.LightningModule):
    """A tiny model with dropout, which notes its losses by step."""

    def __init__(self, dropout: float = 0.0, interval: str = "step", shard: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)
        )
        self.losses: dict[int, float] = {}
        self.at: dict[int, Callable[[], object]] = {}

    def configure_model(self) -> None:
        if self.hparams.shard:
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            if not any("FSDP" in type(one).__name__ for one in self.modules()):
                fully_shard(self.layers, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        rows, wanted = batch
        loss = (self.layers(rows).squeeze(1) - wanted).pow(2).mean()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        self.losses[self.trainer.fit_loop.epoch_loop.total_batch_idx + 1] = float(total)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.trainer.global_step in self.at:
            self.at[self.trainer.global_step]()

    def on_train_end(self) -> None:
        loops = self.trainer.fit_loop
        if self.automatic_optimization:  # loggers are given this number
            assert loops.epoch_loop._batches_that_stepped == self.trainer.global_step

    def validation_step(self, batch: Any, index: int) -> None:
        rows, wanted = batch
        torch.rand(1)  # validations draw numbers too
        self.log("val_loss", (self.layers(rows).squeeze(1) - wanted).pow(2).mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if self.hparams.interval == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.3, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.hparams.interval}}


def data(number: int = SAMPLES, seed: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(number, WIDTH, generator=generator)
    return TensorDataset(rows, rows.sum(1) + torch.randn(number, generator=generator) / 10)


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def loader(shuffle: bool = True, **options: Any) -> Any:
    return DataLoader(data(), **{"batch_size": 8 // ranks(), "shuffle": shuffle, **options})


def prepare_rank() -> None:
    """Let Lightning look at this process as a rank that something else has started."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"):
        os.environ.pop(name, None)
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": size}
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def make(callback: Any, strategy: Any = "auto", callbacks: Any = (), **options: Any) -> Any:
    """Return a trainer of two epochs."""
    prepare_rank()
    torch.manual_seed(7)
    if strategy == "auto":
        strategy = "ddp" if ranks() > 1 else "auto"
    elif strategy == "fsdp2":
        strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=ranks(), tensor_parallel_size=1)
    own = [] if callback is None else [callback]
    return pl.Trainer(
        **{
            "accelerator": "cpu", "devices": ranks(), "max_epochs": 3, "logger": False, "enable_progress_bar": False,
            "enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0, **options,
        },
        strategy=strategy, callbacks=[*callbacks, *own], enable_checkpointing=callback is not None,
    )  # fmt: skip


def run(
    folder: Path | str | None, *, ckpt_path: Any = "last", net: Any = None, train: Any = None, validate: bool = False,
    checkpoint: dict[str, Any] | None = None, at: dict[int, Callable[[], object]] | None = None, shuffle: bool = True,
    **options: Any,
) -> dict[int, float]:  # fmt: skip
    """Train, with checkpoints if there is a folder; return the losses."""
    callback = (
        None
        if folder is None
        else ModelCheckpoint(folder, **{"every_n_train_steps": 4, "save_top_k": -1, **(checkpoint or {})})
    )
    net = net or Net(dropout=0.2, shard=options.get("strategy") == "fsdp2")
    net.at = at or {}
    if validate:
        options = {"limit_val_batches": 1.0, **options}
    trainer = make(callback, **options)
    trainer.fit(
        net, loader(shuffle) if train is None else train, DataLoader(data(8, seed=4), batch_size=4) if validate else None,
        ckpt_path=ckpt_path if folder is not None else None,
    )  # fmt: skip
    return net.losses


def conform(folder: str, training: Training) -> dict[int, float]:
    """Train as the conformance suite says, in the order that DDP has anyway."""
    sharded = training.layout == "fsdp2"
    net = Net(dropout=0.2 if training.dropout else 0.0, shard=sharded)
    sampler = None
    if training.layout != "ddp":
        sampler = DistributedSampler(data(), ranks(), dist.get_rank() if ranks() > 1 else 0)
    with contextlib.suppress(SystemExit):
        run(
            folder if training.attached else None, net=net, at=dict(training.at), max_epochs=-1,
            max_steps=training.until or training.steps, ckpt_path="last" if training.resume else None,
            train=loader(sampler is None, sampler=sampler), strategy="fsdp2" if sharded else "auto",
            checkpoint={
                "every_n_train_steps": training.every, "keep": training.keep,
                "preemption": Preemption() if training.preempted else None,
                "save_options": SaveOptions(on_error=training.on_error),
            },
        )  # fmt: skip
    assert all(isinstance(weight, DTensor) for weight in net.parameters()) == sharded
    return net.losses
