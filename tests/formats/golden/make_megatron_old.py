"""Makes a golden folder of Megatron-Core before 0.15: `python -m tests.formats.golden.make_megatron_old FOLDER NAME`.

Megatron-Core of that version has to come first in PYTHONPATH; `np.product` in it is `np.prod` since numpy 2. It saves
the state of tensor-parallel 2 x data-parallel 2, then one rank of it loads the folder, and NAME.expected.json has the
SHA-256 of every tensor that it then has.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from bytecheckpoint.formats.megatron import _unstacked
from tests.support.megatron.models import Layout, gpt_chunks, main_params, transformer_config
from tests.support.megatron.torch_dist import save_torch_dist, start_with_own_shards
from tests.support.megatron.training import Trainer
from tests.support.worlds import Worlds

KIND = "fully_sharded_model_space"
MOE = False


def build(layout: Layout) -> list[Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    given = {
        "transformer_layer_spec": get_gpt_layer_local_spec(
            num_experts=4 if layout.moe else None, normalization="RMSNorm"
        )
    }
    return gpt_chunks(
        layout,
        transformer_config(layout, num_layers=2, ffn_hidden_size=28, sequence_parallel=layout.moe and layout.tp > 1),
        lambda virtual: given,
    )


def save(folder: str) -> None:
    trainer = start_with_own_shards(Layout(tp=2, dp=2, bf16=True, moe=MOE), lr=0.5, build=build)
    trainer.train(3)
    save_torch_dist(trainer, folder, KIND)


def expect(folder: str) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    plain = DistributedOptimizer._set_main_param_and_optimizer_states

    @torch.no_grad()
    def with_step(self: Any, p: Any, tensors: dict[str, Any]) -> None:
        plain(self, p, {"step": torch.tensor(3.0), **tensors})  # Megatron forgets that torch's Adam has one

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    trainer = Trainer(Layout(bf16=True, moe=MOE), seed=9, build=build)
    trainer.train(1)  # so that the optimizer has state
    (chunk,) = trainer.bare
    metadata = {"distrib_optim_sharding_type": KIND, "chained_optim_avoid_prefix": True}
    state: dict[str, Any] = {"model": chunk.sharded_state_dict(metadata=metadata)}
    places = {
        item.data.data_ptr(): item for item in state["model"].values() if torch.is_tensor(getattr(item, "data", None))
    }
    state["optimizer"] = trainer.optimizer.sharded_state_dict(state["model"], is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load(state, folder)
    chunk.load_state_dict(loaded["model"], strict=False)
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    found = {}

    def note(key: str, tensor: torch.Tensor, shape: torch.Size) -> None:
        found[key] = sha256(tensor.detach().reshape(shape).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

    names = {}
    for name, p in chunk.named_parameters():
        item = places[p.data_ptr()]
        pattern, depth = _unstacked(item.key)
        names[id(p)] = pattern.format(*re.findall(r"\.(\d+)\.", name)[:depth])
        note(f"model/{names[id(p)]}", p, p.shape)
    for optimizer in trainer.optimizer.chained_optimizers:
        for p, main, first in main_params(optimizer):
            assert not first and main.numel() == p.numel()
            note(f"optimizer/state/{names[id(p)]}/master", main, p.shape)
            for slot in ("exp_avg", "exp_avg_sq"):
                note(f"optimizer/state/{names[id(p)]}/{slot}", optimizer.optimizer.state[main][slot], p.shape)
    Path(f"{folder}.expected.json").write_text(json.dumps(found, indent=0, sort_keys=True))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as logs:
        worlds = Worlds(Path(logs))
        from tests.formats.golden.make_megatron_old import expect, save  # by the names that the ranks import

        worlds.run(4, save, f"{sys.argv[1]}/{sys.argv[2]}", timeout=300)
        worlds.run(1, expect, f"{sys.argv[1]}/{sys.argv[2]}", timeout=300)
        worlds.close()
