"""Find the tensors that Megatron's optimizers step, and the model parameters behind them.

The distributed optimizer joins the parameters of a model in buffers, cuts each bucket of a buffer into equal ranges, one
per data-parallel rank, and steps 1-D tensors that hold this rank's range of one parameter. Its `gbuf_ranges` say which.
The float16 optimizer steps fp32 copies of whole parameters, the FP32 optimizer steps the parameters themselves. Those of a
layer-wise optimizer have the parameters that this rank steps. With `optimizer_cpu_offload` any of them steps copies, which
a HybridDeviceOptimizer keeps on the CPU, or in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.megatron.detection import (
    is_megatron_optimizer,
    is_older_than,
    megatron_class,
    require,
    unknown_structure,
)

__all__ = [
    "MainParam", "as_megatron_optimizers", "finish_hybrid", "flatten_chain", "is_hybrid", "is_layer_wise", "main_params",
    "params_with_masters",
]  # fmt: skip

_STEP_IN_GROUP = ("apex", "transformer_engine")  # packages whose optimizers keep one step per param group


@dataclass(slots=True)
class MainParam:
    """A tensor that an inner optimizer steps.

    Attributes:
        inner: the torch optimizer.
        group: its param group.
        tensor: the tensor; the optimizer's state is under it.
        model_param: the model's parameter.
        start: number of the flat range's first element in the parameter; None: the tensor has all elements.
        settings: param group with the hyperparameters, that of the optimizer around `inner` if there is one.
    """

    inner: Optimizer
    group: dict[str, Any]
    tensor: torch.Tensor
    model_param: torch.Tensor
    start: int | None
    settings: dict[str, Any]

    @property
    def is_copy(self) -> bool:
        """True if the tensor has memory of its own beside the model's parameter."""
        return self.tensor.untyped_storage().data_ptr() != self.model_param.untyped_storage().data_ptr()

    @property
    def is_master(self) -> bool:
        """True if the tensor is a master weight: a copy in higher precision than the model's parameter."""
        return self.is_copy and self.tensor.dtype != self.model_param.dtype

    def state(self) -> Mapping[Any, Any]:
        """Return the live optimizer state, without the tensor itself; empty where there is none."""
        state = self.inner.state.get(self.tensor) or {}
        return {slot: value for slot, value in state.items() if value is not self.tensor}

    @property
    def step_in_group(self) -> bool:
        """True if the optimizer keeps the step in the param group."""
        return type(self.inner).__module__.partition(".")[0] in _STEP_IN_GROUP


def as_megatron_optimizers(state_name: str, value: object) -> list[Any] | None:
    """Return `value` as a list of optimizers of Megatron (and of torch among them); None if it is something else."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    from_megatron = [is_megatron_optimizer(item) for item in items]
    if not any(from_megatron):
        return None
    if not all(known or isinstance(item, Optimizer) for known, item in zip(from_megatron, items, strict=True)):
        raise UsageError(
            f"{state_name} holds optimizers of Megatron and other objects: give the optimizers a name of their own in "
            "the states"
        )
    return list(items)


def flatten_chain(state_name: str, optimizers: Iterable[Any]) -> Iterator[Any]:
    """Yield the optimizers inside chains, without stubs.

    Raises:
        UsageError: a chain is of a kind that is not supported.
    """
    for optimizer in optimizers:
        if is_layer_wise(optimizer) and is_older_than(0, 19):
            raise UsageError(f"{state_name}: LayerWiseDistributedOptimizer is supported from Megatron-Core 0.19 on")
        if is_layer_wise(optimizer) and getattr(optimizer, "overlap_param_gather", False):
            raise UsageError(
                f"{state_name}: LayerWiseDistributedOptimizer with overlap_param_gather is not supported, because ranks "
                "hold old parameters until the next forward pass: train without the overlap"
            )
        chain = getattr(optimizer, "chained_optimizers", None)
        if chain is not None:
            yield from flatten_chain(state_name, chain)
        elif not getattr(optimizer, "is_stub_optimizer", False):
            yield optimizer


def is_layer_wise(optimizer: object) -> bool:
    """Return whether, here or in a chain, each data-parallel rank steps whole parameters, which all ranks then gather."""
    layer_wise = megatron_class("optimizer.layer_wise_optimizer", "LayerWiseDistributedOptimizer")
    if layer_wise is None or isinstance(optimizer, layer_wise):
        return layer_wise is not None
    return any(map(is_layer_wise, getattr(optimizer, "chained_optimizers", ())))


def is_hybrid(inner: object) -> bool:
    """Return whether an optimizer has other optimizers step copies of its parameters, on the CPU or in fp32."""
    hybrid = megatron_class("optimizer.cpu_offloading.hybrid_optimizer", "HybridDeviceOptimizer")
    return hybrid is not None and isinstance(inner, hybrid)


def main_params(state_name: str, optimizers: Iterable[Any]) -> list[list[MainParam]]:
    """Return the main params of each optimizer on this rank; chains are flattened.

    Raises:
        UsageError: an optimizer keeps its state in a form that is not supported.
    """
    return [_main_params_of(state_name, optimizer) for optimizer in flatten_chain(state_name, optimizers)]


def params_with_masters(state_name: str, optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the model parameters that have master weights, on any rank of a distributed optimizer."""
    for optimizer in flatten_chain(state_name, optimizers):
        for main in _main_params_of(state_name, optimizer):
            if main.is_master:
                yield main.model_param
        if not _is_distributed(optimizer):
            continue
        require(state_name, optimizer, "buffers")
        for buffer in optimizer.buffers:
            require(state_name, buffer, "param_index_map")
            yield from (p for p in buffer.param_index_map if p.dtype != torch.float32)


def _main_params_of(state_name: str, optimizer: Any) -> list[MainParam]:
    if isinstance(optimizer, Optimizer):
        return _whole_params(optimizer, {})
    require(state_name, optimizer, "optimizer", "config")
    inner = optimizer.optimizer
    name = type(optimizer).__name__
    if not isinstance(inner, Optimizer):
        raise UsageError(f"{state_name}: {name} around a {type(inner).__name__} is not supported")
    if is_hybrid(inner):
        return _inside_hybrid(state_name, inner, _outer_params_of(state_name, optimizer, inner))
    if getattr(optimizer.config, "use_precision_aware_optimizer", False):
        raise UsageError(
            f"{state_name}: {name} with use_precision_aware_optimizer keeps scaled state, and main weights inside the "
            "optimizer, which is not supported: train without it"
        )
    return _outer_params_of(state_name, optimizer, inner)


def _outer_params_of(state_name: str, optimizer: Any, inner: Optimizer) -> list[MainParam]:
    """Return the main params that an optimizer of Megatron gives to the optimizer inside it."""
    if _is_distributed(optimizer):
        return _distributed_main_params(state_name, optimizer, inner)
    if hasattr(optimizer, "fp32_from_float16_groups"):
        require(state_name, optimizer, "float16_groups")
        model_params = {
            id(main): parameter
            for low, high in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
            for parameter, main in zip(low, high, strict=True)
        }
    elif type(optimizer).__name__ == "FP32Optimizer":
        model_params = {}
    else:
        raise UsageError(
            f"{state_name}: {type(optimizer).__name__} is not supported: use DistributedOptimizer, or the float16 and "
            "FP32 optimizers"
        )
    return _whole_params(inner, model_params)


def _whole_params(inner: Optimizer, model_params: Mapping[int, torch.Tensor]) -> list[MainParam]:
    return [
        MainParam(inner, group, p, model_params.get(id(p), p), None, group)
        for group in inner.param_groups
        for p in group["params"]
    ]


def _inside_hybrid(state_name: str, hybrid: Any, outer: Iterable[MainParam]) -> list[MainParam]:
    """Replace the parameters of a HybridDeviceOptimizer by the copies that the optimizers inside it step.

    The hyperparameters stay those of its own param groups, because its step copies them into the groups inside.
    """
    require(state_name, hybrid, "sub_optimizers", "param_to_inner_param", "_sync_sub_optimizers_state_to_hdo")
    owners = {id(p): (o, group) for o in hybrid.sub_optimizers for group in o.param_groups for p in group["params"]}
    mains = []
    for main in outer:
        tensor = hybrid.param_to_inner_param.get(main.tensor)
        if id(tensor) not in owners:
            raise unknown_structure(
                state_name, f"{type(hybrid).__name__} does not step all parameters that it is given"
            )
        inner, group = owners[id(tensor)]
        mains.append(replace(main, inner=inner, group=group, tensor=tensor))
    return mains


def finish_hybrid(hybrid: Any) -> None:
    """Copy loaded state from the optimizers inside a HybridDeviceOptimizer into its own, as its step does."""
    for param, tensor in hybrid.param_to_inner_param.items():
        if tensor is not param:
            param.detach().copy_(tensor.detach())
    for group in hybrid.param_groups:
        group.pop("step", None)  # Megatron's own load leaves it, and each step would reset the steps inside to it
    hybrid._sync_sub_optimizers_state_to_hdo()


def _distributed_main_params(state_name: str, optimizer: Any, inner: Optimizer) -> list[MainParam]:
    """Return this rank's main params of a distributed optimizer, in the order of its param groups."""
    require(state_name, optimizer, "ddp_config", "gbuf_ranges", "model_param_group_index_map")
    require(state_name, optimizer.ddp_config, "use_megatron_fsdp")
    if optimizer.ddp_config.use_megatron_fsdp:
        raise UsageError(f"{state_name}: Megatron-FSDP is not supported: use DistributedDataParallel")
    found: dict[int, MainParam] = {}
    for gbuf_range in optimizer.gbuf_ranges:
        for buckets in gbuf_range.values():
            for bucket in buckets:
                for model_param, ranges in bucket["param_map"].items():
                    group_index, index = optimizer.model_param_group_index_map[model_param]
                    group = inner.param_groups[group_index]
                    tensor = group["params"][index]
                    param_range = ranges["param"]
                    if tensor.ndim != 1 or tensor.numel() != param_range.end - param_range.start:
                        raise unknown_structure(
                            state_name,
                            f"{type(optimizer).__name__} steps a tensor of shape {tuple(tensor.shape)} for the elements "
                            f"{param_range.start} to {param_range.end} of a parameter",
                        )
                    found[id(tensor)] = MainParam(inner, group, tensor, model_param, param_range.start, group)
    stepped = [tensor for group in inner.param_groups for tensor in group["params"]]
    if not all(id(tensor) in found for tensor in stepped):
        raise unknown_structure(state_name, f"gbuf_ranges of {type(optimizer).__name__} do not have all that it steps")
    return [found[id(tensor)] for tensor in stepped]


def _is_distributed(optimizer: Any) -> bool:
    distributed = megatron_class("optimizer.distrib_optimizer", "DistributedOptimizer")
    return distributed is not None and isinstance(optimizer, distributed)
