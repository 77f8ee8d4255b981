"""Load Megatron optimizers from state by parameter name, saved by any framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.megatron.layouts import ParameterLayout, TensorBox
from bytecheckpoint.frameworks.megatron.optimizers import MegatronOptimizerView, ViewParam
from bytecheckpoint.frameworks.megatron.requests import BoxRequests
from bytecheckpoint.frameworks.optimizers.names import ParameterNames
from bytecheckpoint.frameworks.optimizers.restore import ParameterRestore, load_optimizers
from bytecheckpoint.frameworks.optimizers.saved_trees import SavedTrees
from bytecheckpoint.frameworks.optimizers.state_dtypes import SINGLE_VALUE_SLOTS
from bytecheckpoint.frameworks.optimizers.state_memory import allocate_state, is_reusable, request_state
from bytecheckpoint.representation.shards import MASTER

__all__ = ["load_megatron_optimizers"]


def load_megatron_optimizers(
    state_name: str,
    optimizers: Sequence[Any],
    names: ParameterNames,
    layouts: Mapping[int, ParameterLayout],
    model_states: Mapping[int, str],
    saved: SavedStates,
    destination: Destination,
    *,
    strict: bool,
) -> None:
    """Plan the load of one state.

    Args:
        state_name: name of the state.
        optimizers: the live optimizers.
        names: names of all parameters.
        layouts: id of a parameter -> its layout.
        model_states: state name of the module of each parameter, by the parameter's id.
        saved: the checkpoint.
        destination: receives the plan.
        strict: strictness of the load about this state.

    Raises:
        IncompatibleCheckpointError: saved state does not follow the elements of its parameter. The plan's `finish` raises
            it, before anything is installed, if an optimizer keeps one step per group and the saved steps differ in one.
    """
    view = MegatronOptimizerView(state_name, optimizers, names, layouts, with_copies=True)
    params = {id(param.placeholder): param for param in view.params}

    def restorer(
        optimizer: Optimizer, parameter: torch.Tensor, name: tuple[str, tuple[str, ...]], on_device: bool
    ) -> ParameterRestore:
        param = params[id(parameter)]
        model_state = model_states[id(param.main.model_param)]
        state = states.setdefault(id(param.main.tensor), _LoadedState())
        loads.append(_ParamLoad(state_name, param, optimizer, name, on_device, model_state, requests, state))
        return loads[-1]

    states: dict[int, _LoadedState] = {}  # by id of the stepped tensor
    loads: list[_ParamLoad] = []
    requests = BoxRequests(destination)
    load_optimizers(state_name, [view.optimizer], view.names, saved, destination, strict=strict, restorer=restorer)
    requests.finish()
    destination.finish.insert(0, partial(_check_group_steps, state_name, loads))
    destination.finish.append(view.write_back)


def _check_group_steps(state_name: str, loads: Sequence[_ParamLoad]) -> None:
    """Check that all parameters of a group have one step where the optimizer keeps one step per group.

    Raises:
        IncompatibleCheckpointError: the saved steps differ inside a group.
    """
    first_of_group: dict[int, _ParamLoad] = {}
    for load in loads:
        if (step := load.group_step()) is None:
            continue
        first = first_of_group.setdefault(id(load.param.main.group), load)
        if (known := first.group_step()) != step:
            raise IncompatibleCheckpointError(
                f"{state_name}: {type(load.param.main.inner).__name__} keeps one step for all parameters of a group, and "
                f"the checkpoint has {known} for {first.name!r}, {step} for {load.name!r}: use AdamW of torch, or "
                "groups of their own"
            )


@dataclass(slots=True)
class _LoadedState:
    """The loaded state of one stepped tensor. Each parameter that is fused in the tensor adds its part.

    Attributes:
        memory: slot -> elementwise state.
        scalars: slot -> one-element tensor.
        values: other state.
    """

    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[Any, Any] = field(default_factory=dict)


class _ParamLoad:
    """The load of one parameter's optimizer state (a `ParameterRestore`)."""

    def __init__(
        self,
        state_name: str,
        param: ViewParam,
        optimizer: Optimizer,
        name: tuple[str, tuple[str, ...]],
        on_device: bool,
        model_state: str,
        requests: BoxRequests,
        state: _LoadedState,
    ) -> None:
        self._state_name = state_name
        self._optimizer = optimizer
        self.param = param
        self._names = (name[0], *name[1])
        self._on_device = on_device
        self._model_state = model_state
        self._requests = requests
        self._state = state
        self._own_scalars: set[str] = set()  # slots that hold one value for each of the fused parameters

    def plan(self, saved: SavedStates, trees: SavedTrees, destination: Destination) -> bool:
        """Request this rank's elements of the state, the single values, and the master weights."""
        state_name, boxes = self._state_name, self.param.layout.boxes
        filled: dict[str, list[TensorBox]] = {}
        for box in boxes:
            # The single values of a fused parameter are saved under the parameter's own name.
            for names in dict.fromkeys((box.names, self._names)):
                for found in saved.slots(state_name, names):
                    destination.recognized.add(found.key)
                    if found.key.slot == MASTER and not saved.names_of(self._model_state, box.names):
                        continue  # the weight is not loaded either, and the next step would put the master in its place
                    self._plan_slot(found, box, trees, destination, filled)
                for name in names:
                    # Tied here, but stored separately: the other copies are claimed too.
                    destination.recognized.update(other.key for other in saved.slots(state_name, (name,)))
        if self.param.main.is_copy:
            for box in boxes:
                if box in filled.get(MASTER, ()):
                    continue
                weight = saved.find(self._model_state, box.names)
                if weight is not None:
                    # The checkpoint has no master weights: the model's own weights are exact.
                    self._requests.add(box, weight, self.param.main.tensor.detach(), self.param.main.start)
        for slot, filled_boxes in filled.items():
            destination.missing += [
                str(b.key(state_name, slot)) for b in boxes if b not in filled_boxes and slot != MASTER
            ]
        values, _ = trees.take_values(self._names[0], self._names[1:])
        self._state.values.update(values)
        return bool(filled or self._own_scalars or values)

    def _plan_slot(
        self,
        found: SavedTensor,
        box: TensorBox,
        trees: SavedTrees,
        destination: Destination,
        filled: dict[str, list[TensorBox]],
    ) -> None:
        slot, shape = found.key.slot, found.global_shape
        if (found.key.fqn, slot) in trees.nested:
            raise self._incompatible(found, "is inside a container")
        if slot == MASTER and not self.param.main.is_copy:
            return
        is_elementwise = shape == box.global_shape or (box.resizable and len(shape) == len(box.global_shape))
        if is_elementwise and slot not in SINGLE_VALUE_SLOTS:
            if box not in filled.setdefault(slot, []):
                filled[slot].append(box)
                self._requests.add(box, found, self._target(found, slot, box, trees), self.param.main.start)
        elif shape.count(1) != len(shape):
            raise self._incompatible(found, f"has shape {shape}")
        elif slot not in self._own_scalars:
            self._own_scalars.add(slot)
            tensor = self.param.main.tensor.detach()
            dtype = self._choose_dtype(found, trees, None)
            target = allocate_state(found, tensor, dtype, on_device=self._on_device)
            first = self._state.scalars.setdefault(slot, target)
            if first is not target:
                destination.checks.append(partial(self._check_equal, found, first, target))
            request_state(destination, found, target)

    def _choose_dtype(self, found: SavedTensor, trees: SavedTrees, live: object) -> torch.dtype:
        shape = tuple(self.param.layout.tensor.shape)
        stepped = self.param.main.tensor.dtype
        return trees.dtypes.choose(found, self._optimizer, shape, stepped, live, on_device=self._on_device)

    def _target(self, found: SavedTensor, slot: str, box: TensorBox, trees: SavedTrees) -> torch.Tensor:
        """Return memory for this rank's elements: the live tensor where it fits, else a new one."""
        tensor = self.param.main.tensor.detach()
        if slot == MASTER:
            return tensor
        target = self._state.memory.get(slot)
        if target is None:
            live = self.param.main.state().get(slot)
            dtype = self._choose_dtype(found, trees, live)
            whole = found.global_shape == box.global_shape
            if whole and is_reusable(live, tuple(tensor.shape), dtype, self._state.memory.values()):
                target = live
            else:
                # Zeros, since a checkpoint may hold nothing of the rows that a vocabulary is padded with.
                target = torch.zeros_like(tensor, dtype=dtype)
            self._state.memory[slot] = target
        return target

    def _check_equal(self, found: SavedTensor, first: torch.Tensor, other: torch.Tensor) -> None:
        if not torch.equal(first, other):
            raise self._incompatible(found, f"is {other.item()}, and that of a parameter fused with it {first.item()}")

    def _incompatible(self, found: SavedTensor, problem: str) -> IncompatibleCheckpointError:
        return IncompatibleCheckpointError(
            f"{found.key} {problem}, and Megatron's optimizers step the parameter of shape "
            f"{tuple(self.param.layout.tensor.shape)} here element by element: state that does not follow the elements "
            "cannot be loaded"
        )

    @property
    def name(self) -> str:
        """The parameter's FQN."""
        return self._names[0]

    def group_step(self) -> int | None:
        """Return the loaded step if the optimizer keeps it in the group; to be called after the bytes have arrived."""
        step = (
            self._state.scalars.get("step", self._state.values.get("step")) if self.param.main.step_in_group else None
        )
        return None if step is None else int(step)

    def install(self) -> None:
        """Replace the parameter's state by the loaded one."""
        inner, tensor = self.param.main.inner, self.param.main.tensor
        values = {**self._state.scalars, **self._state.values}
        if (step := self.group_step()) is not None:
            self.param.main.group["step"] = step
            del values["step"]
        inner.state.pop(tensor, None)
        if self._state.memory or values:
            inner.state[tensor].update({**self._state.memory, **values})

    def clear(self) -> None:
        """Remove the parameter's state, unless a parameter fused with it has some."""
        if not (self._state.memory or self._state.scalars or self._state.values):
            self.param.main.inner.state.pop(self.param.main.tensor, None)
