"""Optimizers of an engine: state, master weights and hyperparameters by original parameter.

ZeRO gives the inner optimizer flat tensors, and each rank steps its own. An optimizer view shows original parameters to
the ordinary code (see `optimizers/flat_tensors.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, ParameterName, SavedStates
from bytecheckpoint.frameworks.deepspeed.partitions import (
    FlatPartition,
    Fragment,
    flat_partitions,
    full_shape,
    has_unfused_masters,
    is_pipeline_replica,
    link_hp_state,
)
from bytecheckpoint.frameworks.optimizers.flat_capture import capture_flat_tensors
from bytecheckpoint.frameworks.optimizers.flat_restore import load_flat_tensors
from bytecheckpoint.frameworks.optimizers.flat_tensors import ErrorAdvice, FlatOptimizerTensor
from bytecheckpoint.frameworks.optimizers.master_weights import MASTER
from bytecheckpoint.frameworks.optimizers.names import NOT_HYPERPARAMETERS, ParameterNames
from bytecheckpoint.frameworks.optimizers.view import optimizer_view, placeholder_parameter
from bytecheckpoint.frameworks.tensors.flat_ranges import WHOLE_TENSOR, FlatRange, ParameterRange, flat_range_shards
from bytecheckpoint.representation.shards import LiveState, TensorKey

__all__ = ["EngineOptimizer", "capture_engine_optimizer", "load_engine_optimizer"]

_ADVICE = ErrorAdvice(
    framework="ZeRO",
    on_save="use an optimizer with one value per element",
    on_load="load it into an engine without ZeRO, or into fully_shard (FSDP2)",
    on_difference="ZeRO steps a param group as one: give them groups of their own",
)
# Not hyperparameters: FusedAdam's number of steps for state yet to be made, and the mark of a group of experts.
_BOOKKEEPING = frozenset({"step", "moe"})


@dataclass(slots=True, kw_only=True)
class _ZeroTensor(FlatOptimizerTensor):
    """A flat tensor of ZeRO, which also steps parameters without a gradient, with a gradient of zeros."""

    def state(self) -> Mapping[Any, Any]:
        """Return the live state, with the step as a tensor: DeepSpeed's own optimizers count steps in plain numbers."""
        live = FlatOptimizerTensor.state(self)
        if type(live.get("step")) is int:
            return {**live, "step": torch.tensor(float(live["step"]))}
        return live

    def install(self, state: Mapping[Any, Any]) -> None:
        """Replace the live state by `state`, with the step in the optimizer's own form."""
        step = state.get("step")
        if isinstance(step, torch.Tensor) and type(self.optimizer).__module__.startswith("deepspeed."):
            state = {**state, "step": int(step)}
        FlatOptimizerTensor.install(self, state)

    def skips_slot(self, slot: str, saved_types: set[str]) -> bool:
        """Skip master weights: `load_zero_modules` fills them together with the weights."""
        return slot == MASTER

    @property
    def zeroes_missing_state(self) -> bool:
        """True: a parameter without saved state begins with zeros."""
        return True


class EngineOptimizer:
    """An engine's optimizer, with this rank's fragments of its parameters.

    Args:
        kind: name of the state.
        wrapper: the engine's optimizer.
        names: names of all parameters in the states.

    Attributes:
        wrapper: the engine's optimizer.
        base: the optimizer that it wraps.
        partitions: the flat tensors; empty where each parameter has a master weight of its own.
        masters: id of a parameter -> this rank's master weights of it.

    Raises:
        UsageError: the optimizer has a parameter that is in no module of the states.
    """

    def __init__(self, kind: str, wrapper: Any, names: ParameterNames) -> None:
        self.kind = kind
        self.wrapper = wrapper
        self.base: Optimizer = wrapper.optimizer
        self.names = names
        self.masters: dict[int, Fragment] = {}
        self.partitions: list[FlatPartition] = []
        if has_unfused_masters(wrapper):
            for weight, master in self._unfused_pairs():
                self._name_of(weight)
                self.masters[id(weight)] = Fragment(master.detach(), 0, 0, master.numel())
            return
        self.partitions = flat_partitions(wrapper)
        for partition in self.partitions:
            for parameter, fragment in partition.fragments:
                self._name_of(parameter)
                self.masters[id(parameter)] = replace(fragment, data=fragment.data.detach())

    def _unfused_pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (parameter, its master weight), where each parameter has its own."""
        for weights, masters in zip(self.wrapper.fp16_groups, self.wrapper.fp32_groups, strict=True):
            yield from zip(weights, masters, strict=True)

    def _name_of(self, parameter: torch.Tensor) -> ParameterName:
        found = self.names.by_id.get(id(parameter))
        if found is None:
            raise UsageError(
                f"{self.kind}: {type(self.wrapper).__name__} has a parameter of shape {full_shape(parameter)} that is in"
                " none of the modules in the states: put the engine, or its module, beside its optimizer"
            )
        return found

    def parameter_range(self, parameter: torch.Tensor, fragment: Fragment) -> ParameterRange:
        """Describe this rank's elements of one parameter in a flat tensor."""
        fqn, aliases = self._name_of(parameter)
        return ParameterRange(
            fqn=fqn,
            aliases=list(aliases),
            shape=full_shape(parameter),
            start=fragment.start,
            offset=fragment.offset,
            count=fragment.count,
            owned=fragment.count > 0 and not is_pipeline_replica(parameter),
            box=WHOLE_TENSOR,
            requires_grad=parameter.requires_grad,
        )

    def view(self, *, saves: bool) -> tuple[Optimizer, ParameterNames, list[FlatOptimizerTensor]]:
        """Make the view of the optimizer by original parameters; return it, their names, and the flat tensors.

        Args:
            saves: the view is for a save. The checkpoint then records the wrapper's type too, which shows that the
                master weights are not state of a plain optimizer.
        """
        base_type = type(self.base).__name__
        view = optimizer_view(f"{type(self.wrapper).__name__}({base_type})" if saves else base_type)
        for group in self.base.param_groups:
            view.param_groups.append({**_hyperparameters(group), "params": []})
        if not self.partitions:
            return view, self._fill_unfused_view(view, saves=saves), []
        by_id: dict[int, ParameterName] = {}
        flat_tensors: list[FlatOptimizerTensor] = []
        for number, partition in enumerate(self.partitions):
            ranges = [self.parameter_range(parameter, fragment) for parameter, fragment in partition.fragments]
            flat_tensor = _ZeroTensor(
                optimizer=partition.optimizer,
                view=view,
                tensor=partition.data,
                ranges=ranges,
                joined=True,
                local_shape=tuple(partition.data.shape),
                description=f"flat tensor {number} (param group {partition.group})",
                advice=_ADVICE,
            )
            scalar = placeholder_parameter((), partition.data, requires_grad=False)
            for original in ranges:
                placeholder = placeholder_parameter(original.shape, scalar, requires_grad=original.requires_grad)
                flat_tensor.placeholders.append(placeholder)
                by_id[id(placeholder)] = original.parameter_name
                view.param_groups[partition.group]["params"].append(placeholder)
            flat_tensors.append(flat_tensor)
        return view, ParameterNames(by_id), flat_tensors

    def _fill_unfused_view(self, view: Optimizer, *, saves: bool) -> ParameterNames:
        """Fill a view whose parameters are the master weights themselves; return their names."""
        for own, group in zip(self.base.param_groups, view.param_groups, strict=True):
            group["params"] = list(own["params"])
        view.state = self.base.state
        if saves:
            state: Any = {
                master: {**self.base.state.get(master, {}), MASTER: master.detach()}
                for _, master in self._unfused_pairs()
            }
            view.state = state
        return ParameterNames({id(master): self._name_of(weight) for weight, master in self._unfused_pairs()})

    def write_back(self, view: Optimizer) -> None:
        """Copy the view's hyperparameters into the live optimizer, after its state was installed."""
        for own, group in zip(self.base.param_groups, view.param_groups, strict=True):
            own.update(_hyperparameters(group))
        link_hp_state(self.wrapper, self.partitions)


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    # The name of a group of experts says which ranks share it: layout, not a setting.
    excluded = _BOOKKEEPING | {"name"} if group.get("moe") else _BOOKKEEPING
    return {key: value for key, value in group.items() if key not in NOT_HYPERPARAMETERS and key not in excluded}


def capture_engine_optimizer(optimizer: EngineOptimizer) -> LiveState:
    """Describe the shards and values of an engine's optimizer.

    Raises:
        UsageError: state is neither one value per element nor one value; names it.
    """
    view, names, flat_tensors = optimizer.view(saves=True)
    state = capture_flat_tensors(optimizer.kind, [view], names, flat_tensors)
    masters: list[FlatRange] = []
    for partition in optimizer.partitions:
        for parameter, fragment in partition.fragments:
            original = optimizer.parameter_range(parameter, fragment)
            # The master weights of a model in full precision are its weights, which are saved already.
            if original.owned and partition.data.dtype != parameter.dtype:
                key = TensorKey(optimizer.kind, original.fqn, MASTER)
                master = original.flat_range(key, partition.data.detach(), original.offset)
                master.requires_grad = False
                masters.append(master)
    state.shards += flat_range_shards(masters)
    return state


def load_engine_optimizer(optimizer: EngineOptimizer, saved: SavedStates, into: Destination, *, strict: bool) -> None:
    """Plan the load of an engine's optimizer without its master weights.

    Raises:
        IncompatibleCheckpointError: as in `load_flat_tensors`.
    """
    view, names, flat_tensors = optimizer.view(saves=False)
    load_flat_tensors(optimizer.kind, [view], names, flat_tensors, saved, into, strict=strict)
    into.finish.append(lambda: optimizer.write_back(view))
