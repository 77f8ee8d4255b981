"""Detection of DeepSpeed: which of its objects are present, which versions are supported, what is refused.

Nothing here imports DeepSpeed: while its modules are not imported, no object of it can exist, and the import takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.detection import contains_module, loaded_class, loaded_version, nested_objects

__all__ = [
    "check_engine",
    "check_optimizer",
    "check_version",
    "find_deepspeed",
    "imported",
    "is_engine",
    "is_partitioned",
    "is_placeholder_optimizer",
    "is_wrapped_optimizer",
    "reason_unsupported",
    "split_layers",
]

# The pinned version, and those that `make test-deepspeed-versions` tests beside it.
_SUPPORTED = {(0, 19, 8): "0.19.8"}

# (module, class), below "deepspeed."
_ENGINES = (("runtime.engine", "DeepSpeedEngine"), ("runtime.pipe.engine", "PipelineEngine"))
_WRAPPERS = (
    ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ("runtime.bf16_optimizer", "BF16_Optimizer"),
    ("runtime.fp16.fused_optimizer", "FP16_Optimizer"),
    ("runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"),
)
_PLACEHOLDERS = (("runtime.zero.parameter_offload", "DeepSpeedZeRoOffload"), ("runtime.utils", "DummyOptim"))
# Layers of which a rank may hold a part, as the attributes of the layer say and those of its parameters do not.
_SPLIT_LAYERS = (
    ("module_inject.layers", "TensorParallel_Layer"),
    ("module_inject.layers", "TensorParallelConv2d"),
    ("module_inject.auto_ep_layer", "AutoEPMoELayer"),
    ("moe.layer", "MoE"),
)
# Modules of optimizers whose state, or whose communication, is more than elements of the parameters.
_NOT_ELEMENTWISE = ("deepspeed.runtime.fp16.onebit", "deepspeed.runtime.zero.muon")


def imported(module: str, name: str) -> Any:
    """Return `deepspeed.<module>.<name>`; None if the module is not imported."""
    return getattr(sys.modules.get(f"deepspeed.{module}"), name, None)


def _is_instance(value: object, *classes: tuple[str, str]) -> bool:
    found = (loaded_class(f"deepspeed.{module}", name) for module, name in classes)
    return isinstance(value, tuple(cls for cls in found if cls is not None))


def is_engine(value: object) -> bool:
    """Return whether `value` is an engine, the first result of `deepspeed.initialize`."""
    return _is_instance(value, _ENGINES[0])


def is_wrapped_optimizer(value: object) -> bool:
    """Return whether `value` is DeepSpeed's wrapper around an optimizer (`engine.optimizer`)."""
    return _is_instance(value, ("runtime.base_optimizer", "DeepSpeedOptimizer"))


def is_placeholder_optimizer(value: object) -> bool:
    """Return whether `value` stands for the missing optimizer of an engine."""
    inner = getattr(value, "optimizer", None)
    return value is None or _is_instance(value, *_PLACEHOLDERS) or _is_instance(inner, *_PLACEHOLDERS)


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether ZeRO partitions `parameter`, or its master weight."""
    # vars(): asking a tensor for an attribute that it lacks takes ten times as long.
    attributes = vars(parameter)
    return "ds_id" in attributes or attributes.get("_hp_mapping") is not None


def find_deepspeed(states: Mapping[str, object], *, partitioned_only: bool = False) -> str:
    """Return the name of the first state that holds an object of DeepSpeed, or "".

    Args:
        states: the states of one save or load.
        partitioned_only: look only for engines, their optimizers, partitioned parameters and layers that are split over
            ranks, not for other modules of DeepSpeed.
    """
    if "deepspeed" not in sys.modules:
        return ""
    for state_name, value in states.items():
        for item in nested_objects(value):
            if is_engine(item) or is_wrapped_optimizer(item):
                return state_name
            if isinstance(item, nn.Module) and (
                any(map(is_partitioned, item.parameters()))
                or next(split_layers(item), None) is not None
                or (not partitioned_only and _has_deepspeed_module(item))
            ):
                return state_name
    return ""


def _has_deepspeed_module(module: nn.Module) -> bool:
    return any(type(inner).__module__.partition(".")[0] == "deepspeed" for inner in module.modules())


def split_layers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, layer) for the layers inside `root` that DeepSpeed has split over ranks.

    These are the layers of AutoTP and AutoEP, and mixtures of experts.
    """
    classes = tuple(found for place in _SPLIT_LAYERS if (found := imported(*place)) is not None)
    if classes and contains_module(root, classes):
        yield from ((n, m) for n, m in root.named_modules() if isinstance(m, classes) and _number_of_parts(m) > 1)


def _number_of_parts(layer: Any) -> int:
    """Return over how many ranks a layer is split."""
    sizes = (getattr(layer, name, None) for name in ("tp_world_size", "world_size", "ep_size"))
    return next((int(size) for size in sizes if size is not None), 1)


def check_version() -> None:
    """Check that the imported DeepSpeed, if any, is a supported version.

    Raises:
        UsageError: the version is not one of those that are tested.
    """
    if "deepspeed" not in sys.modules:
        return
    version, numbers = loaded_version("deepspeed")
    if numbers not in _SUPPORTED:
        raise UsageError(
            f"DeepSpeed {version} is not supported: its engines are read through attributes that change between versions, "
            f"and only tested versions are read; install {' or '.join(_SUPPORTED.values())}"
        )


def check_engine(state_name: str, engine: Any) -> None:
    """Check that an engine is of a supported class and configuration.

    Raises:
        UsageError: its class, or a way in which it partitions or stores tensors, is not supported.
    """
    if type(engine) not in [imported(*place) for place in _ENGINES]:
        raise UsageError(
            f"{state_name}: an engine of type {type(engine).__name__} is not supported: DeepSpeedEngine and "
            "PipelineEngine are"
        )
    _refuse_model_parallel(state_name, engine)
    if engine.zero_quantized_nontrainable_weights():
        raise UsageError(
            f"{state_name}: frozen parameters are quantised in this engine, which is not supported: switch "
            "zero_quantized_nontrainable_weights off"
        )
    if engine.is_deepcompile_active():
        raise UsageError(f"{state_name}: DeepCompile is active in this engine, which is not supported: switch it off")


def _refuse_model_parallel(state_name: str, engine: Any) -> None:
    """Refuse tensor parallelism by the program's own grid; AutoTP's layers say how they are split."""
    size = 1
    if engine.mpu is not None and engine.autotp_size() <= 1:
        for name in ("get_slice_parallel_world_size", "get_tensor_model_parallel_world_size"):
            if size <= 1 and hasattr(engine.mpu, name):
                size = getattr(engine.mpu, name)()
    if size > 1:
        raise UsageError(
            f"{state_name}: this engine is tensor-parallel over {size} ranks of the program's mpu, which does not say "
            "how the tensors are split: not supported; use AutoTP, DTensor or Megatron-Core for tensor parallelism"
        )


def check_optimizer(state_name: str, wrapper: Any) -> None:
    """Check that an engine's optimizer is of a supported class and configuration.

    Raises:
        UsageError: its class is not supported, the state of the wrapped optimizer is not elementwise, or tensors are
            offloaded out of reach.
    """
    if reason := reason_unsupported(wrapper):
        raise UsageError(f"{state_name}: {reason}")


def reason_unsupported(wrapper: Any) -> str:
    """Return why an engine's optimizer is not supported; "" if it is."""
    name = type(wrapper).__name__
    if type(wrapper) not in [imported(*place) for place in _WRAPPERS]:
        return f"{name} of DeepSpeed is not supported: {', '.join(known for _, known in _WRAPPERS)} are"
    base = wrapper.optimizer
    if type(base).__module__.startswith(_NOT_ELEMENTWISE):
        return (
            f"{type(base).__name__} keeps state that is not one value per element of a parameter, which is not "
            "supported: use Adam, AdamW, SGD or another elementwise optimizer"
        )
    if getattr(wrapper, "zenflow", False):
        return "ZenFlow is not supported: switch it off in the configuration of ZeRO"
    if getattr(wrapper, "swap_optimizer", False) or getattr(wrapper, "params_in_nvme_and_cpu", False):
        return f"{name} keeps tensors on NVMe, which is not supported: offload to the CPU, or not at all"
    if getattr(wrapper, "offloaded_states", None):
        return f"tensors of {name} are put away (offload_states): call engine.reload_states() before saving or loading"
    if not isinstance(base, Optimizer):
        return f"{name} wraps a {type(base).__name__}, which is no optimizer of torch: not supported"
    return ""
