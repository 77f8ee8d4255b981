"""A training that loses ranks, as the ranks of a world run it."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bytecheckpoint
from bytecheckpoint import CheckpointManager
from bytecheckpoint.dataloader import SequenceSource, TokenBufferLoader, TokenRecipe
from bytecheckpoint.errors import CheckpointError, StorageFullError
from bytecheckpoint.manager import Every, Latest, Retention
from tests.support.faulty_storage import Faults

ROWS, CONTEXT, EVERY = 12, 9, 5
LEFT = 3  # exit code of a rank that is left
TEXTS = [[i % 32] * (i % 7 + 1) for i in range(300)]


class Net(nn.Module):
    """A tiny language model, with a buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        logits = self.head(self.embed(tokens[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def wrapped(kind: str) -> nn.Module:
    """Return the model as DDP, as HSDP of two replicas, or as it is on one rank."""
    net = Net().double()  # the order of additions must not show
    if kind == "hsdp" and dist.is_initialized():
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (2, ranks // 2) if ranks % 2 == 0 else (1, ranks), mesh_dim_names=("r", "s"))
        for module in (net.embed, net.head, net):
            fully_shard(module, mesh=mesh)
        return net
    return DistributedDataParallel(net) if dist.is_initialized() else net


def train(
    root: str,
    stop: int,
    *,
    kind: str = "ddp",
    victims: Collection[int] = (),
    at: tuple[str, int] = ("forward", 0),
    log: str = "",
    errors: int = 0,
    slow: float = 0.0,
    milestone: int = 0,
    keep: int | None = None,
    grace: float = 600.0,
    average: str = "",
    full: bool = False,
    **options: Any,
) -> tuple[dict[int, float], int]:
    """Train; return the loss of each step and the passes of the model, also after the loss of other ranks.

    Args:
        root: of the run.
        stop: number of steps.
        kind: of the parallelism.
        victims: ranks that die.
        at: where in which step they do: "forward": after it, "boundary": before it is told, "commit": when the catalog of
            the first step from there on is about to be published.
        log: path for this package's warnings, and for the losses of each rank; the rank is added.
        errors: writes of rank 0 that fail.
        slow: seconds that each step of rank 0 takes longer.
        milestone: keep the steps that this divides, too.
        keep: number of the newest steps to keep.
        grace: seconds between the two phases of a deletion.
        average: "top" or "end" of a step to update a moving average of the parameters there; "" for none.
        full: True if the storage is full when ranks die, and refuses a write of each rank.
        **options: of the manager.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if log:
        logging.getLogger("bytecheckpoint").addHandler(logging.FileHandler(f"{log}.{rank}"))
    bytecheckpoint.configure(timeout=30.0)
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recipe = TokenRecipe(SequenceSource(TEXTS, "texts"), CONTEXT, ROWS, document_end=0, shuffle_buffer=8)
    loader = TokenBufferLoader(recipe, rank=rank, ranks=ranks)
    losses: dict[int, float] = {}
    progress = {"drawn": 0}
    states = {
        "model": model, "optimizer": optimizer, "dataloader": loader, "rng": bytecheckpoint.rng_state(),
        "progress": progress,
    }  # fmt: skip
    averaged = Net().double()
    if average:
        states["average"] = averaged

    def update(where: str) -> None:
        if average == where:
            with torch.no_grad():
                for mine, trained in zip(averaged.parameters(), model.parameters(), strict=True):
                    mine.data.lerp_(trained, 0.1)

    def die(where: str, step: int) -> None:
        if rank in victims and at == (where, step):
            os.kill(os.getpid(), signal.SIGKILL)

    faults = Faults()
    if full or errors or at[0] == "commit":
        bytecheckpoint.configure(writer="thread")  # in reach of the faults
        faults.install(pytest.MonkeyPatch())
    if errors and rank == 0:
        faults.add("write", OSError(5, "Input/output error"), skip=3, times=errors)
    rules = [*([Latest(keep)] if keep else []), *([Every(milestone)] if milestone else [])]

    try:
        with CheckpointManager(
            root, states, every=EVERY, keep=Retention(rules or None, grace=grace), **options
        ) as manager:
            manager.restore_latest()
            for step in range(manager.step + 1, stop + 1):
                time.sleep(0.0 if rank else slow)
                if rank in victims and at == ("commit", step):
                    faults.add("write" if rank else "publish", before=lambda: os.kill(os.getpid(), signal.SIGKILL))
                if full and at[1] == step:
                    faults.add("write", StorageFullError("no room"))
                update("top")
                tokens = next(loader)["tokens"]
                progress["drawn"] += 1
                torch.rand(1)
                loss = model(tokens)
                shown = loss.detach() * len(tokens) / ROWS
                if dist.is_initialized():
                    dist.all_reduce(shown)
                die("forward", step)
                optimizer.zero_grad()
                (loss * (len(tokens) * ranks / ROWS)).backward()
                optimizer.step()
                losses[step] = shown.item()
                update("end")
                die("boundary", step)
                manager.maybe_save(step, {"loss": shown.item()})
    except (RuntimeError, CheckpointError):
        if not victims:
            raise
    if log:
        _note(losses, log, rank)
    if victims:
        os._exit(LEFT)  # as a job ends; its connections close, and ranks that wait for it get an exception too
    return losses, states["progress"]["drawn"]


def _note(losses: dict[int, float], log: str, rank: int) -> None:
    with open(f"{log}.{rank}.json", "w") as file:
        json.dump(losses, file)
