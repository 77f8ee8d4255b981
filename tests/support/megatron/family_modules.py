"""Modules that models of some families need beside those of Megatron-Core, whose names are those of Megatron-Bridge.

Import this module after `use_cpu`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

FOUR_NORMS = ("gemma2", "gemma3_text", "glm4")
POST_NORMS = ("olmo2", "olmo3", "exaone4")


class PlainAttention(torch.nn.Module):
    """Attention with values of any size, biases and soft caps, which Megatron-Core has for GPUs only or not at all."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale, self.cap = softmax_scale, getattr(config, "attn_logit_softcapping", None)

    def forward(
        self, query: Any, key: Any, value: Any, mask: Any, *_: Any, attention_bias: Any = None, **__: Any
    ) -> torch.Tensor:
        length, batch, heads = query.shape[:3]
        key, value = (x.repeat_interleave(heads // x.shape[2], 2) for x in (key, value))
        scores = torch.einsum("sbnd,tbnd->bnst", query, key) * self.scale
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        if attention_bias is not None:
            scores = scores + attention_bias
        scores = scores.masked_fill(mask, -torch.inf)
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


class NormOfResidual(torch.nn.LayerNorm):
    """A norm whose output is the residual, too, as BERT has them."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, y


def residual_sum(factor: float) -> Any:
    """Return a module that adds the scaled output of attention or MLP to the residual."""
    return lambda *_: lambda output, residual, _: residual + factor * output[0]


def block_spec(family: str, config: Any, **virtual: int) -> Any:
    """Return the specification of a family's decoder, of the chunk `virtual`."""
    if config.normalization == "LayerNorm":
        return get_gpt_layer_local_spec(normalization="LayerNorm")
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    spec = get_gpt_decoder_block_spec(plain, use_transformer_engine=False, normalization="RMSNorm", **virtual)
    for layer in spec.layer_specs:
        change_layer(layer, family, config)
    if linear := config.linear_attention_freq:
        # Megatron-Core has the kernels of delta nets for CPUs as well, but asks for a package with those for GPUs.
        common.HAVE_FLA, common.l2norm = True, lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        parts = common.GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
        first = get_transformer_layer_offset(config, **virtual)
        spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]
        for layer, is_linear in zip(spec.layer_specs, linear[first:], strict=False):
            if is_linear:
                layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return spec


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by the names that its sharded state dict has, at any tensor parallelism."""
    found = {n: t.detach() for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    if "lm_head.output_layer.weight" in found:
        del found["output_layer.weight"]  # a second name
    for name, module in model.named_modules():
        if isinstance(module, GatedDeltaNet):
            parts = dict(zip(module.in_proj_split_names, module.in_proj_split_sections, strict=True))
            fused = {"in_proj.weight": [*parts], "conv1d.weight": ["query", "key", "value"]}
        elif type(module).__name__ == "MambaMixer":
            parts = dict(zip(("z", "x", "B", "C", "dt"), module.in_proj.weight.partition_sizes, strict=True))
            fused = {"in_proj.weight": [*parts], "conv1d_weight": ["x", "B", "C"], "conv1d_bias": ["x", "B", "C"]}
        else:
            continue
        for own, kinds in fused.items():
            cut = found.pop(f"{name}.{own}").split([parts[kind] for kind in kinds])
            found |= {f"{name}.{own}.{kind}": tensor for kind, tensor in zip(kinds, cut, strict=True)}
    return found


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


def bert(config: Any, **given: Any) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a BertModel and a function of tokens that returns its logits and those of the next sentence."""
    spec = bert_layer_local_spec
    if config.apply_residual_connection_post_layernorm:  # which Megatron-Core 0.19 leaves to the norms
        norms = dict.fromkeys(["input_layernorm", "pre_mlp_layernorm"], NormOfResidual)
        spec = replace(spec, submodules=replace(spec.submodules, **norms))
    model = BertModel(config, 2, spec, **given)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        found, next_sentence = model(ids, torch.ones_like(ids), torch.zeros_like(ids))
        return torch.cat([found[0, :, :37], next_sentence.expand(ids.shape[1], 2)], 1)

    return model, logits


def t5(config: Any, encoder_layers: int, **given: Any) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a T5Model and a function of tokens that returns the logits of the reversed tokens."""
    encoder, decoder = encoder_model_with_local_spec(), decoder_model_with_local_spec()
    for attention in (
        encoder.submodules.self_attention, decoder.submodules.self_attention, decoder.submodules.cross_attention
    ):  # fmt: skip
        attention.submodules.core_attention = PlainAttention
    blocks = [
        TransformerBlockSubmodules([spec] * count, layer_norm=WrappedTorchNorm)
        for spec, count in ((encoder, encoder_layers), (decoder, config.num_layers))
    ]
    model = T5Model(config, replace(config, num_layers=encoder_layers), *blocks, **given)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        later = torch.triu(torch.ones(ids.shape[1], ids.shape[1]), 1).bool()[None, None]
        none = torch.zeros_like(later)
        return model(ids, ids.flip(1), none, later, none)[0]

    return model, logits


def change_model(model: Any) -> None:
    """Cap the logits of a model as its configuration says."""
    if cap := getattr(model.config, "final_logit_softcapping", None):
        model.output_layer.register_forward_hook(lambda *call: (cap * torch.tanh(call[-1][0] / cap), call[-1][1]))
