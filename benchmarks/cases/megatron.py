"""State of Megatron's distributed optimizer: ours against dist_checkpointing.

ByteCheckpoint, section 4.4 and Table 7. `dp_reshardable`, the default of Megatron's training programs, gathers nothing, and
its checkpoints cannot be loaded at another tensor or pipeline parallelism. `fully_reshardable` can, and gathers over the
data-parallel ranks for it: on all of them, or (memory-efficient) on the first. Ours reshards without gathering.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.cases.irregular import Contender, measure_contenders, pool_bytes

__all__ = ["megatron"]

_HIDDEN, _VOCABULARY, _LENGTH = 512, 4096, 64
_BYTES = 2 + 3 * 4  # per parameter: bfloat16 weight; float32 master weight and two moments
_MISSING = """\
  NOT MEASURED: megatron. megatron-core is not installed here; `make test-frameworks` makes an environment with it, and
  `.venv-frameworks/bin/python -m benchmarks --only megatron` measures there."""


def _trained(nbytes: int) -> tuple[Any, Any, int]:
    """Return a wrapped GPT model in bfloat16, its distributed optimizer after one step, and the bytes of both."""
    from tests.support.megatron.cpu import use_cpu

    use_cpu()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    layer = _BYTES * 12 * _HIDDEN**2
    config = TransformerConfig(
        num_layers=max(1, round((nbytes - _BYTES * _VOCABULARY * _HIDDEN) / layer)),
        hidden_size=_HIDDEN,
        num_attention_heads=8,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=_VOCABULARY,
        max_sequence_length=_LENGTH,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=4_000_000
    )
    wrapped = DistributedDataParallel(config, parallel, Float16Module(config, model))
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    for parameter in wrapped.parameters():
        parameter.main_grad.fill_(1e-3)
    optimizer.step()
    return wrapped, optimizer, _BYTES * sum(p.numel() for p in wrapped.parameters())


def _save(states: dict[str, Any], in_background: bool, folder: Path) -> Callable[[], object]:
    """Save by this package; return a function that waits for the end."""
    return bytecheckpoint.save(folder, states, framework="megatron", async_checkpoint=in_background).result


def _save_with_megatron(
    states: dict[str, Any], metadata: dict[str, Any], in_background: bool, folder: Path
) -> Callable[[], object]:
    """Save as Megatron's training programs do, in the background by its forked writer."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    model = states["model"].module.module.sharded_state_dict(metadata=metadata)
    state = {"model": model, "optimizer": states["optimizer"].sharded_state_dict(model, metadata=metadata)}
    request = dist_checkpointing.save(
        state, str(folder), async_sharded_save=in_background, async_strategy="mcore", content_metadata=metadata
    )
    if request is None:
        return lambda: None
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    return partial(queue.maybe_finalize_async_calls, blocking=True)


def megatron(bench: Bench) -> None:
    """Measure saves; `wall` is the blocking time (of a synchronous save, all of it); see `measure_contenders`."""
    if importlib.util.find_spec("megatron") is None:
        if bench.world.rank == 0:
            print(_MISSING, file=sys.stderr, flush=True)
        return
    model, optimizer, nbytes = _trained(bench.options.nbytes)
    states = {"model": model, "optimizer": optimizer}
    contenders = [
        Contender(bench, "bytecheckpoint", partial(_save, states, True), pool_bytes),
        Contender(bench, "bytecheckpoint, synchronous", partial(_save, states, False)),
    ]
    if not bench.options.peers or "Megatron" in bench.options.peers:
        for sharding_type, efficient, display_name in (
            ("fully_reshardable", False, "fully_reshardable"),
            ("fully_reshardable", True, "fully_reshardable, memory-efficient"),
            ("dp_reshardable", False, "dp_reshardable"),
        ):
            metadata = {
                "distrib_optim_sharding_type": sharding_type,
                "distrib_optim_fully_reshardable_mem_efficient": efficient,
                "chained_optim_avoid_prefix": True,
            }
            for in_background, suffix in ((True, ""), (False, ", synchronous")):
                if in_background or not efficient:
                    begin = partial(_save_with_megatron, states, metadata, in_background)
                    contenders.append(Contender(bench, display_name + suffix, begin))
    gc.collect()
    measure_contenders(bench, "state of a distributed optimizer (Megatron-Core): blocking", nbytes, contenders)
