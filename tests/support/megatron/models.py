"""GPT models of Megatron-Core at any layout, and values that say which element of which tensor they are."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.support.megatron.cpu import use_cpu
from tests.support.worlds import on_ranks

VOCABULARY, LENGTH = 32, 8
RATE = 0.01
# The parallel sizes that Megatron's process groups of this process are for, and the groups.
_sizes: list[int] = []
_groups: list[Any] = []


@dataclass(frozen=True)
class Layout:
    """The structure of a model, and its distribution over ranks."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    dp: int = 1
    etp: int = 0  # tensor parallelism of experts; 0: as for the rest
    sequence: bool = False
    distributed: bool = True
    overlap: bool = False
    bf16: bool = False
    moe: bool = False
    tied: bool = True
    gated: bool = True
    bias: bool = False
    buckets: int | None = None
    vocabulary: int = VOCABULARY
    frozen: bool = True
    fp16: bool = False
    optimizer: str = "adam"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        parts = [f"{n}{v}" for n in ("tp", "pp", "vpp", "ep", "dp") if (v := getattr(self, n)) > 1]
        flags = [n for n in ("sequence", "overlap", "bf16", "moe") if getattr(self, n)]
        off = [] if self.distributed else ["whole"]
        return "-".join(parts + flags + off) or "one"


#: Makes a test run on the ranks of its parameter `layout`.
in_layout = on_ranks(lambda layout, **_: layout.world, timeout=200)


def initialize_parallel(layout: Layout) -> None:
    """Make Megatron's process groups for a layout, and end those of the last one."""
    use_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sizes = [layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, layout.dp]
    if sizes != _sizes:
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        # Megatron forgets its groups without ending them, and each has threads.
        for group in _groups:
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        gc.collect()
        others = set(dist.distributed_c10d._world.pg_map)
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.vpp if layout.vpp > 1 else None,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp or None,
        )
        _groups[:] = [group for group in dist.distributed_c10d._world.pg_map if group not in others]
        _sizes[:] = sizes
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)


def forget_parallel() -> None:
    """Have the next `initialize_parallel` make new groups, after a test that made its own."""
    _sizes.clear()


def transformer_config(layout: Layout, **changes: Any) -> Any:
    """Return the model's configuration, with `changes`."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    dtype = torch.bfloat16 if layout.bf16 else torch.float16 if layout.fp16 else torch.float32
    config: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "ffn_hidden_size": 24,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "gated_linear_unit": layout.gated,
        "activation_func": torch.nn.functional.silu if layout.gated else torch.nn.functional.gelu,
        "add_bias_linear": layout.bias,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": layout.bf16,
        "fp16": layout.fp16,
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
    if layout.moe:
        config |= {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 12,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": False,
        }
    latent = changes.get("multi_latent_attention", False)
    return (MLATransformerConfig if latent else TransformerConfig)(**(config | changes))


def gpt_chunks(layout: Layout, config: Any, arguments: Callable[[dict[str, int]], dict[str, Any]]) -> list[Any]:
    """Return the bare chunks of this rank's stage.

    Args:
        layout: how the model is spread.
        config: its configuration.
        arguments: further arguments of GPTModel for a chunk, from {"vp_stage": number} with virtual stages and {} else.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    chunks = []
    for number in range(layout.vpp):
        virtual = {"vp_stage": number} if layout.vpp > 1 else {}
        if virtual:
            parallel_state.set_virtual_pipeline_model_parallel_rank(number)
        torch.manual_seed(11)
        chunks.append(
            GPTModel(
                config=config,
                vocab_size=layout.vocabulary,
                max_sequence_length=LENGTH,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
                share_embeddings_and_output_weights=layout.tied,
                **arguments(virtual),
                **virtual,
            )
        )
    return chunks


def build_chunks(layout: Layout) -> list[Any]:
    """Return the bare chunks of this rank's stage of the usual model."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(num_experts=4 if layout.moe else None, normalization="RMSNorm")
    given = {"transformer_layer_spec": spec, "position_embedding_type": "learned_absolute"}
    chunks = gpt_chunks(layout, transformer_config(layout), lambda virtual: given)
    for model in chunks:
        if layout.frozen and hasattr(model, "embedding"):
            model.embedding.position_embeddings.weight.requires_grad = False
    return chunks


class MegatronModel:
    """A model with its optimizer.

    Args:
        layout: how it is spread.
        bare: the chunks of this rank's stage.
        parallel: changes of the configuration of DistributedDataParallel.
        **options: changes of the configuration of the optimizer.

    Attributes:
        bare: the chunks, unwrapped.
        chunks: the wrapped chunks, one per virtual stage.
        optimizer: Megatron's.
    """

    def __init__(
        self, layout: Layout, bare: list[Any], *, parallel: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.layout, self.bare = layout, bare
        config = bare[0].config
        wrapping = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=layout.overlap or layout.buckets is not None,
            overlap_param_gather=layout.overlap,
            use_distributed_optimizer=layout.distributed,
            bucket_size=layout.buckets,
            **(parallel or {}),
        )
        inner = [Float16Module(config, chunk) for chunk in bare] if layout.bf16 or layout.fp16 else bare
        self.chunks = [DistributedDataParallel(config, wrapping, chunk, disable_bucketing=False) for chunk in inner]
        settings: dict[str, Any] = {
            "optimizer": layout.optimizer,
            "sgd_momentum": 0.9,
            "lr": RATE,
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            "bf16": layout.bf16,
            "fp16": layout.fp16,
            "params_dtype": config.params_dtype,
            "use_distributed_optimizer": layout.distributed,
            "overlap_param_gather": layout.overlap,
            "initial_loss_scale": 2.0**10,
        }
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**(settings | options)), self.chunks)

    @property
    def model(self) -> Any:
        """The value of the state "model": the chunk, or the list of chunks."""
        return self.chunks if len(self.chunks) > 1 else self.chunks[0]

    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def named_parameters(self) -> list[tuple[str, Any]]:
        """(name in its chunk, parameter), of all chunks."""
        return [item for chunk in self.bare for item in chunk.named_parameters()]

    def inner_states(self) -> list[dict[str, Any]]:
        """The state of each tensor that this rank steps."""
        return [s for o in self.optimizer.chained_optimizers for s in o.optimizer.state.values()]

    def named_states(self) -> Iterator[tuple[str, torch.Tensor | None, dict[str, Any]]]:
        """(name, master weight, state) of each parameter that this rank steps."""
        names = {id(p): name for name, p in self.named_parameters()}
        for optimizer in self.optimizer.chained_optimizers:
            for parameter, tensor, _ in main_params(optimizer):
                master = None if parameter.dtype == torch.float32 else tensor
                yield names[id(parameter)], master, optimizer.optimizer.state[tensor]

    def fill_with_coordinates(self, seed: int, step_of: Callable[[str], float] | None = None) -> None:
        """Give every element of this rank's tensors a value that says which it is, and every parameter a step."""
        with torch.no_grad():
            for chunk in self.bare:
                for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                    tensor.copy_(coordinate_values(seed, name, tensor.shape))
            for name, master, state in self.named_states():
                if master is not None:
                    master.copy_(coordinate_values(seed, f"{name}/master", master.shape))
                for slot in ("exp_avg", "exp_avg_sq"):
                    state[slot].copy_(coordinate_values(seed, f"{name}/{slot}", state[slot].shape))
                if step_of is not None:
                    state["step"].fill_(step_of(name))


def main_params(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor, int]]:
    """Yield (parameter, what is stepped in its place, number of its first element in the parameter)."""
    inner = optimizer.optimizer
    if hasattr(optimizer, "model_param_group_index_map"):
        for parameter, (group, index) in optimizer.model_param_group_index_map.items():
            param_range = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, inner.param_groups[group]["params"][index], param_range.start
        return
    pairs = {
        id(main): parameter
        for low, high in zip(
            getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ()), strict=True
        )
        for parameter, main in zip(low, high, strict=True)
    }
    for param_group in inner.param_groups:
        for tensor in param_group["params"]:
            yield pairs.get(id(tensor), tensor), tensor, 0


def coordinate_values(seed: int, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return values that say which element of which tensor they are, float32, between -0.5 and 0.5."""
    digest = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "little")
    numbers = torch.arange(int(torch.Size(shape).numel()), dtype=torch.int64)
    mixed = (numbers * 2654435761 + digest) % 1048573
    return (mixed.double() / 1048573 - 0.5).float().reshape(tuple(shape))


def fill(chunk: Any, seed: int) -> None:
    """Fill weights by seed and name; where a rank has a part of a tensor only a load makes them right."""
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"  # the last stage's copy of it
            value = coordinate_values(seed, name, parameter.shape) * 0.4
            parameter.copy_(value + 1 if "norm" in name else value)
