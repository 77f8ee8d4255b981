"""What there is of Megatron-Core: its classes, which versions are read, and what wraps a model.

Nothing here imports Megatron: without its modules there are no objects of it, and importing it takes seconds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.dtensors import is_dtensor
from bytecheckpoint.frameworks.nested import inside

__all__ = [
    "check_version",
    "find_megatron",
    "is_megatron_module",
    "is_megatron_optimizer",
    "megatron_class",
    "model_parallel",
    "schedulers",
    "sharded_by_torch",
    "unwrapped",
]

_PACKAGE = "megatron.core"
_OLDEST, _NEWER = (0, 16), (0, 20)  # the first that is read, and the first that is not
_TESTED = "0.16.1 and 0.19.2"

_WRAPPERS = (
    ("megatron.core.distributed.data_parallel_base", "_BaseDataParallel", "module"),
    ("megatron.core.transformer.module", "Float16Module", "module"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
)
# Data parallelism that replaces the parameters.
_SHARDING = (
    ("megatron.core.distributed.fsdp.mcore_fsdp_adapter", "FullyShardedDataParallel", "Megatron-FSDP"),
    (
        "megatron.core.distributed.torch_fully_sharded_data_parallel",
        "TorchFullyShardedDataParallel",
        "TorchFullyShardedDataParallel",
    ),
)


def megatron_class(place: str, name: str) -> type | None:
    """The class `megatron.core.<place>.<name>`; None where its module is not imported."""
    return _class(f"{_PACKAGE}.{place}", name)


def _class(place: str, name: str) -> type | None:
    found = getattr(sys.modules.get(place), name, None)
    return found if isinstance(found, type) else None


def check_version() -> None:
    """See that Megatron-Core is one whose objects are understood.

    Raises:
        UsageError: it is older or newer.
    """
    version = str(getattr(sys.modules.get(_PACKAGE), "__version__", "unknown"))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not _OLDEST <= (int(numbers[1]), int(numbers[2])) < _NEWER:
        low, high = (".".join(map(str, bound)) for bound in (_OLDEST, _NEWER))
        raise UsageError(
            f"Megatron-Core {version} is not supported: versions from {low} up to, not including, {high} are (tested: "
            f"{_TESTED}); install one of these"
        )


def is_megatron_module(module: object) -> bool:
    """Whether `module` is one of Megatron, or holds one."""
    kinds = tuple(
        kind
        for place, name in (
            ("transformer.module", "MegatronModule"),
            ("tensor_parallel.layers", "ColumnParallelLinear"),
        )
        if (kind := megatron_class(place, name)) is not None
    )
    if not kinds or not isinstance(module, nn.Module):
        return False
    pending: list[nn.Module | None] = [module]
    while pending:
        item = pending.pop()
        if isinstance(item, kinds):
            return True
        if item is not None:
            pending.extend(item._modules.values())
    return False


def is_megatron_optimizer(value: object) -> bool:
    """Whether `value` is an optimizer of Megatron."""
    kind = megatron_class("optimizer.optimizer", "MegatronOptimizer")
    return kind is not None and isinstance(value, kind)


def schedulers(value: object) -> list[Any]:
    """Megatron's schedulers of learning rate and weight decay in nested dicts, lists and tuples."""
    kind = megatron_class("optimizer_param_scheduler", "OptimizerParamScheduler")
    return [item for item in inside(value) if isinstance(item, kind)] if kind is not None else []


def find_megatron(states: Mapping[str, object], *, divided: bool = False) -> str:
    """Where a module or optimizer of Megatron stands in `states`, in words, or "".

    Args:
        states: as they were given.
        divided: look for what is more than ordinary modules only: optimizers, and modules of which this rank has a part.
    """
    if _PACKAGE not in sys.modules:
        return ""
    modules = not divided or model_parallel()
    for kind, value in states.items():
        for item in inside(value):
            if is_megatron_optimizer(item) or (modules and is_megatron_module(item)):
                return f"{kind}: {type(item).__name__}"
    return ""


def model_parallel() -> bool:
    """Whether ranks have different parts of a model."""
    groups: Any = sys.modules.get(f"{_PACKAGE}.parallel_state")
    if groups is None or not groups.model_parallel_is_initialized():
        return False
    sizes = (
        groups.get_tensor_model_parallel_world_size,
        groups.get_pipeline_model_parallel_world_size,
        groups.get_expert_model_parallel_world_size,
        groups.get_expert_tensor_parallel_world_size,
    )
    return any((size() or 1) > 1 for size in sizes)


def sharded_by_torch(states: Mapping[str, object]) -> str:
    """Which part of torch shards the parameters of a module of Megatron in `states`, in words, or "".

    Megatron's own wrappers around parts of torch are Megatron's.
    """
    flat = _class("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    for module in (item for value in states.values() for item in inside(value)):
        if not isinstance(module, nn.Module) or not is_megatron_module(module):
            continue
        if any(isinstance(module, own) for place, name, _ in _SHARDING if (own := _class(place, name)) is not None):
            continue
        if flat is not None and any(isinstance(part, flat) for part in module.modules()):
            return "FSDP1 (FullyShardedDataParallel)"
        if any(map(is_dtensor, module.parameters())):
            return "DTensors (fully_shard)"
    return ""


def unwrapped(kind: str, module: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The model itself, and what it is wrapped in, from the outermost.

    Raises:
        UsageError: a wrapper shards the parameters itself.
    """
    wrappers: list[nn.Module] = []
    while True:
        for place, name, shown in _SHARDING:
            if (sharding := _class(place, name)) is not None and isinstance(module, sharding):
                raise UsageError(
                    f"{kind}: {shown} is not supported: use Megatron's DistributedDataParallel and the distributed "
                    "optimizer"
                )
        for place, name, attribute in _WRAPPERS:
            if (wrapper := _class(place, name)) is not None and isinstance(module, wrapper):
                wrappers.append(module)
                module = getattr(module, attribute)
                break
        else:
            return module, wrappers
