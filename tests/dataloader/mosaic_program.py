"""A rank of a job that reads by MosaicML Streaming; `test_mosaic.py` runs it, and gives its arguments as JSON.

It goes on from the checkpoint, if there is one, takes some steps, saves, and prints the ids of each step as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from streaming import StreamingDataLoader, StreamingDataset

import bytecheckpoint
from bytecheckpoint.dataloader.mosaic import MosaicLoader


def main(shards: str, meeting: str, checkpoint: str, steps: int, finish: bool, workers: int, **options: Any) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=int(os.environ["RANK"]), world_size=ranks
        )
    batch = options.pop("global_batch", 12) // ranks
    arguments = {"shuffle": True, "shuffle_seed": 7, "num_canonical_nodes": 2} | options
    data = StreamingDataset(local=shards, batch_size=batch, **arguments)
    loader = MosaicLoader(StreamingDataLoader(data, batch_size=batch, num_workers=workers))
    if os.path.exists(checkpoint):
        bytecheckpoint.load(checkpoint, {"dataloader": loader})
        bytecheckpoint.save(checkpoint, {"dataloader": loader})  # before the first batch: nothing may change
        bytecheckpoint.load(checkpoint, {"dataloader": loader})
    fed: list[list[int]] = []
    while len(fed) < steps:
        for step in loader:
            fed.append(step["id"].tolist())
            if len(fed) == steps and not finish:
                break
    bytecheckpoint.save(checkpoint, {"dataloader": loader})
    print(json.dumps(fed))
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
