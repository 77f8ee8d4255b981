"""GPT models in which something is unlike the plain one of worlds.py, and what ranks run with them."""

from __future__ import annotations

from typing import Any

import torch

import bytecheckpoint
from tests.frameworks.megatron.jobs import stepped, wrong
from tests.frameworks.megatron.worlds import Layout, code, prepare

HIDDEN, HEADS, LENGTH = 24, 6, 8

#: Name of a form -> settings of the transformer.
FORMS: dict[str, dict[str, Any]] = {
    "thirds": {},  # its dimensions can be cut in three
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


def chunks_of(form: str, layout: Layout) -> list[Any]:
    """The bare chunks of this rank's stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    prepare(layout)
    half = torch.bfloat16 if layout.bf16 else torch.float32
    changes = FORMS[form]
    given: dict[str, Any] = {
        "num_layers": 4 if form == "uneven stages" else 6,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": 24,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "params_dtype": half,
        "pipeline_dtype": half,
        "bf16": layout.bf16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp or layout.tp,
        "sequence_parallel": layout.sequence,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
    }
    config = TransformerConfig(**(given | changes))
    found = []
    for number in range(layout.vpp):
        virtual = {"vp_stage": number} if layout.vpp > 1 else {}
        if virtual:
            parallel_state.set_virtual_pipeline_model_parallel_rank(number)
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **virtual)
        more = {}
        if "mtp_num_layers" in changes:
            more["mtp_block_spec"] = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, **virtual)
        found.append(
            GPTModel(
                config=config,
                transformer_layer_spec=block,
                vocab_size=layout.vocabulary,
                max_sequence_length=LENGTH,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
                share_embeddings_and_output_weights=layout.tied,
                position_embedding_type="rope",
                **more,
                **virtual,
            )
        )
    return found


class Made:
    """A model with an optimizer that has stepped once.

    Attributes:
        bare: the chunks themselves.
        chunks: as they are trained.
        optimizer: Megatron's.
    """

    def __init__(
        self, form: str, layout: Layout, *, steps: bool = True, parallel: dict[str, Any] | None = None, **options: Any
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.bare = chunks_of(form, layout)
        config = self.bare[0].config
        wrapping = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=layout.buckets is not None or layout.overlap,
            overlap_param_gather=layout.overlap,
            use_distributed_optimizer=layout.distributed,
            bucket_size=layout.buckets,
            **(parallel or {}),
        )
        inner = [Float16Module(config, chunk) for chunk in self.bare] if layout.bf16 else self.bare
        self.chunks = [DistributedDataParallel(config, wrapping, chunk) for chunk in inner]
        settings: dict[str, Any] = {
            "optimizer": "adam",
            "lr": 0.01,
            "weight_decay": 0.1,
            "clip_grad": 0.0,
            "bf16": layout.bf16,
            "params_dtype": config.params_dtype,
            "use_distributed_optimizer": layout.distributed,
            "overlap_param_gather": layout.overlap,
        }
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**(settings | options)), self.chunks)
        if steps:
            self.step()

    def step(self) -> None:
        """One step of made-up gradients."""
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    parameter.main_grad.fill_(0.01)
        self.optimizer.step()

    def states(self) -> dict[str, Any]:
        return {"model": self.chunks if len(self.chunks) > 1 else self.chunks[0], "optimizer": self.optimizer}

    def fill(self, seed: int) -> None:
        """Every element says which it is of this rank's part."""
        named = {id(p): name for chunk in self.bare for name, p in chunk.named_parameters()}
        with torch.no_grad():
            for chunk in self.bare:
                for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                    tensor.copy_(code(seed, name, tensor.shape))
            for optimizer in self.optimizer.chained_optimizers:
                for number, (name, master, state) in enumerate(stepped(optimizer, named)):
                    if master is not None:
                        master.copy_(code(seed, f"{name}/master", master.shape))
                    for slot in ("exp_avg", "exp_avg_sq"):
                        state[slot].copy_(code(seed, f"{name}/{slot}", state[slot].shape))
                    state["step"].fill_(number + 2.0)
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] = (number + 1) / 64


def save_form(form: str, layout: Layout, path: str) -> int:
    """In one process, where all parameters are whole; the number of tensors in the model's state_dict."""
    made = Made(form, layout)
    made.fill(5)
    bytecheckpoint.save(path, made.states())
    return len([v for v in made.bare[0].state_dict().values() if isinstance(v, torch.Tensor)])


def pass_form_on(form: str, layout: Layout, source: str, path: str, used: bool) -> list[str]:
    """Load and save again."""
    made = Made(form, layout, steps=used)
    if used:
        made.fill(6)
    problems = wrong(bytecheckpoint.load(source, made.states()))
    bytecheckpoint.save(path, made.states())
    return problems
