"""GPT models of Megatron-Core at any layout, their training, and states of coordinates."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Any

import torch
import torch.distributed as dist

from tests.frameworks.megatron.cpu import use_cpu

VOCABULARY, LENGTH, SEQUENCES, MICROBATCH = 32, 8, 12, 3
RATE = 0.01
# What Megatron's process groups of this process are for, and the groups.
_extents: list[int] = []
_groups: list[Any] = []


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks, and what it is."""

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


def prepare(layout: Layout) -> None:
    """Process groups for a layout, those of the last one gone."""
    use_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    extents = [layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, layout.dp]
    if extents != _extents:
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
        _extents[:] = extents
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)


def settings(layout: Layout) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    half = torch.bfloat16 if layout.bf16 else torch.float16 if layout.fp16 else torch.float32
    more: dict[str, Any] = {}
    if layout.moe:
        more = {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 12,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": False,
        }
    return TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=24,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        gated_linear_unit=layout.gated,
        activation_func=torch.nn.functional.silu if layout.gated else torch.nn.functional.gelu,
        add_bias_linear=layout.bias,
        use_cpu_initialization=True,
        params_dtype=half,
        pipeline_dtype=half,
        bf16=layout.bf16,
        fp16=layout.fp16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
        sequence_parallel=layout.sequence,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        **more,
    )


def build_chunks(layout: Layout) -> list[Any]:
    """The bare chunks of this rank's stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = settings(layout)
    chunks = []
    for number in range(layout.vpp):
        virtual = {"vp_stage": number} if layout.vpp > 1 else {}
        if virtual:
            parallel_state.set_virtual_pipeline_model_parallel_rank(number)
        torch.manual_seed(11)
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=4 if layout.moe else None, normalization="RMSNorm"
            ),
            vocab_size=layout.vocabulary,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
            share_embeddings_and_output_weights=layout.tied,
            position_embedding_type="learned_absolute",
            **virtual,
        )
        if layout.frozen and hasattr(model, "embedding"):
            model.embedding.position_embeddings.weight.requires_grad = False
        chunks.append(model)
    return chunks


class Trainer:
    """A model with its optimizer, as a Megatron training program has them.

    Attributes:
        chunks: the wrapped model, one chunk per virtual stage.
        optimizer: Megatron's.
        scheduler: Megatron's, of learning rate and weight decay.
    """

    def __init__(self, layout: Layout, seed: int = 1, *, lr: float = RATE) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.module import Float16Module

        prepare(layout)
        self.layout = layout
        self.bare = build_chunks(layout)
        config = self.bare[0].config
        for chunk in self.bare:
            fill(chunk, seed)
        half = layout.bf16 or layout.fp16
        inner = [Float16Module(config, chunk) for chunk in self.bare] if half else self.bare
        parallel = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=layout.overlap or layout.buckets is not None,
            overlap_param_gather=layout.overlap,
            use_distributed_optimizer=layout.distributed,
            bucket_size=layout.buckets,
        )
        self.chunks = [DistributedDataParallel(config, parallel, chunk, disable_bucketing=False) for chunk in inner]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer=layout.optimizer,
                sgd_momentum=0.9,
                lr=lr,
                weight_decay=0.1,
                clip_grad=1.0,
                bf16=layout.bf16,
                fp16=layout.fp16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=layout.distributed,
                overlap_param_gather=layout.overlap,
                initial_loss_scale=2.0**10,
            ),
            self.chunks,
        )
        for group in self.optimizer.param_groups:
            # Two groups that differ in both: norms and biases, and the rest.
            group["max_lr"] = group["lr"] = lr / 2 if group["wd_mult"] == 0 else lr
            group["min_lr"] = 0.0
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=lr,
            min_lr=0.0,
            lr_warmup_steps=2,
            lr_decay_steps=20,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        config.finalize_model_grads_func = _finalize
        config.grad_scale_func = self.optimizer.scale_loss
        if parallel.overlap_grad_reduce:
            config.no_sync_func = [c.no_sync for c in self.chunks] if len(self.chunks) > 1 else self.chunks[0].no_sync
        if layout.overlap:
            config.param_sync_func = (
                [c.start_param_sync for c in self.chunks] if len(self.chunks) > 1 else self.chunks[0].start_param_sync
            )
        self.step = 0
        self.extra: dict[str, Any] = {"step": 0}

    def states(self) -> dict[str, Any]:
        self.extra["step"] = self.step
        model = self.chunks if len(self.chunks) > 1 else self.chunks[0]
        return {
            "model": model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "extra_states": self.extra,
        }

    def loaded(self) -> None:
        """What the program does after a load."""
        self.step = self.extra["step"]

    def train(self, steps: int) -> list[float]:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        losses = []
        for _ in range(steps):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            replicas = parallel_state.get_data_parallel_world_size()
            rank = parallel_state.get_data_parallel_rank()
            mine = range(rank * SEQUENCES // replicas, (rank + 1) * SEQUENCES // replicas)
            made = get_forward_backward_func()(
                forward_step_func=_forward,
                data_iterator=[_batches(self.step, mine) for _ in self.chunks]
                if len(self.chunks) > 1
                else _batches(self.step, mine),
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(mine) // MICROBATCH,
                seq_length=LENGTH,
                micro_batch_size=MICROBATCH,
                forward_only=False,
            )
            self.optimizer.step()
            self.scheduler.step(1)
            total = torch.tensor([sum(float(m["loss"]) for m in made), float(len(made))], dtype=torch.float64)
            dist.all_reduce(total)
            losses.append(float(total[0] / total[1]))
            self.step += 1
        return losses


def _finalize(*args: Any, **kwargs: Any) -> None:
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(*args, **kwargs)


def tokens(step: int) -> torch.Tensor:
    """The global batch of a step, SEQUENCES x (LENGTH + 1)."""
    return torch.randint(
        0, VOCABULARY - 4, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(100 + step)
    )


def _batches(step: int, mine: range) -> Iterator[torch.Tensor]:
    data = tokens(step)
    for row in mine[::MICROBATCH]:
        yield data[row : row + MICROBATCH]


def _forward(batches: Iterator[torch.Tensor], model: Any) -> Any:
    batch = next(batches)
    places = torch.arange(LENGTH)[None]
    out = model(batch[:, :-1].contiguous(), places, None, labels=batch[:, 1:].contiguous())
    return out, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})


def code(seed: int, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Values that say which element of which tensor they are, float32, between -0.5 and 0.5."""
    digest = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "little")
    numbers = torch.arange(int(torch.Size(shape).numel()), dtype=torch.int64)
    mixed = (numbers * 2654435761 + digest) % 1048573
    return (mixed.double() / 1048573 - 0.5).float().reshape(tuple(shape))


def fill(chunk: Any, seed: int) -> None:
    """Weights that do not depend on this rank's part only where the rank has all; loading makes them right."""
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"  # the last stage's copy of it
            value = code(seed, name, parameter.shape) * 0.4
            parameter.copy_(value + 1 if "norm" in name else value)


def plain(layout: Layout, seed: int = 1) -> tuple[Any, torch.optim.AdamW]:
    """(model, optimizer) of torch: the module of Megatron is an ordinary one here."""
    prepare(layout)
    (model,) = build_chunks(layout)
    fill(model, seed)
    return model, torch.optim.AdamW(groups_of(dict(model.named_parameters())))


def groups_of(parameters: Mapping[str, Any], lr: float = RATE) -> list[dict[str, Any]]:
    """The param groups of Megatron's own optimizers here, of what is trained: matrices, and norms and biases."""
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    vectors = {n for n in trained if "norm" in n or n.endswith(".bias")}
    return [
        {"params": [p for n, p in trained.items() if n not in vectors], "lr": lr, "weight_decay": 0.1},
        {"params": [p for n, p in trained.items() if n in vectors], "lr": lr / 2, "weight_decay": 0.0},
    ]


def scale_at(step: int) -> float:
    """What Megatron's scheduler makes of the learning rate: linear for two steps from nothing, then a cosine to step 20."""
    return step / 2 if step <= 2 else 0.5 * (cos(pi * (step - 2) / 18) + 1)
