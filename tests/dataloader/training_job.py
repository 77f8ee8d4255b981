"""A training job of the ranks of torchrun: saves model, optimizer and data loader, and notes what each step was fed.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.dataloader.training_job FOLDER --stop 8
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from bytecheckpoint.dataloader.loader import TokenBufferLoader, WorkerOptions
from bytecheckpoint.dataloader.recipe import TokenRecipe
from bytecheckpoint.dataloader.workers import Worker
from tests.dataloader.segments import newest_step
from tests.dataloader.token_loaders import Numbers
from tests.support.faulty_storage import Faults

#: Steps between two saves.
EVERY = 4
_VOCABULARY = 128
_ROWS, _LENGTH = 14, 16
#: The ways in which a job can be held in the middle of a save: writer of the files -> (call, part of the file's name).
_HELD = {"thread": ("write", "model/"), "process": ("publish", "metadata.parquet")}


def loader_of(rank: int, ranks: int, workers: int) -> TokenBufferLoader:
    """Return the loader of a rank: seven streams, which most numbers of ranks and workers do not divide."""
    sources = {Numbers("a", 40): 2.0, Numbers("b", 9, first=60): 1.0}
    recipe = TokenRecipe(sources, _LENGTH, _ROWS, streams=7, shuffle_buffer=6)
    return TokenBufferLoader(recipe, rank=rank, ranks=ranks, workers=WorkerOptions(workers, state_every=EVERY))


class Training:
    """A run of a tiny model, sharded if there are several ranks."""

    def __init__(self, rank: int, ranks: int, workers: int) -> None:
        torch.manual_seed(0)
        self._ranks = ranks
        self.model: nn.Module = nn.Sequential(nn.Embedding(_VOCABULARY, 8), nn.Linear(8, _VOCABULARY)).double()
        if ranks > 1:
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loader = loader_of(rank, ranks, workers)
        self.extra = {"step": 0}

    def states(self) -> dict[str, Any]:
        """Return what is saved."""
        names = {"model": self.model, "optimizer": self.optimizer, "dataloader": self.loader}
        return {**names, "extra_states": self.extra}

    def step(self) -> dict[str, Any]:
        """Train on the next global batch; return its number, its hash and its loss."""
        batch = next(self.loader)
        tokens = batch["tokens"]
        logits = self.model(tokens[:, :-1])
        # The ranks have different numbers of rows, and FSDP averages their gradients.
        own = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / (_ROWS * (_LENGTH - 1))
        (own * self._ranks).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        parts: list[Any] = [(batch, own.detach())]
        if self._ranks > 1:
            parts = [None] * self._ranks
            dist.all_gather_object(parts, (batch, own.detach()))
        fed = xxhash.xxh3_64()
        for name in ("rows", "tokens", "documents", "positions"):
            fed.update(torch.cat([part[name] for part, _ in parts]).numpy().tobytes())
        facts = {"step": self.extra["step"], "fed": fed.hexdigest(), "loss": float(sum(loss for _, loss in parts))}
        self.extra["step"] += 1
        return facts


def train(options: argparse.Namespace) -> None:
    """Train from the newest committed step, and save every few steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Training(rank, ranks, options.workers)

    def note(**facts: Any) -> None:
        with (options.folder / f"{options.name}.{rank}.jsonl").open("a") as file:
            print(json.dumps(facts), file=file)

    with pytest.MonkeyPatch.context() as patch, run.loader:
        bytecheckpoint.configure(writer=options.writer)
        if options.held_at is not None and rank == options.victim:
            call, name = _HELD[options.writer]
            faults = Faults().install(patch)
        newest = newest_step(options.folder)
        if newest:
            bytecheckpoint.load(options.folder / str(newest), run.states())
        begin, handle = run.extra["step"], None
        while run.extra["step"] < options.stop:
            facts = run.step()
            workers = [maker._process for maker, _ in run.loader._makers if isinstance(maker, Worker)]
            if facts["step"] == begin:
                note(workers=[worker.pid for worker in workers])
            note(**facts)
            step = run.extra["step"]
            if step == options.worker_dies_at and rank == options.victim:
                handle.result()  # committed, so that the test knows from where the next job goes on
                os.kill(workers[-1].pid, signal.SIGKILL)
            if step % EVERY == 0 or step == options.stop:
                if step == options.held_at and rank == options.victim:
                    held = options.folder / f"{options.name}.held"
                    faults.add(call, name=name, before=held.touch, delay=600.0)
                if handle is not None:
                    handle.result()
                handle = bytecheckpoint.save(options.folder / str(step), run.states(), async_checkpoint=True)
        handle.result()


def main() -> None:
    """Be a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of the checkpoints and of the notes of all ranks")
    parser.add_argument("--name", help="of the job")
    parser.add_argument("--workers", type=int, help="of each rank")
    parser.add_argument("--stop", type=int, help="steps to train, in all jobs together")
    parser.add_argument("--writer", default="thread", help="thread or process")
    parser.add_argument("--held-at", type=int, help="the step in the middle of whose save the victim waits")
    parser.add_argument("--worker-dies-at", type=int, help="the step after which the victim's last worker is killed")
    parser.add_argument("--victim", type=int, default=0, help="rank")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
