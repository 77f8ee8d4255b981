"""FSDP1: settings that do not change how parameters are divided."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._runtime_utils import _lazy_init

from tests.frameworks.fsdp1_models import (
    States,
    fresh_states,
    trained_states,
    uneven_model,
    unsharded_checkpoint,
)
from tests.frameworks.fsdp1_worlds import differences, load, save, unit


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("lazy", [False, True])
def test_mixed_precision_and_offload_do_not_change_checkpoints(
    use_orig_params: bool, strategy: str, lazy: bool
) -> None:
    """`lazy`: after the preparations of the first forward pass, which offloaded parameters need CUDA for."""
    for options in (
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)},
        {"mixed_precision": MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)},
        {"cpu_offload": CPUOffload(offload_params=True)},
    ):
        if lazy and "cpu_offload" in options:
            continue

        def states(make_states: Any, options: Any = options) -> States:
            whole = unit(
                uneven_model(), use_orig_params=use_orig_params, sharding_strategy=ShardingStrategy[strategy], **options
            )
            if lazy:
                _lazy_init(whole, whole)
            return make_states(whole)  # type: ignore[no-any-return]

        for size in (1, 3):
            assert differences(unsharded_checkpoint(), save(partial(states, trained_states), size)) == []
            assert (
                differences(unsharded_checkpoint(), load(partial(states, fresh_states), size, unsharded_checkpoint()))
                == []
            )
