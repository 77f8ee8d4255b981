"""Detection of Megatron-Core: which of its objects are present, which versions are supported, what is refused.

Nothing here imports Megatron: while its modules are not imported, no object of it can exist, and the import takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.detection import contains_module, loaded_class, loaded_version, nested_objects
from bytecheckpoint.frameworks.fsdp1.detection import is_fsdp1
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor

__all__ = [
    "check_version",
    "check_wrappers",
    "find_megatron",
    "find_schedulers",
    "is_megatron_module",
    "is_megatron_optimizer",
    "is_model_parallel",
    "is_older_than",
    "megatron_class",
    "reason_parameters_change",
    "require",
    "torch_sharding_of",
    "unknown_structure",
    "unwrap",
]

_PACKAGE = "megatron.core"
_OLDEST, _FIRST_UNSUPPORTED = (0, 16), (0, 20)
_TESTED = "0.16.1, 0.17.1, 0.18.0 and 0.19.2"

# Wrappers that are looked through: (module, class, attribute that holds the wrapped model).
_WRAPPERS = (
    ("megatron.core.distributed.data_parallel_base", "_BaseDataParallel", "module"),
    ("megatron.core.transformer.module", "Float16Module", "module"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
)
# Wrappers that are refused because they replace the parameters: (module, class, display name).
_SHARDING_WRAPPERS = (
    ("megatron.core.distributed.fsdp.mcore_fsdp_adapter", "FullyShardedDataParallel", "Megatron-FSDP"),
    (
        "megatron.core.distributed.torch_fully_sharded_data_parallel",
        "TorchFullyShardedDataParallel",
        "TorchFullyShardedDataParallel",
    ),
    # By itself, around any module: Megatron-Core's copy, and that of the package megatron-fsdp.
    ("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp", "MegatronFSDP", "Megatron-FSDP"),
    ("megatron_fsdp.megatron_fsdp", "MegatronFSDP", "Megatron-FSDP"),
)


def megatron_class(module: str, name: str) -> type | None:
    """Return the class `megatron.core.<module>.<name>`; None if its module is not imported."""
    return loaded_class(f"{_PACKAGE}.{module}", name)


def check_version() -> None:
    """Check that the imported Megatron-Core is a supported version.

    Raises:
        UsageError: the version is older or newer.
    """
    version, numbers = loaded_version(_PACKAGE)
    if not _OLDEST <= numbers < _FIRST_UNSUPPORTED:
        low, high = (".".join(map(str, bound)) for bound in (_OLDEST, _FIRST_UNSUPPORTED))
        raise UsageError(
            f"Megatron-Core {version} is not supported: versions from {low} up to, not including, {high} are (tested: "
            f"{_TESTED}); install one of these"
        )


def is_older_than(*numbers: int) -> bool:
    """Return whether the imported Megatron-Core is older than a version."""
    return loaded_version(_PACKAGE)[1] < numbers


def require(state_name: str, owner: object, *attributes: str) -> None:
    """Check that an object of Megatron has the private attributes that this package reads.

    Raises:
        UsageError: it lacks one; the message names it.
    """
    missing = [name for name in attributes if not hasattr(owner, name)]
    if missing:
        raise unknown_structure(state_name, f"{type(owner).__name__} has no {' and no '.join(missing)}")


def unknown_structure(state_name: str, found: str) -> UsageError:
    """Return the error for objects of Megatron that are not built as in the tested versions."""
    version, _ = loaded_version(_PACKAGE)
    return UsageError(
        f"{state_name}: {found}, so it is not built as this package knows it (Megatron-Core {version} is installed; "
        f"tested: {_TESTED}): install a tested version"
    )


def is_megatron_module(module: object) -> bool:
    """Return whether `module` is a Megatron module or contains one."""
    candidates = (
        megatron_class("transformer.module", "MegatronModule"),
        megatron_class("tensor_parallel.layers", "ColumnParallelLinear"),
    )
    classes = tuple(found for found in candidates if found is not None)
    return bool(classes) and isinstance(module, nn.Module) and contains_module(module, classes)


def is_megatron_optimizer(value: object) -> bool:
    """Return whether `value` is a Megatron optimizer."""
    found = megatron_class("optimizer.optimizer", "MegatronOptimizer")
    return found is not None and isinstance(value, found)


def find_schedulers(value: object) -> list[Any]:
    """Return Megatron's learning-rate and weight-decay schedulers inside nested dicts, lists and tuples."""
    found = megatron_class("optimizer_param_scheduler", "OptimizerParamScheduler")
    return [item for item in nested_objects(value) if isinstance(item, found)] if found is not None else []


def find_megatron(states: Mapping[str, object], *, partitioned_only: bool = False) -> str:
    """Return the name and type of the first Megatron module or optimizer in `states`, or "".

    Args:
        states: the states of one save or load.
        partitioned_only: skip modules that every rank holds whole: without model parallelism they are ordinary modules.
    """
    sharding = tuple(_sharding_wrappers())
    if _PACKAGE not in sys.modules and not sharding:
        return ""
    modules_count = not partitioned_only or is_model_parallel()
    for state_name, value in states.items():
        for item in nested_objects(value):
            is_module = isinstance(item, nn.Module)
            if (
                is_megatron_optimizer(item)
                or (modules_count and is_megatron_module(item))
                or (is_module and sharding and contains_module(item, sharding))
            ):
                return f"{state_name}: {type(item).__name__}"
    return ""


def _sharding_wrappers() -> dict[type, str]:
    """Return class -> display name of the wrappers that are refused, of those that are imported."""
    found = ((loaded_class(place, name), display_name) for place, name, display_name in _SHARDING_WRAPPERS)
    return {cls: display_name for cls, display_name in found if cls is not None}


def check_wrappers(states: Mapping[str, object]) -> None:
    """Refuse wrappers of Megatron that shard the parameters themselves.

    Raises:
        UsageError: a module in `states` is, or contains, one.
    """
    for cls, display_name in _sharding_wrappers().items():
        for state_name, value in states.items():
            if any(contains_module(item, cls) for item in nested_objects(value, nn.Module)):
                raise UsageError(
                    f"{state_name}: {display_name} is not supported: use Megatron's DistributedDataParallel and the "
                    "distributed optimizer; or, where Megatron does not split the model, FSDP2 (fully_shard)"
                )


def is_model_parallel() -> bool:
    """Return whether tensor, pipeline or expert parallelism splits the model over ranks."""
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


def torch_sharding_of(states: Mapping[str, object]) -> str:
    """Return the display name of the torch sharding that a Megatron module in `states` is under, or "".

    Megatron's own wrappers around torch's sharding do not count.
    """
    wrappers = tuple(_sharding_wrappers())
    for item in (item for value in states.values() for item in nested_objects(value)):
        if not isinstance(item, nn.Module) or not is_megatron_module(item) or isinstance(item, wrappers):
            continue
        if any(map(is_fsdp1, item.modules())):
            return "FSDP1 (FullyShardedDataParallel)"
        if any(map(is_dtensor, item.parameters())):
            return "DTensors (fully_shard)"
    return ""


def reason_parameters_change(owner: object) -> str:
    """Return why hooks do not see parameters change under a wrapper or an optimizer of Megatron; "" if they do."""
    configs = [getattr(owner, name, None) for name in ("ddp_config", "config")]

    def on(*names: str) -> bool:
        return any(getattr(config, name, None) for config in configs for name in names)

    if on("optimizer_cuda_graph"):
        return "Megatron replays steps as a graph (optimizer_cuda_graph)"
    if on("reuse_grad_buf_for_mxfp8_param_ag"):
        return "Megatron gathers parameters into the memory of gradients (reuse_grad_buf_for_mxfp8_param_ag)"
    if on("overlap_param_gather") and on("fp8_param_gather", "fp4_param_gather", "fp8", "fp4"):
        return "Megatron gathers parameters of 8 or 4 bits during the forward pass (overlap_param_gather)"
    return ""


def unwrap(module: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """Return the bare model inside `module`, and its wrappers from the outermost."""
    wrappers: list[nn.Module] = []
    while True:
        for place, name, attribute in _WRAPPERS:
            if (wrapper := loaded_class(place, name)) is not None and isinstance(module, wrapper):
                wrappers.append(module)
                module = getattr(module, attribute)
                break
        else:
            return module, wrappers
