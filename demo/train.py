"""The worker: trains the GPT under torchrun, with checkpoints that any other layout can resume.

    python -m torch.distributed.run --standalone --nproc-per-node 2 demo/train.py --layout fsdp2 --stop 40 --total 60
    python -m torch.distributed.run --standalone --nproc-per-node 4 demo/train.py --layout tp2_fsdp2 --stop 60

The second command resumes from the newest step that the first one committed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from data import NEWLINE, describe, global_table, inputs_and_targets, standard_library, to_bytes
from model import GPT, LAYOUTS, SIZES, parallelize
from torch.optim.lr_scheduler import LambdaLR

import bytecheckpoint
from bytecheckpoint.dataloader import TokenBufferLoader, TokenRecipe, WorkerOptions


def make_optimizer(model: GPT, total: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return AdamW with weight decay on matrices only, and a schedule: warm-up, then cosine, `total` steps together."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    warmup = total // 6

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    return optimizer, LambdaLR(optimizer, factor)


def train(args: argparse.Namespace) -> None:
    """Train from the step to resume from to `args.stop`."""
    size = SIZES[args.size]
    torch.manual_seed(0)  # the same initial weights on every rank
    model = GPT(size)
    mesh = parallelize(model, args.layout, dist.get_world_size())
    optimizer, scheduler = make_optimizer(model, args.total)
    recipe = TokenRecipe(
        standard_library(),
        size.context + 1,  # the targets are the inputs, moved by one
        args.batch,
        tokenizer=to_bytes,
        document_end=NEWLINE,
        shuffle_buffer=16,
    )
    batches = TokenBufferLoader(
        recipe,
        rank=mesh["dp"].get_local_rank(),
        ranks=mesh["dp"].size(),
        saves=mesh["tp"].get_local_rank() == 0,  # ranks of one tensor-parallel group feed the same rows
        workers=WorkerOptions(args.workers, state_every=args.save_every or None),
    )
    states = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "dataloader": batches,
        "rng": bytecheckpoint.rng_state(),
    }
    with bytecheckpoint.CheckpointManager(args.checkpoints, states, every=args.save_every or None) as manager:
        restored = manager.restore_latest() if args.resume_from is None else manager.restore(args.resume_from)
        if restored is not None:
            record(args, event="load", step=restored.step)
        for step in range(manager.step + 1, args.stop + 1):
            batch = next(batches)
            loss = model(*inputs_and_targets(batch["tokens"]))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            fed = describe(global_table(batch, mesh))  # shows that it is the batch of the uninterrupted run
            record(args, event="step", step=step, loss=global_mean(loss), time=time.time(), **fed)

            began = time.perf_counter()
            if manager.maybe_save(step):
                record(args, event="save", step=step, stall=time.perf_counter() - began)


def global_mean(loss: torch.Tensor) -> float:
    """Return the loss over the global batch. Every rank has as many rows; tensor-parallel ranks have the same ones."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def record(args: argparse.Namespace, **event: object) -> None:
    """Append one JSON line to `args.record`, on rank 0 only."""
    if dist.get_rank() == 0:
        with args.record.open("a") as file:
            print(json.dumps(event), file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", choices=LAYOUTS, default="plain", help="how the model lies on the ranks")
    parser.add_argument("--size", choices=SIZES, default="10M", help="parameters")
    parser.add_argument("--workers", type=int, default=1, help="of each rank's data loader; 0: the rank itself")
    parser.add_argument("--batch", type=int, default=16, help="rows of a global batch")
    parser.add_argument("--stop", type=int, default=60, help="last step to train")
    parser.add_argument("--total", type=int, default=60, help="length of the learning rate's schedule, in steps")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints; 0: none")
    parser.add_argument("--checkpoints", type=Path, default=Path("demo-output/checkpoints"))
    parser.add_argument("--resume-from", type=int, help="step; default: the newest committed one, if there is any")
    parser.add_argument("--record", type=Path, default=Path("demo-output/record.jsonl"), help="losses and stalls")
    args = parser.parse_args()
    args.record.parent.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
