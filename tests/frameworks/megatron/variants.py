"""Variants of the GPT model: models in which something differs from the usual one, and what ranks run with them."""

from __future__ import annotations

from typing import Any

import torch

import bytecheckpoint
from tests.support.comparisons import assert_complete
from tests.support.megatron.models import (
    Layout,
    MegatronModel,
    gpt_chunks,
    initialize_parallel,
    transformer_config,
)

#: Name of a variant -> changes of the transformer's configuration.
VARIANTS: dict[str, dict[str, Any]] = {
    "thirds": {},  # its dimensions can be cut in three
    "fewer layers": {"num_layers": 4},  # of the same size
    "grouped queries": {"num_query_groups": 2, "add_qkv_bias": True, "qk_layernorm": True},
    "layer norm": {"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False},
    "softmax offset": {"softmax_type": "learnable"},
    "gated attention": {"attention_output_gate": True},
    "shared expert": {
        "num_moe_experts": 6,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 12,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    },
    "some experts": {
        "num_moe_experts": 6,
        "moe_layer_freq": [0, 1, 0, 1, 1, 0],
        "moe_ffn_hidden_size": 12,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": True,
    },
    "predicts more": {"mtp_num_layers": 2},
    "uneven stages": {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
}


def variant_chunks(variant: str, layout: Layout) -> list[Any]:
    """Return the bare chunks of this rank's stage."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    initialize_parallel(layout)
    changes = VARIANTS[variant]
    layers = 4 if variant == "uneven stages" else 6
    size = {"num_layers": layers, "hidden_size": 24, "num_attention_heads": 6}
    config = transformer_config(layout, **(size | changes))

    def arguments(virtual: dict[str, int]) -> dict[str, Any]:
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **virtual)
        found = {"transformer_layer_spec": block, "position_embedding_type": "rope"}
        if "mtp_num_layers" in changes:
            found["mtp_block_spec"] = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, **virtual)
        return found

    return gpt_chunks(layout, config, arguments)


class VariantModel(MegatronModel):
    """A variant with an optimizer that has made one step, unless `stepped` is False."""

    def __init__(
        self,
        variant: str,
        layout: Layout,
        *,
        stepped: bool = True,
        parallel: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(layout, variant_chunks(variant, layout), parallel=parallel, **({"clip_grad": 0.0} | options))
        if stepped:
            self.step()

    def step(self) -> None:
        """Make one step, with the same gradient everywhere."""
        for _, parameter in self.named_parameters():
            if parameter.requires_grad:
                parameter.main_grad.fill_(0.01)
        self.optimizer.step()

    def fill(self, seed: int) -> None:
        """Fill with coordinates; give every parameter a step and every param group a learning rate of its own."""
        self.fill_with_coordinates(seed)
        for number, state in enumerate(self.inner_states()):
            state["step"].fill_(number + 2.0)
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] = (number + 1) / 64


def save_variant(variant: str, layout: Layout, path: str, *, stepped: bool = True) -> int:
    """Save, in one process, a state whose every element says which it is, or a state before the first step.

    Returns:
        The number of tensors in the model's state_dict.
    """
    assert layout.world == 1
    trained = VariantModel(variant, layout, stepped=stepped)
    if stepped:
        trained.fill(5)
    bytecheckpoint.save(path, trained.states())
    return len([v for v in trained.bare[0].state_dict().values() if isinstance(v, torch.Tensor)])


def load_and_save_variant(
    variant: str, layout: Layout, source: str, path: str, *, stepped: bool, strict: bool = True
) -> None:
    """Load, into a new model or over other state, and save again; `strict` as in `load`."""
    trained = VariantModel(variant, layout, stepped=stepped)
    if stepped:
        trained.fill(6)
    assert_complete(bytecheckpoint.load(source, trained.states(), strict=strict))
    steps = [state["step"].data_ptr() for state in trained.inner_states()]
    assert len(set(steps)) == len(steps), "parameters share a step"
    bytecheckpoint.save(path, trained.states())
