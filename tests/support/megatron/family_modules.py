"""Modules that models of some families need beside those of Megatron-Core, whose names are those of Megatron-Bridge.

Import this module after `use_cpu`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm

FOUR_NORMS = ("gemma2", "gemma3_text", "glm4")
POST_NORMS = ("olmo2", "olmo3", "exaone4")


class PlainAttention(torch.nn.Module):
    """Attention with values of any size and soft caps, which Megatron-Core has for GPUs only or not at all."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale, self.cap = softmax_scale, getattr(config, "attn_logit_softcapping", None)

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        length, batch, heads = query.shape[:3]
        key, value = (x.repeat_interleave(heads // x.shape[2], 2) for x in (key, value))
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.scale
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        scores = scores.masked_fill(torch.triu(torch.ones(length, length), 1).bool(), -torch.inf)
        return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), value).reshape(length, batch, -1)


class NormedLinear(RowParallelLinear):
    """A linear layer with a norm of its output."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **arguments: Any) -> None:
        super().__init__(input_size, output_size, config=config, **arguments)
        self.post_layernorm = WrappedTorchNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: torch.Tensor) -> Any:
        output, bias = super().forward(x)
        return self.post_layernorm(output), bias


class NormOfAllHeads(torch.nn.RMSNorm):
    """A norm of the queries or keys of all heads together."""

    def __init__(self, heads: int, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(heads * hidden_size, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(2)).view_as(x)


def residual_sum(factor: float) -> Any:
    """Return a module that adds the scaled output of attention or MLP to the residual."""
    return lambda *_: lambda output, residual, _: residual + factor * output[0]


def change_layer(layer: Any, family: str, config: Any) -> None:
    """Change the specification of a layer of Megatron-Core to that of a family."""
    layer = layer.submodules
    attention = layer.self_attention.submodules
    if family.startswith(("deepseek_v3", "gemma2")):
        attention.core_attention = PlainAttention
    if family in FOUR_NORMS + POST_NORMS:
        attention.linear_proj = layer.mlp.keywords["submodules"].linear_fc2 = NormedLinear
    if family in POST_NORMS:
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    if family in ("olmo2", "olmo3", "olmoe"):
        attention.q_layernorm = partial(NormOfAllHeads, config.num_attention_heads)
        attention.k_layernorm = partial(NormOfAllHeads, config.num_query_groups)
    if family == "granite":
        layer.self_attn_bda = layer.mlp_bda = residual_sum(config.residual_multiplier)


def change_model(model: Any) -> None:
    """Cap the logits of a model as its configuration says."""
    if cap := getattr(model.config, "final_logit_softcapping", None):
        model.output_layer.register_forward_hook(lambda *call: (cap * torch.tanh(call[-1][0] / cap), call[-1][1]))
