"""State of Megatron's distributed optimizer: ours against dist_checkpointing, which gathers it or gives up resharding.

ByteCheckpoint, section 4.4 and Table 7. `dp_reshardable` is what Megatron's training programs choose by themselves: nothing
is gathered, and the checkpoint fits no other tensor or pipeline parallelism. `fully_reshardable` fits any, and gathers
over the data-parallel ranks for it: on all of them, or (memory-efficient) on the first. Ours fits any.
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
from benchmarks.cases.irregular import Contender, measured, pool_bytes

__all__ = ["megatron"]

_HIDDEN, _VOCABULARY, _LENGTH = 512, 4096, 64
_BYTES = 2 + 3 * 4  # of a parameter: bfloat16, and in float32 the master weight and two moments
_MISSING = """\
  NOT MEASURED: megatron. megatron-core is not installed here; `make test-frameworks` makes an environment with it, and
  `.venv-frameworks/bin/python -m benchmarks --only megatron` measures there."""


def _trained(nbytes: int) -> tuple[Any, Any, int]:
    """A wrapped GPT model in bfloat16, with its distributed optimizer after one step, and the bytes of both."""
    from tests.frameworks.megatron.cpu import use_cpu

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


def _ours(states: dict[str, Any], in_background: bool, folder: Path) -> Callable[[], object]:
    return bytecheckpoint.save(folder, states, framework="megatron", async_checkpoint=in_background).result


def _theirs(
    states: dict[str, Any], metadata: dict[str, Any], in_background: bool, folder: Path
) -> Callable[[], object]:
    """As Megatron's training programs save; in the background by its own forked writer."""
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
    """`wall` is the blocking time, which is the whole time of a synchronous save; see `measured` for the other figures."""
    if importlib.util.find_spec("megatron") is None:
        if bench.world.rank == 0:
            print(_MISSING, file=sys.stderr, flush=True)
        return
    model, optimizer, nbytes = _trained(bench.options.nbytes)
    states = {"model": model, "optimizer": optimizer}
    contenders = [
        Contender(bench, "bytecheckpoint", partial(_ours, states, True), pool_bytes),
        Contender(bench, "bytecheckpoint, synchronous", partial(_ours, states, False)),
    ]
    if not bench.options.peers or "Megatron" in bench.options.peers:
        for form, efficient, shown in (
            ("fully_reshardable", False, "fully_reshardable"),
            ("fully_reshardable", True, "fully_reshardable, memory-efficient"),
            ("dp_reshardable", False, "dp_reshardable"),
        ):
            metadata = {
                "distrib_optim_sharding_type": form,
                "distrib_optim_fully_reshardable_mem_efficient": efficient,
                "chained_optim_avoid_prefix": True,
            }
            for in_background, how in ((True, ""), (False, ", synchronous")):
                if in_background or not efficient:
                    begin = partial(_theirs, states, metadata, in_background)
                    contenders.append(Contender(bench, shown + how, begin))
    gc.collect()
    measured(bench, "state of a distributed optimizer (Megatron-Core): blocking", nbytes, contenders)
