"""The worker: trains the GPT under torchrun, with checkpoints that any other layout can resume.

    python -m torch.distributed.run --standalone --nproc-per-node 2 demo/train.py --layout fsdp2 --stop 60

Run it again with another layout and another number of ranks, and it goes on from the newest committed step.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from data import Batches, standard_library_text
from model import GPT, LAYOUTS, SIZES, parallelize
from torch.nn.functional import cross_entropy

import bytecheckpoint


def newest_step(root: Path) -> int:
    """The newest committed step under `root`, 0 when there is none. The catalog's presence is the commit."""
    return max((int(p.parent.name.removeprefix("step_")) for p in root.glob("step_*/metadata.parquet")), default=0)


def warmup_then_cosine(step: int, *, warmup: int = 10, total: int) -> float:
    """The factor on the learning rate at `step` (from 0)."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def train(args: argparse.Namespace) -> None:
    """Train from the newest committed step to `args.stop`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = SIZES[args.size]
    torch.manual_seed(0)  # the same initial weights on every rank
    model = GPT(size)
    mesh = parallelize(model, args.layout, world_size)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
    )
    schedule = lambda step: warmup_then_cosine(step, total=args.total)  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    dp_rank, dp_size = (mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)
    batches = Batches(standard_library_text(), size.context, args.batch, rank=dp_rank, ranks=dp_size)

    extra = {"step": 0, "rng": torch.get_rng_state()}
    states = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": batches, "extra_states": extra
    }
    start = newest_step(args.checkpoints)
    if start:
        report = bytecheckpoint.load(args.checkpoints / f"step_{start:08d}", states)
        torch.set_rng_state(extra["rng"])
        assert extra["step"] == start
        log(args, event="load", step=start, seconds=report.total_seconds, bytes=report.bytes_read)

    handle = None
    for step in range(start + 1, args.stop + 1):
        inputs, targets = next(batches)
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

        # Every rank saw as many samples, so the mean over ranks is the mean over the global batch.
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        log(args, event="step", step=step, time=time.time(), loss=mean.item() / world_size)

        if args.save_every and step == 1:
            # Now the optimizer has its state: plan the saves and touch the staging memory ahead of the first one.
            bytecheckpoint.prepare(states)
        if args.save_every and step % args.save_every == 0:
            extra.update(step=step, rng=torch.get_rng_state())
            began = time.perf_counter()
            handle = bytecheckpoint.save(args.checkpoints / f"step_{step:08d}", states, async_checkpoint=True)
            log(args, event="save", step=step, stall=time.perf_counter() - began)
    if handle is not None:
        handle.result()  # an error in the background ends this run here, not silently


def log(args: argparse.Namespace, **record: object) -> None:
    """Append one JSON line; rank 0 speaks for all."""
    if dist.get_rank() == 0:
        with args.record.open("a") as file:
            print(json.dumps(record), file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", choices=LAYOUTS, default="plain")
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--stop", type=int, required=True, help="last step to train")
    parser.add_argument("--total", type=int, help="length of the learning rate's schedule, in steps (default: --stop)")
    parser.add_argument("--batch", type=int, default=8, help="samples per step, over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints; 0: never")
    parser.add_argument("--checkpoints", type=Path, default=Path("demo-output/checkpoints"))
    parser.add_argument("--record", type=Path, default=Path("demo-output/record.jsonl"))
    args = parser.parse_args()
    args.total = args.total or args.stop
    args.record.parent.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
