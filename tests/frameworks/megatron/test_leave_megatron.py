"""A run of Megatron goes on under FSDP2 with the names of transformers, with its optimizer; and comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from bytecheckpoint import HuggingFaceView
from bytecheckpoint.engine.view_files import VIEW_INDEX
from tests.support.llama import Llama
from tests.support.megatron.models import RATE, Layout, gpt_chunks, transformer_config
from tests.support.megatron.rank_files import save_rank_files
from tests.support.megatron.torch_dist import save_torch_dist, start_with_own_shards
from tests.support.megatron.training import param_groups_of, scale_at, tokens
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(400)

STEPS = 3
KINDS = ("fully_reshardable", "dp_reshardable")
LAYOUTS = [
    Layout(tp=2, dp=2, tied=False),
    Layout(tp=2, pp=2, tied=False, sequence=True),
    Layout(tp=1, pp=2, vpp=2, dp=2, tied=False, distributed=False),
    Layout(tp=2, dp=2, tied=False, bf16=True),
]


def llama_chunks(layout: Layout) -> list[Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    given = {"transformer_layer_spec": spec, "position_embedding_type": "rope", "rotary_base": 10000}
    config = transformer_config(layout, num_query_groups=2, layernorm_epsilon=1e-5)
    return gpt_chunks(layout, config, lambda virtual: given)


def in_megatron(layout: Layout, folder: str, source: str | None = None) -> list[float]:
    """Train, save, and go on; return the losses behind the save. `source` is where the training begins instead."""
    trainer = start_with_own_shards(layout, RATE, build=llama_chunks)
    if source is None:
        trainer.train(STEPS)
        view = HuggingFaceView(layout="llama", files_from=folder)
        handle = bytecheckpoint.save(f"{folder}/own", trainer.states(), view=view, async_checkpoint=True)
        assert handle.result().view == "index"
        save_rank_files(trainer, folder)
        for kind in KINDS if layout.distributed else ():
            save_torch_dist(trainer, f"{folder}/{kind}", kind)
    else:
        states = trainer.states()
        bytecheckpoint.load(source, {name: states[name] for name in ("model", "optimizer")}, layout="auto")
        trainer.step = 2 * STEPS
        trainer.scheduler.step(trainer.step)
    return trainer.train(STEPS)


def under_fsdp(source: str, target: str | None, first: int) -> list[float]:
    """Load into FSDP2, train, save, and go on; return all losses. Without `target` nothing is saved."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Llama()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(param_groups_of(dict(model.named_parameters())), foreach=False)
    bytecheckpoint.load(source, {"model": model, "optimizer": optimizer}, layout="auto", cast=True)
    losses = []
    for step in range(first, first + (STEPS if target is None else 2 * STEPS)):
        if step == first + STEPS and target is not None:
            bytecheckpoint.save(target, {"model": model, "optimizer": optimizer})
        for group in optimizer.param_groups:
            group["lr"] = (RATE if group["weight_decay"] else RATE / 2) * scale_at(step)
        optimizer.zero_grad()
        loss = model(tokens(step).chunk(mesh.size())[mesh.get_local_rank()])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / mesh.size())
    return losses


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_next_losses(worlds: Worlds, layout: Layout, tmp_path: Path) -> None:
    """Of a checkpoint of this package, whose files are a view too, and back, and of all kinds of Megatron's own."""
    tolerance = 2e-2 if layout.bf16 else 2e-5
    (tmp_path / "config.json").write_text(json.dumps(Llama().config.to_dict()))
    expected = worlds.run(layout.world, in_megatron, layout, str(tmp_path), timeout=200)[0]
    found = worlds.run(2, under_fsdp, str(tmp_path / "own"), str(tmp_path / "fsdp"), STEPS, timeout=200)[0]
    assert found[:STEPS] == pytest.approx(expected, rel=tolerance)
    files = json.loads((tmp_path / "own" / VIEW_INDEX).read_text())["weight_map"]
    viewed = {key: value for file in set(files.values()) for key, value in load_file(tmp_path / "own" / file).items()}
    assert viewed.keys() == files.keys() == Llama().state_dict().keys()
    with bytecheckpoint.open(tmp_path / "own", layout="llama") as shown:
        assert all(torch.equal(value, shown[f"model/{key}"][...]) for key, value in viewed.items())
    back = worlds.run(layout.world, in_megatron, layout, "", str(tmp_path / "fsdp"), timeout=200)[0]
    assert back == pytest.approx(found[STEPS:], rel=tolerance)
    for kind in (f"iter_{STEPS:07}", *(KINDS if layout.distributed else ())):
        losses = worlds.run(2, under_fsdp, str(tmp_path / kind), None, STEPS, timeout=200)[0]
        assert losses == pytest.approx(found[:STEPS], rel=tolerance), kind
