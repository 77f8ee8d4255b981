"""Makes golden folders of Megatron-Core: `python -m tests.formats.golden.make_megatron FOLDER`, with Megatron installed.

Each folder holds what Megatron saves of one state, tensor-parallel 2 x data-parallel 2, and expected.json the SHA-256 of
every tensor of that state, by the names of our own adapter.
"""

from __future__ import annotations

import json
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import torch

import bytecheckpoint
from tests.support.megatron.models import Layout
from tests.support.megatron.torch_dist import save_torch_dist, start_with_own_shards
from tests.support.worlds import Worlds

KINDS = ("fully_reshardable", "dp_reshardable")


def digests(path: str) -> dict[str, str]:
    """Return the SHA-256 of each tensor of a checkpoint, by the names of Transformer Engine."""
    found = {}
    with bytecheckpoint.open(path) as opened:
        names = {stored: name for tied in opened._catalog.aliases.values() for name, stored in tied.items()}
        for key in opened.tensors:
            stored = next((stored for stored in names if stored in key), "")
            data = opened.tensors[key][...].contiguous().reshape(-1).view(torch.uint8)
            renamed = key.replace(stored, names[stored]) if stored else key
            found[renamed] = sha256(data.numpy().tobytes()).hexdigest()
    return found


def save(folder: str) -> None:
    trainer = start_with_own_shards(Layout(tp=2, dp=2, bf16=True), lr=0.5)
    trainer.train(3)
    for kind in KINDS:
        save_torch_dist(trainer, f"{folder}/{kind}", kind)
    with tempfile.TemporaryDirectory() as scratch:
        states = trainer.states()
        path = [f"{scratch}/own"]
        torch.distributed.broadcast_object_list(path)
        bytecheckpoint.save(path[0], {name: states[name] for name in ("model", "optimizer")})
        if torch.distributed.get_rank() == 0:
            Path(folder, "expected.json").write_text(json.dumps(digests(path[0]), indent=0, sort_keys=True))
        torch.distributed.barrier()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as logs:
        worlds = Worlds(Path(logs))
        from tests.formats.golden.make_megatron import save  # by the name that the ranks import

        worlds.run(4, save, sys.argv[1], timeout=300)
        worlds.close()
