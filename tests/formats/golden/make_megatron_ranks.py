"""Makes a golden folder of Megatron-Core with files of ranks: `python -m tests.formats.golden.make_megatron_ranks FOLDER`.

The files are what `generate_state_dict` and `get_checkpoint_name` of Megatron's own training program make of a model with
tensor-parallel 2 x pipeline-parallel 2 and two virtual stages. expected.json has the SHA-256 of every tensor of the model,
by the names of our own adapter.
"""

from __future__ import annotations

import json
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import bytecheckpoint
from tests.support.megatron.models import Layout, gpt_chunks, transformer_config
from tests.support.megatron.rank_files import save_rank_files
from tests.support.megatron.torch_dist import start_with_own_shards
from tests.support.worlds import Worlds


def build(layout: Layout) -> list[Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    given = {"transformer_layer_spec": spec, "position_embedding_type": "rope"}
    return gpt_chunks(layout, transformer_config(layout, num_query_groups=2, qk_layernorm=True), lambda virtual: given)


def save(folder: str) -> None:
    trainer = start_with_own_shards(Layout(tp=2, pp=2, vpp=2, tied=False, bf16=True), lr=0.5, build=build)
    trainer.train(2)
    save_rank_files(
        trainer, folder, num_layers=4, num_query_groups=2, group_query_attention=True, swiglu=True, optimizer=False
    )
    with tempfile.TemporaryDirectory() as scratch:
        own = [f"{scratch}/own"]
        torch.distributed.broadcast_object_list(own)
        bytecheckpoint.save(own[0], {"model": trainer.model})
        if torch.distributed.get_rank() == 0:
            with bytecheckpoint.open(own[0]) as found:
                digests = {
                    key: sha256(tensor[...].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
                    for key, tensor in found.tensors.items()
                }
            Path(folder, "expected.json").write_text(json.dumps(digests, indent=0, sort_keys=True))
        torch.distributed.barrier()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as logs:
        worlds = Worlds(Path(logs))
        from tests.formats.golden.make_megatron_ranks import save  # by the name that the ranks import

        worlds.run(4, save, sys.argv[1], timeout=200)
        worlds.close()
