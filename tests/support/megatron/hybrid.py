"""Hybrid models of Megatron-Core on the CPU: the kernels of mamba_ssm, which need a GPU, in plain torch.

Import this module after `use_cpu`.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import conv1d, pad, silu, softplus


class Linear(torch.nn.Linear):
    """A layer that all tensor-parallel ranks have alike, which Megatron-Core has with Transformer Engine only."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **_: Any) -> None:
        super().__init__(inputs, outputs, bias)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class RMSNormGated(torch.nn.Module):
    """A norm of groups of channels."""

    def __init__(self, hidden_size: int, eps: float, group_size: int, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps, self.group = torch.nn.Parameter(torch.ones(hidden_size)), eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self.group))
        return torch.nn.functional.rms_norm(groups, (self.group,), None, self.eps).flatten(-2) * self.weight


def mamba_split_conv1d_scan_combined(
    zxbcdt: Any, weight: Any, bias: Any, dt_bias: Any, a: Any, *, D: Any, headdim: int, ngroups: int, **_: Any
) -> torch.Tensor:
    """Return the output of a Mamba-2 mixer before its last norm, one step after the other."""
    heads, channels = len(a), len(weight)
    inner, states = heads * headdim, (channels - heads * headdim) // 2
    z, xbc, dt = zxbcdt.split([inner, channels, heads], -1)
    xbc = silu(conv1d(pad(xbc.mT, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=channels)).mT
    x, b, c = xbc.split([inner, states, states], -1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (s.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for s in (b, c))
    dt, state, found = softplus(dt + dt_bias), 0, []
    for t in range(x.shape[1]):
        change = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        state = torch.exp(dt[:, t] * a)[..., None, None] * state + change
        found.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(found, 1).flatten(2) * silu(z)


def hybrid_spec() -> Any:
    """Return the specification of a hybrid model's layers, in modules of Megatron-Core's own."""
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        sys.modules.setdefault(name, ModuleType(name))
    for name, found in (
        ("layernorm_gated", {"RMSNorm": RMSNormGated}),
        ("ssd_combined", dict.fromkeys(("mamba_chunk_scan_combined", KERNEL.__name__), KERNEL)),
    ):
        module = sys.modules.setdefault(f"mamba_ssm.ops.triton.{name}", ModuleType(name))
        vars(module).update(found)
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.moe import moe_layer
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    hybrid_block.TENorm = WrappedTorchNorm
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Linear
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    )
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    dense = partial(MLP.as_mlp_submodule, submodules=linears)
    experts = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)

    norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
    predicts = ModuleSpec(
        MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(eh_proj=ColumnParallelLinear, mtp_model_layer=None, **norms),
    )

    def layer(kind: Any, **submodules: Any) -> Any:
        return ModuleSpec(kind, submodules=TransformerLayerSubmodules(**submodules))

    return ModuleSpec(
        hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                MambaLayer, submodules=MambaLayerSubmodules(WrappedTorchNorm, mixer, get_bias_dropout_add)
            ),
            attention_layer=layer(
                TransformerLayer,
                input_layernorm=WrappedTorchNorm,
                self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
                self_attn_bda=get_bias_dropout_add,
            ),
            mlp_layer=layer(MLPLayer, pre_mlp_layernorm=WrappedTorchNorm, mlp=dense, mlp_bda=get_bias_dropout_add),
            moe_layer=layer(
                TransformerLayer, pre_mlp_layernorm=WrappedTorchNorm, mlp=experts, mlp_bda=get_bias_dropout_add
            ),
            mtp_block_spec=ModuleSpec(
                MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[predicts])
            ),
        ),
    )


def hybrid_model(config: Any, pattern: str, **arguments: Any) -> Any:
    """Return a hybrid model with layers of kinds such as "ME*-", or this rank's stage of "ME|*-"."""
    spec = hybrid_spec()
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(config, spec, hybrid_layer_pattern=pattern, **arguments)


KERNEL = mamba_split_conv1d_scan_combined
