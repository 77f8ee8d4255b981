"""Models of Transformers made from checkpoints: whole, and distributed over ranks of which each reads its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bytecheckpoint
from bytecheckpoint import IncompatibleCheckpointError, UsageError
from bytecheckpoint.integrations.transformers import describe_pretrained, from_checkpoint
from tests.integrations.transformers.test_views import llama
from tests.support.worlds import on_ranks


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(model: Any, wanted: Any) -> None:
    """Compare parameters, buffers that no checkpoint holds, and what both compute."""
    state = model.state_dict()
    assert all(torch.equal(full(state[name]), value) for name, value in wanted.state_dict().items())
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(full(model(tokens).logits), wanted.eval()(tokens).logits)


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(1)
def test_one_process(tmp_path: Path, tied: bool) -> None:
    model = llama(tied=tied)
    bytecheckpoint.save(tmp_path / "described", {"model": model, "huggingface": describe_pretrained(model)})
    made = from_checkpoint(tmp_path / "described")
    check(made, model)
    assert (made.lm_head.weight is made.model.embed_tokens.weight) is tied
    bytecheckpoint.save(tmp_path / "plain", {"policy": model})
    with pytest.raises(UsageError, match="no configuration"):
        from_checkpoint(tmp_path / "plain")
    check(from_checkpoint(tmp_path / "plain", config=model.config, state="policy"), model)
    model.save_pretrained(tmp_path / "folder")
    check(from_checkpoint(tmp_path / "folder"), model)
    half = from_checkpoint(tmp_path / "described", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert torch.equal(half.model.norm.weight, model.model.norm.weight.to(torch.bfloat16))
    model.config.num_hidden_layers = 3
    with pytest.raises(IncompatibleCheckpointError, match="layers"):
        from_checkpoint(tmp_path / "plain", config=model.config, state="policy")


@on_ranks(2)
def test_ranks_read_their_parts(path: str) -> None:
    model = llama(tied=False)
    bytecheckpoint.save(path, {"model": model, "huggingface": describe_pretrained(model)})
    mesh = init_device_mesh("cpu", (2,))

    def shard(made: Any) -> None:
        assert all(p.is_meta for p in made.parameters())
        for layer in made.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(made, mesh=mesh)

    made = from_checkpoint(path, distribute=shard)
    size = sum(p.nbytes for p in model.parameters())
    assert sum(p.to_local().nbytes for p in made.parameters()) < 0.6 * size
    check(made, model)
    read = torch.tensor(made.bytecheckpoint_report.bytes_read)
    dist.all_reduce(read)
    assert read < 2.2 * size  # blocks of a small file are read by both
