"""Optimizers of an engine: state, master weights and hyperparameters by original parameter.

ZeRO gives the inner optimizer flat tensors, and each rank steps its own. An optimizer view shows original parameters to
the ordinary code (see `optimizers/flat_tensors.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, ParameterName, SavedStates
from bytecheckpoint.frameworks.deepspeed.detection import is_wrapped_optimizer
from bytecheckpoint.frameworks.deepspeed.partitions import (
    FlatPartition,
    HeldRange,
    check_masters,
    check_tiling,
    flat_partitions,
    full_shape,
    has_unfused_masters,
    is_pipeline_replica,
    link_hp_state,
)
from bytecheckpoint.frameworks.deepspeed.tensor_parallel import AutoTPShard
from bytecheckpoint.frameworks.optimizers.flat_capture import capture_flat_tensors
from bytecheckpoint.frameworks.optimizers.flat_restore import load_flat_tensors
from bytecheckpoint.frameworks.optimizers.flat_tensors import ErrorAdvice, FlatOptimizerTensor
from bytecheckpoint.frameworks.optimizers.names import NOT_HYPERPARAMETERS, ParameterNames, as_optimizers
from bytecheckpoint.frameworks.optimizers.view import optimizer_view, placeholder_parameter
from bytecheckpoint.frameworks.tensors.flat_ranges import WHOLE_TENSOR, FlatRange, ParameterRange, flat_range_shards
from bytecheckpoint.representation.shards import MASTER, LiveState, TensorKey

__all__ = ["EngineOptimizer", "capture_engine_optimizer", "load_engine_optimizer", "steps_parts"]

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
    """A flat tensor of ZeRO. ZeRO steps parameters without a gradient too, with a gradient of zeros."""

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


class _SplitTensor(_ZeroTensor):
    """One parameter that AutoTP splits, whose state the optimizer keeps in the shape of this rank's part.

    State that follows the elements is shown as flat. `master`: the master weights, shown as state of their own; None: no.
    """

    master: torch.Tensor | None = None

    def state(self) -> Mapping[Any, Any]:
        """Return the live state, flat; reshape makes views of it."""
        live = dict(_ZeroTensor.state(self))
        if self.master is not None:
            live[MASTER] = self.master
        shape = self.tensor.shape
        return {k: v.reshape(-1) if isinstance(v, torch.Tensor) and v.shape == shape else v for k, v in live.items()}

    def install(self, state: Mapping[Any, Any]) -> None:
        """Replace the live state by `state`, in the shape of the part."""
        flat, shape = self.local_shape, self.tensor.shape
        fits = {k: v.view(shape) if isinstance(v, torch.Tensor) and v.shape == flat else v for k, v in state.items()}
        _ZeroTensor.install(self, fits)


def steps_parts(state_name: str, optimizers: Sequence[Any] | None, parts: Mapping[int, AutoTPShard]) -> bool:
    """Return whether `optimizers` are one torch optimizer of parameters that AutoTP splits.

    Raises:
        UsageError: they are several.
    """
    if not parts or not optimizers:
        return False
    found = any(id(p) in parts for o in optimizers for group in o.param_groups for p in group["params"])
    if found and len(optimizers) > 1:
        raise UsageError(
            f"{state_name}: several optimizers of parameters that AutoTP splits: give each a name of its own"
        )
    return found


class EngineOptimizer:
    """An engine's optimizer, with this rank's fragments of its parameters.

    Args:
        state_name: name of the state.
        value: the engine's optimizer: DeepSpeed's; or torch's own, or a list of one, of an engine without ZeRO.
        names: names of all parameters in the states.
        parts: id of a parameter -> this rank's part of it, for those that AutoTP splits.

    Attributes:
        wrapper: DeepSpeed's optimizer; else None.
        base: the optimizer that it wraps, or torch's own.
        partitions: the flat tensors; empty where the optimizer has a tensor for each parameter.
        masters: id of a parameter -> this rank's master weights of it.

    Raises:
        UsageError: the optimizer has a parameter that is in no module of the states, or is built as no known version.
    """

    def __init__(self, state_name: str, value: Any, names: ParameterNames, parts: Mapping[int, AutoTPShard]) -> None:
        self.state_name = state_name
        self.wrapper: Any = value if is_wrapped_optimizer(value) else None
        plain = as_optimizers(state_name, value)
        self.base: Optimizer = value.optimizer if plain is None else plain[0]
        self.names = names
        self.parts = parts
        self.masters: dict[int, HeldRange] = {}
        self.partitions: list[FlatPartition] = []
        wrapper = self.wrapper
        if wrapper is None:
            return
        if has_unfused_masters(wrapper):
            for weight, master in self._weights_and_masters():
                self._name_of(weight)
                self.masters[id(weight)] = HeldRange(master.detach(), 0, 0, master.numel())
            return
        try:
            self.partitions = flat_partitions(state_name, wrapper)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{state_name}: {type(wrapper).__name__} is not built as in the versions of DeepSpeed that are supported "
                f"({type(error).__name__}: {error})"
            ) from error
        check_tiling(state_name, wrapper, self.partitions)
        for partition in self.partitions:
            for parameter, held in partition.ranges:
                self._name_of(parameter)
                self.masters[id(parameter)] = replace(held, data=held.data.detach())

    def _weights_and_masters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (parameter, its master weight), where each parameter has its own."""
        for weights, masters in zip(self.wrapper.fp16_groups, self.wrapper.fp32_groups, strict=True):
            yield from zip(weights, masters, strict=True)

    def _name_of(self, parameter: torch.Tensor) -> ParameterName:
        found = self.names.by_id.get(id(parameter))
        if found is None:
            raise UsageError(
                f"{self.state_name}: {type(self.wrapper or self.base).__name__} has a parameter of shape "
                f"{full_shape(parameter)} that is in none of the modules in the states: put the engine, or its module, "
                "beside its optimizer"
            )
        return found

    def parameter_range(self, parameter: torch.Tensor, held: HeldRange) -> ParameterRange:
        """Describe this rank's elements of one parameter in a flat tensor."""
        fqn, aliases = self._name_of(parameter)
        part = self.parts.get(id(parameter))
        return ParameterRange(
            fqn=fqn,
            aliases=list(aliases),
            shape=full_shape(parameter) if part is None else part.shape,
            start=held.start,
            offset=held.offset,
            count=held.count,
            owned=held.count > 0 and not is_pipeline_replica(parameter),
            box=WHOLE_TENSOR if part is None else part.box,
            requires_grad=parameter.requires_grad,
        )

    def view(self, *, saves: bool) -> tuple[Optimizer, ParameterNames, list[FlatOptimizerTensor]]:
        """Make the view of the optimizer by original parameters; return it, their names, and the flat tensors.

        Args:
            saves: the view is for a save. The checkpoint then records the wrapper's type too, which shows that the
                master weights are not state of a plain optimizer.
        """
        base_type = type(self.base).__name__
        wraps = saves and self.wrapper is not None
        view = optimizer_view(f"{type(self.wrapper).__name__}({base_type})" if wraps else base_type, self.base)
        for group in self.base.param_groups:
            view.param_groups.append({**_hyperparameters(group), "params": []})
        if not self.partitions:
            return self._tensor_by_tensor(view, saves=saves)
        by_id: dict[int, ParameterName] = {}
        flat_tensors: list[FlatOptimizerTensor] = []
        for number, partition in enumerate(self.partitions):
            ranges = [self.parameter_range(parameter, held) for parameter, held in partition.ranges]
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

    def _tensor_by_tensor(
        self, view: Optimizer, *, saves: bool
    ) -> tuple[Optimizer, ParameterNames, list[FlatOptimizerTensor]]:
        """Fill a view of an optimizer that has a tensor for each parameter: its master weight, or itself."""
        has_masters = self.wrapper is not None
        weights = {id(master): weight for weight, master in self._weights_and_masters()} if has_masters else {}
        by_id: dict[int, ParameterName] = {}
        flat_tensors: list[FlatOptimizerTensor] = []
        state: dict[Any, Any] = {k: v for k, v in self.base.state.items() if not isinstance(k, torch.Tensor)}
        for own, group in zip(self.base.param_groups, view.param_groups, strict=True):
            for tensor in own["params"]:
                weight = weights.get(id(tensor), tensor)
                parameter = tensor
                if id(weight) in self.parts:
                    flat_tensors.append(self._split_tensor(view, weight, tensor, has_master=saves and has_masters))
                    (parameter,) = flat_tensors[-1].placeholders
                else:
                    master = {MASTER: tensor.detach()} if has_masters else {}
                    state[tensor] = {**self.base.state.get(tensor, {}), **master}
                group["params"].append(parameter)
                by_id[id(parameter)] = self._name_of(weight)
        view.state = state if saves else self.base.state  # type: ignore[assignment]
        return view, ParameterNames(by_id), flat_tensors

    def _split_tensor(
        self, view: Optimizer, weight: torch.Tensor, tensor: torch.Tensor, *, has_master: bool
    ) -> FlatOptimizerTensor:
        count = tensor.numel()
        original = self.parameter_range(weight, HeldRange(tensor.detach(), 0, 0, count))
        found = _SplitTensor(
            optimizer=self.base,
            view=view,
            tensor=tensor,
            ranges=[original],
            joined=False,
            local_shape=(count,),
            description=f"the part of {original.fqn}",
            advice=_ADVICE,
        )
        found.master = tensor.detach() if has_master else None
        found.placeholders.append(placeholder_parameter(original.shape, tensor, requires_grad=original.requires_grad))
        return found

    def write_back(self, view: Optimizer) -> None:
        """Copy the view's hyperparameters into the live optimizer, after its state was installed."""
        for own, group in zip(self.base.param_groups, view.param_groups, strict=True):
            own.update(_hyperparameters(group))
        if self.wrapper is not None:
            link_hp_state(self.wrapper, self.partitions)


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    # The name of a group of experts says which ranks share it: layout, not a setting.
    excluded = _BOOKKEEPING | {"name"} if group.get("moe") else _BOOKKEEPING
    return {key: value for key, value in group.items() if key not in NOT_HYPERPARAMETERS and key not in excluded}


def capture_engine_optimizer(optimizer: EngineOptimizer) -> LiveState:
    """Describe the shards and values of an engine's optimizer.

    Raises:
        UsageError: state is neither one value per element nor one value; names it. Or master weights do not round to the
            weights.
    """
    if optimizer.partitions:
        check_masters(optimizer.state_name, optimizer.wrapper, optimizer.partitions)
    view, names, flat_tensors = optimizer.view(saves=True)
    state = capture_flat_tensors(optimizer.state_name, [view], names, flat_tensors)
    masters: list[FlatRange] = []
    for partition in optimizer.partitions:
        for parameter, held in partition.ranges:
            original = optimizer.parameter_range(parameter, held)
            # The master weights of a model in full precision are its weights, which are saved already.
            if original.owned and partition.data.dtype != parameter.dtype:
                key = TensorKey(optimizer.state_name, original.fqn, MASTER)
                master = original.flat_range(key, partition.data.detach(), original.offset)
                master.requires_grad = False
                masters.append(master)
    state.shards += flat_range_shards(masters)
    return state


def load_engine_optimizer(
    optimizer: EngineOptimizer, saved: SavedStates, destination: Destination, *, strict: bool
) -> None:
    """Plan the load of an engine's optimizer without its master weights.

    Raises:
        IncompatibleCheckpointError: as in `load_flat_tensors`.
    """
    view, names, flat_tensors = optimizer.view(saves=False)
    load_flat_tensors(optimizer.state_name, [view], names, flat_tensors, saved, destination, strict=strict)
    destination.finish.append(lambda: optimizer.write_back(view))
