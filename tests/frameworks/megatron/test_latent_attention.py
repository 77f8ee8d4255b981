"""Multi-latent attention, with its down projections apart and fused: each loads what the other saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.errors import IncompatibleCheckpointError
from tests.support.comparisons import assert_complete, assert_same_checkpoints, saved_tensors
from tests.support.megatron.models import (
    Layout,
    MegatronModel,
    coordinate_values,
    gpt_chunks,
    initialize_parallel,
    transformer_config,
)
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(300)

Q, KV, WIDTH = 8, 12, 16  # rows of the two down projections, and their columns


def latent_model(layout: Layout, *, fused: bool, steps: bool = True) -> MegatronModel:
    """Return a model whose optimizer has made one step, unless `steps` is False."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention

    initialize_parallel(layout)
    config = transformer_config(
        layout,
        multi_latent_attention=True,
        q_lora_rank=Q,
        kv_lora_rank=KV - 4,
        qk_head_dim=4,
        qk_pos_emb_head_dim=4,
        v_head_dim=4,
        rope_type="rope",
    )
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    attention = spec.submodules.self_attention
    attention.submodules.core_attention = IdentityOp  # without parameters; Megatron has one that fits for GPUs only
    if fused:
        attention.module = FusedMLASelfAttention
        attention.submodules.linear_qkv_down_proj = ColumnParallelLinear
        attention.submodules.linear_q_down_proj = attention.submodules.linear_kv_down_proj = None
    given = {"transformer_layer_spec": spec, "position_embedding_type": "rope"}
    model = MegatronModel(layout, gpt_chunks(layout, config, lambda virtual: given), clip_grad=0.0)
    if steps:
        for _, parameter in model.named_parameters():
            parameter.main_grad.fill_(0.01)
        model.optimizer.step()
    return model


def save_first(layout: Layout, path: str) -> None:
    """Save a model that is not fused, whose every element says which it is, in one process."""
    model = latent_model(layout, fused=False)
    model.fill_with_coordinates(5)
    bytecheckpoint.save(path, model.states())


def load_and_save(layout: Layout, fused: bool, source: str, path: str) -> None:
    """Load into a new optimizer, then into one that has made a step; save."""
    for steps in (False, True):
        model = latent_model(layout, fused=fused, steps=steps)
        assert any(name.endswith("linear_qkv_down_proj.weight") for name, _ in model.named_parameters()) == fused
        assert_complete(bytecheckpoint.load(source, model.states()))
    if fused and layout.world == 1:
        (weight,) = (
            p for n, p in model.named_parameters() if n.endswith("layers.0.self_attention.linear_qkv_down_proj.weight")
        )
        name = "decoder.layers.0.self_attention.linear_{}_down_proj.weight"
        want = [coordinate_values(5, name.format(part), (rows, WIDTH)) for part, rows in (("q", Q), ("kv", KV))]
        assert torch.equal(weight, torch.cat(want).to(weight.dtype))
    bytecheckpoint.save(path, model.states())


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp=2, bf16=True, buckets=300),
        Layout(pp=2, bf16=True, distributed=False),
        Layout(dp=2, bf16=True, overlap=True),
    ],
    ids=str,
)
def test_fused_down_projections(worlds: Worlds, layout: Layout, first: str, tmp_path: Path) -> None:
    fused, again = str(tmp_path / "fused"), str(tmp_path / "again")
    one = Layout(bf16=layout.bf16)
    worlds.run(1, save_first, one, first)
    worlds.run(layout.world, load_and_save, layout, True, first, fused)
    assert_same_checkpoints(first, fused)
    worlds.run(1, load_and_save, one, False, fused, again)
    assert_same_checkpoints(first, again)
    worlds.run(1, load_and_save, one, True, again, f"{again}-fused")
    assert_same_checkpoints(first, f"{again}-fused")


def save_fused_in_parts(layout: Layout, source: str, path: str) -> None:
    model = latent_model(layout, fused=True)
    assert_complete(bytecheckpoint.load(source, model.states()))
    bytecheckpoint.save(path, model.states())


def test_fused_down_projections_under_tensor_parallelism(worlds: Worlds, first: str, tmp_path: Path) -> None:
    """A rank has a part of both."""
    worlds.run(1, save_first, Layout(), first)
    worlds.run(2, save_fused_in_parts, Layout(tp=2), first, str(tmp_path / "fused"))
    assert_same_checkpoints(first, tmp_path / "fused")


def other_steps(source: str, path: str) -> None:
    """Load parts with different steps into one fused parameter, which has one."""
    model = latent_model(Layout(), fused=False)
    model.fill_with_coordinates(5, lambda name: 3.0 if "linear_q_down" in name else 4.0)
    bytecheckpoint.save(path, model.states())
    with pytest.raises(
        IncompatibleCheckpointError, match=r"linear_kv_down_proj.*is 4\.0, and that of a parameter fused"
    ):
        bytecheckpoint.load(path, latent_model(Layout(), fused=True).states())


def test_parts_that_have_made_different_steps(worlds: Worlds, first: str, path: str) -> None:
    worlds.run(1, other_steps, first, path)
    assert saved_tensors(path)
