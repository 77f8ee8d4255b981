"""Megatron's wrappers that shard the parameters themselves are refused by name, in every framework.

They need CUDA to be made, so these are made without their constructors.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import UsageError
from tests.support.megatron.models import Layout, build_chunks, initialize_parallel

WRAPPERS = [
    ("fsdp.mcore_fsdp_adapter", "FullyShardedDataParallel"),
    ("fsdp.src.megatron_fsdp.megatron_fsdp", "MegatronFSDP"),
    ("torch_fully_sharded_data_parallel", "TorchFullyShardedDataParallel"),
]


def wrapped(place: str, name: str, module: nn.Module) -> Any:
    cls: Any = getattr(importlib.import_module(f"megatron.core.distributed.{place}"), name)
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    made.module = module
    return made


@pytest.mark.parametrize(("place", "name"), WRAPPERS)
@pytest.mark.parametrize("framework", ["auto", "megatron", "torch", "fsdp", "fsdp2", "deepspeed"])
@pytest.mark.parametrize("model", ["megatron", "plain"])
def test_megatron_fsdp_is_refused(place: str, name: str, framework: str, model: str, path: str) -> None:
    initialize_parallel(Layout())
    module = wrapped(place, name, build_chunks(Layout())[0] if model == "megatron" else nn.Linear(2, 2))
    shown = "TorchFullyShardedDataParallel" if name.startswith("Torch") else "Megatron-FSDP"
    message = f"{shown} is not supported|{name} belongs to Megatron-Core"
    with pytest.raises(UsageError, match=message):
        bytecheckpoint.save(path, {"model": module}, framework=framework)
    with pytest.raises(UsageError, match=message):
        bytecheckpoint.save(path, {"model": [module]}, framework=framework)
