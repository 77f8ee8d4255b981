"""What there is of DeepSpeed: its classes, which versions are read, and what is refused.

Nothing here imports DeepSpeed: without its modules there are no objects of it, and importing it takes seconds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.nested import inside

__all__ = [
    "check_engine",
    "check_optimizer",
    "check_version",
    "find_deepspeed",
    "has_divided",
    "is_engine",
    "is_of_deepspeed",
    "is_wrapper",
    "loaded",
    "steps_nothing",
]

_TESTED, _NEWER = (0, 19), (0, 20)  # the first series that is read, and the first that is not

_ENGINES = (("runtime.engine", "DeepSpeedEngine"), ("runtime.pipe.engine", "PipelineEngine"))
_WRAPPERS = (
    ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ("runtime.bf16_optimizer", "BF16_Optimizer"),
    ("runtime.fp16.fused_optimizer", "FP16_Optimizer"),
    ("runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"),
)
_WITHOUT_STEPS = (("runtime.zero.parameter_offload", "DeepSpeedZeRoOffload"), ("runtime.utils", "DummyOptim"))
# Optimizers whose state, or whose way of communicating, is more than elements of the parameters.
_FOREIGN_STATE = ("deepspeed.runtime.fp16.onebit", "deepspeed.runtime.zero.muon")


def loaded(place: str, name: str) -> Any:
    """`deepspeed.<place>.<name>`; None where its module is not imported."""
    return getattr(sys.modules.get(f"deepspeed.{place}"), name, None)


def _is(value: object, *known: tuple[str, str]) -> bool:
    kinds = tuple(kind for place, name in known if isinstance(kind := loaded(place, name), type))
    return isinstance(value, kinds)


def is_engine(value: object) -> bool:
    """Whether `value` is what `deepspeed.initialize` returns first."""
    return _is(value, _ENGINES[0])


def is_wrapper(value: object) -> bool:
    """Whether `value` is an optimizer of DeepSpeed that steps others (`engine.optimizer`)."""
    return _is(value, ("runtime.base_optimizer", "DeepSpeedOptimizer"))


def steps_nothing(value: object) -> bool:
    """Whether `value` stands where an engine has no optimizer."""
    return value is None or _is(value, *_WITHOUT_STEPS) or _is(getattr(value, "optimizer", None), *_WITHOUT_STEPS)


def is_of_deepspeed(module: nn.Module) -> bool:
    """Whether `module` is, or has inside, a module of DeepSpeed."""
    return any(type(inner).__module__.partition(".")[0] == "deepspeed" for inner in module.modules())


def has_divided(parameter: torch.Tensor) -> bool:
    """Whether ZeRO divides `parameter`, or its master weight."""
    # Asking a tensor for an attribute that it lacks takes ten times as long.
    known = vars(parameter)
    return "ds_id" in known or known.get("_hp_mapping") is not None


def find_deepspeed(states: Mapping[str, object], *, divided: bool = False) -> str:
    """Name of a state in which DeepSpeed has a part, or "".

    Args:
        states: as the program passes them.
        divided: look for engines and what they divide only, not for modules of DeepSpeed that are ordinary ones.
    """
    if "deepspeed" not in sys.modules:
        return ""
    for kind, value in states.items():
        for item in inside(value):
            if is_engine(item) or is_wrapper(item):
                return kind
            if isinstance(item, nn.Module) and (
                any(map(has_divided, item.parameters())) or (not divided and is_of_deepspeed(item))
            ):
                return kind
    return ""


def check_version() -> None:
    """See that DeepSpeed is one whose objects are understood; where it is not imported, there are none.

    Raises:
        UsageError: it is older or newer.
    """
    if "deepspeed" not in sys.modules:
        return
    version = str(getattr(sys.modules.get("deepspeed"), "__version__", "unknown"))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not _TESTED <= (int(numbers[1]), int(numbers[2])) < _NEWER:
        raise UsageError(
            f"DeepSpeed {version} is not supported: its engines are read through attributes that change between versions, "
            "and those of 0.19 are known (tested: 0.19.8); install one of that series"
        )


def check_engine(kind: str, engine: Any) -> None:
    """See that all that an engine divides is understood.

    Raises:
        UsageError: it is of another class, or divides tensors, or keeps them, in a way that is not supported.
    """
    if type(engine) not in [loaded(*place) for place in _ENGINES]:
        raise UsageError(
            f"{kind}: an engine of type {type(engine).__name__} is not supported: DeepSpeedEngine and PipelineEngine are"
        )
    _refuse_model_parallel(kind, engine)
    if engine.zero_quantized_nontrainable_weights():
        raise UsageError(
            f"{kind}: frozen parameters are quantised in this engine, which is not supported: switch "
            "zero_quantized_nontrainable_weights off"
        )
    if engine.is_deepcompile_active():
        raise UsageError(f"{kind}: DeepCompile is active in this engine, which is not supported: switch it off")
    for name, module in engine.module.named_modules():
        if type(module).__name__ == "AutoEPMoELayer":
            raise UsageError(f"{kind}: module {name!r} is split by AutoEP, which is not supported: use deepspeed.moe")


def _refuse_model_parallel(kind: str, engine: Any) -> None:
    size = engine.autotp_size()
    for name in ("get_slice_parallel_world_size", "get_tensor_model_parallel_world_size"):
        if size <= 1 and engine.mpu is not None and hasattr(engine.mpu, name):
            size = getattr(engine.mpu, name)()
    if size > 1:
        raise UsageError(
            f"{kind}: this engine is tensor-parallel over {size} ranks, and DeepSpeed does not say how the tensors are "
            "split: not supported; use DTensor or Megatron-Core for tensor parallelism"
        )


def check_optimizer(kind: str, wrapper: Any) -> None:
    """See that an engine's optimizer is understood.

    Raises:
        UsageError: it is of another class, steps an optimizer whose state is not per element, or has put tensors away.
    """
    name = type(wrapper).__name__
    if type(wrapper) not in [loaded(*place) for place in _WRAPPERS]:
        known = ", ".join(known for _, known in _WRAPPERS)
        raise UsageError(f"{kind}: {name} of DeepSpeed is not supported: {known} are")
    base = wrapper.optimizer
    if type(base).__module__.startswith(_FOREIGN_STATE):
        raise UsageError(
            f"{kind}: {type(base).__name__} keeps state that is not one value per element of a parameter, which is not "
            "supported: use Adam, AdamW, SGD or another elementwise optimizer"
        )
    if getattr(wrapper, "zenflow", False):
        raise UsageError(f"{kind}: ZenFlow is not supported: switch it off in the configuration of ZeRO")
    if getattr(wrapper, "swap_optimizer", False) or getattr(wrapper, "params_in_nvme_and_cpu", False):
        raise UsageError(
            f"{kind}: {name} keeps tensors on NVMe, which is not supported: offload to the CPU, or not at all"
        )
    if getattr(wrapper, "offloaded_states", None):
        raise UsageError(
            f"{kind}: tensors of {name} are put away (offload_states): call engine.reload_states() before saving or loading"
        )
    assert isinstance(base, Optimizer)
