r"""Elastic training: when a rank or a machine is lost, the others save the step before, and go on at their number.

Start one agent on each machine (or several on one machine, to try it), each with the same command:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:4 --nproc-per-node=1 --max-restarts=100 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 \
        --rdzv-conf=last_call_timeout=5 demo/elastic.py --root ROOT

The agents notice that one of them is gone, meet again, and start their ranks anew. This program does nothing for that: it
makes the manager, restores and trains. The checkpoint is resharded, and the loader hands its streams to the ranks that are
there. The agent at HOST keeps the meeting point, so its machine must stay. (Without the variable, torch 2.13 lets restarted
ranks read the addresses of those that have ended.)
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bytecheckpoint
from bytecheckpoint.dataloader import SequenceSource, TokenBufferLoader, TokenRecipe
from bytecheckpoint.manager import Cadence, CheckpointManager

#: Rows of a global batch. The ranks share them as equally as their number allows.
BATCH = 12
TEXTS = [f"document {i}: " + "so it goes. " * (i % 7) for i in range(500)]


def tokenize(text: str) -> list[int]:
    """Return the bytes of a text."""
    return list(text.encode())


def train(root: str, steps: int, record: Path | None = None, pace: float = 0.0) -> None:
    """Train up to a number of steps, from the newest one in `root`.

    Args:
        root: folder or URL of the run.
        steps: number of the last one.
        record: file to which the loss of each step is appended.
        pace: seconds that a step takes at least.
    """
    torch.manual_seed(0)
    # In double precision the losses do not depend on the number of ranks, which add in another order.
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256)).double()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    parallel = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recipe = TokenRecipe(SequenceSource(TEXTS, "texts"), 33, BATCH, tokenizer=tokenize, document_end=0)
    loader = TokenBufferLoader(recipe, rank=rank, ranks=ranks)
    states = {"model": model, "optimizer": optimizer, "dataloader": loader, "rng": bytecheckpoint.rng_state()}
    cadence = Cadence(every=10, at_end=True)
    with CheckpointManager(root, states, every=cadence, keep=3, just_in_time=True) as manager:
        manager.restore_latest()
        for step in range(manager.step + 1, steps + 1):
            time.sleep(pace)
            tokens = next(loader)["tokens"]
            share = len(tokens) / BATCH  # so that unequal shares count as they should
            logits = parallel(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) * share
            optimizer.zero_grad()
            (loss * ranks).backward()  # DDP takes the mean
            shown = loss.detach()
            if ranks > 1:
                dist.all_reduce(shown)
            optimizer.step()
            if rank == 0 and record is not None:
                with record.open("a") as file:
                    print(json.dumps({"step": step, "loss": shown.item(), "ranks": ranks}), file=file)
            manager.maybe_save(step)


def main() -> None:
    """Take part in a job of torchrun."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", required=True, help="folder or URL of the run, which all machines see")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--record", type=Path, help="a file for the losses")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(args.root, args.steps, args.record, args.pace)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
