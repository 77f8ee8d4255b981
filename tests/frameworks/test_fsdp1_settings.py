"""FSDP1: settings that have nothing to do with how parameters are divided."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._runtime_utils import _lazy_init

from tests.frameworks.fsdp1_models import States, adam_states, fresh_states, odd, plain
from tests.frameworks.fsdp1_worlds import differences, load, save, unit


@pytest.mark.parametrize("originals", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("lazy", [False, True])
def test_mixed_precision_and_offload_change_nothing(originals: bool, strategy: str, lazy: bool) -> None:
    """Before the first forward pass and after its preparations; offloaded parameters cannot be prepared without CUDA."""
    for options in (
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)},
        {"mixed_precision": MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)},
        {"cpu_offload": CPUOffload(offload_params=True)},
    ):
        if lazy and "cpu_offload" in options:
            continue

        def states(made: Any, options: Any = options) -> States:
            whole = unit(odd(), use_orig_params=originals, sharding_strategy=ShardingStrategy[strategy], **options)
            if lazy:
                _lazy_init(whole, whole)
            return made(whole)  # type: ignore[no-any-return]

        for size in (1, 3):
            assert differences(plain(), save(partial(states, adam_states), size)) == []
            assert differences(plain(), load(partial(states, fresh_states), size, plain())) == []
