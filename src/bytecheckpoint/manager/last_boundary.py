"""Hold the state of a run at its last step boundary: copies of small states, and marks of the large ones."""

from __future__ import annotations

import copy
import json
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import nn

from bytecheckpoint.collectives import Collective
from bytecheckpoint.engine.samples import SamplePlaces
from bytecheckpoint.errors import UsageError, listed
from bytecheckpoint.frameworks.fsdp1.detection import find_fsdp1
from bytecheckpoint.loading import load
from bytecheckpoint.manager.run_folder import by_age, step_folder
from bytecheckpoint.manager.saves import RunSaves
from bytecheckpoint.saving.background import versions_of
from bytecheckpoint.settings import settings

__all__ = ["LastBoundary", "SupportsReplay", "all_of", "has_state"]

_log = logging.getLogger("bytecheckpoint")
#: Steps of which the beginning shows whether a program changes its state outside of optimizers.
_LOOKS = 2


@runtime_checkable
class SupportsReplay(Protocol):
    """Data loader (`SupportsStreams`) that can feed its batches again.

    Attributes:
        batches: number of global batches that were taken so far.
    """

    batches: int

    def for_ranks(self, rank: int, ranks: int) -> Self:
        """Return a loader of the same data at its beginning, for one rank of another number of ranks."""

    def __next__(self) -> Any:
        """Feed the next batch."""


class LastBoundary:
    """The state of a run at its last step boundary.

    Args:
        run: saves of the run whose states are noted.

    Attributes:
        step: number of steps that were done.
        metadata: function that returns facts for the checkpoint.
    """

    def __init__(self, run: RunSaves) -> None:
        self._run = run
        self.step = 0
        self.metadata: Callable[[], Mapping[str, Any]] = dict
        self._held: dict[str, Any] = {}  # copies of small states
        self._parts: list[_HeldBuffer | _Held] | None = None
        self._marks = _Marks(run.states)
        self._looks = _LOOKS
        self._batches: dict[str, int] = {}  # taken from the data loaders

    def note(self, step: int, metadata: Callable[[], Mapping[str, Any]]) -> None:
        """Copy everything that a forward pass may change."""
        self.step, self.metadata = step, metadata
        for state, value in self._run.states.items():
            if isinstance(value, SupportsReplay):
                self._batches[state] = value.batches
            elif _is_small(value):
                self._held[state] = copy.deepcopy(value.state_dict() if has_state(value) else value)
        if self._parts is None:
            self._parts = [*_held_parts(self._run.states)]
        with torch.no_grad():
            for part in self._parts:
                part.update()
        self._marks.note()

    def changed(self) -> list[str]:
        """Return the names of parameters and optimizer states that are not those of the boundary any more."""
        return self._marks.changed()

    def look(self) -> None:
        """Warn in the first steps if the program changes its state between a boundary and the step of an optimizer."""
        if self._looks and self._marks.noted:
            self._looks -= 1
            if changed := self._marks.changed():
                self._looks = 0
                _log.warning(
                    "%s changed between maybe_save and the step of an optimizer: a rank that is lost behind such a change "
                    "cannot be compensated by a save just in time; change them before maybe_save", listed(changed, 3),
                )  # fmt: skip

    def restore(self) -> None:
        """Set everything that the training has changed since the boundary back."""
        states = self._run.states
        for state, held in self._held.items():
            if has_state(states[state]):
                states[state].load_state_dict(held)
            else:
                states[state] = held
        for part in self._parts or ():
            part.restore()

    def states(self, step: int, collective: Collective) -> dict[str, Any]:
        """Return the states as the surviving ranks save them: the streams of all ranks are divided among them."""
        return {state: self._for_survivors(state, step, collective) for state in self._run.states}

    def _for_survivors(self, state: str, step: int, collective: Collective) -> Any:
        value = self._run.states[state]
        if not hasattr(value, "for_ranks"):
            return value
        loader = value.for_ranks(collective.rank, collective.world_size)
        if state not in self._batches:
            return loader
        folder, timeout = self._run.keeper.folder, settings().timeout
        older = [info.step for info in by_age(folder.steps()) if info.step <= step]
        newest = json.dumps(older[-1:]).encode() if collective.rank == 0 else None
        for number in json.loads(collective.broadcast(f"just in time/{state}", newest, timeout=timeout)):
            load(step_folder(folder.url, number), {state: loader})
        batches = self._batches[state]
        if loader.batches > batches:
            raise UsageError(f"the loader had taken {batches} batches, and {loader.batches} at the save before")
        while loader.batches < batches:
            next(loader)
        return loader


class _HeldBuffer:
    """A buffer of a module, with a copy of its last value.

    Args:
        buffers: buffers of the module.
        name: name of the buffer.
    """

    def __init__(self, buffers: MutableMapping[str, Any], name: str) -> None:
        self._buffers, self._name = buffers, name
        self._tensor: torch.Tensor = buffers[name]
        self._copy = self._tensor.detach().clone()

    def update(self) -> None:
        """Copy the buffer again. Always: kernels such as batch norm's change buffers without counting their version up."""
        tensor = self._buffers[self._name]
        if tensor is self._tensor:
            self._copy.copy_(tensor)
        else:
            self._tensor, self._copy = tensor, tensor.detach().clone()

    def restore(self) -> None:
        """Put a clone of the copy in the place of the buffer."""
        self._buffers[self._name] = self._copy.clone()


class _Held:
    """A copy of the last value of something small.

    Args:
        get: function that returns the value.
        put: function that sets it back.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._get, self._put = get, put
        self.update()

    def update(self) -> None:
        """Copy the value again."""
        self._copy = copy.deepcopy(self._get())

    def restore(self) -> None:
        """Set the value back."""
        self._put(self._copy)


class _Marks:
    """Marks of parameters and optimizer states at a boundary, which show whether these have changed since.

    Version counters show the operations of torch, samples of parameters show writes through `.data` or numpy, and addresses
    show memory that was exchanged.

    Args:
        states: live objects of the run.

    Attributes:
        noted: True once tensors are marked.
    """

    def __init__(self, states: Mapping[str, Any]) -> None:
        # FSDP1 moves its parameters in every forward pass.
        self._states = {} if find_fsdp1(states) else states
        self.noted = False
        self._found: dict[str, torch.Tensor] = {}  # as the program has them, DTensors among them
        self._objects: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._places = SamplePlaces.of([])
        self._aliases: list[torch.Tensor] = []

    def note(self) -> None:
        """Mark the tensors as they are now."""
        objects = [*_objects_of(self._states)]
        if len(objects) != len(self._objects) or not all(map(operator.is_, objects, self._objects)):
            self._objects, self._found, self._addresses = objects, dict(_tensors_of(self._states)), []
        self._locals = [_local(tensor) for tensor in self._found.values()]
        addresses = [_address(tensor) for tensor in self._locals]
        if addresses != self._addresses:
            # Of optimizers no samples: nothing but their steps writes to their states.
            parameters = [isinstance(tensor, nn.Parameter) for tensor in self._found.values()]
            self._sampled = [n for n, tensor in enumerate(self._locals) if parameters[n] and _has_samples(tensor)]
            self._addresses, self._aliases = addresses, [self._locals[number].detach() for number in self._sampled]
            self._places = SamplePlaces.of(self._aliases)
        self._versions, self._samples = versions_of(self._locals), self._places.read(self._aliases)
        self.noted = True

    def changed(self) -> list[str]:
        """Return the names of the tensors that have changed."""
        if not self.noted:
            return []
        names, addresses = [*self._found], [_address(tensor) for tensor in self._locals]
        moved = {n for n, address in enumerate(addresses) if address != self._addresses[n]}
        numbers = {n for n in moved if addresses[n]}  # others: FSDP2 has gathered them, and freed them meanwhile
        numbers |= {*(versions_of(self._locals) != self._versions).nonzero()[0].tolist()}
        if not moved:  # the samples are where they were
            now = self._places.read(self._aliases)
            numbers |= {self._sampled[number] for number in self._samples.differing_from(now).tolist()}
        found = dict(_tensors_of(self._states))
        others = {name for name in found.keys() & self._found if _is_other(self._found[name], found[name])}
        return sorted({names[number] for number in numbers} | others | (found.keys() ^ self._found.keys()))


def _objects_of(states: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of `_tensors_of` in another order, without their names, which take longest."""
    for part in (part for module in all_of(states, nn.Module) for part in module.modules()):
        yield from (parameter for parameter in part._parameters.values() if parameter is not None)
    for slots in (slots for one in all_of(states, torch.optim.Optimizer) for slots in one.state.values()):
        yield from (value for value in slots.values() if isinstance(value, torch.Tensor))


def _tensors_of(states: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of modules and the states of optimizers, by name."""
    for state, value in states.items():
        several = value if isinstance(value, list | tuple) else [value]
        for number, one in enumerate(several):
            where = state if len(several) == 1 else f"{state}/{number}"
            if isinstance(one, nn.Module):
                for name, parameter in one.named_parameters(remove_duplicate=False):
                    yield f"{where}/{name}", parameter
            elif isinstance(one, torch.optim.Optimizer):
                for index, slots in enumerate(one.state.values()):
                    for slot, tensor in slots.items():
                        if isinstance(tensor, torch.Tensor):
                            yield f"{where}/state/{index}/{slot}", tensor


def _is_other(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Return whether a tensor has taken the place of another one. FSDP2 may put tensors of other meshes there."""
    return before is not now and getattr(before, "device_mesh", None) == getattr(now, "device_mesh", None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor on this rank; of any other tensor, itself."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _has_samples(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # it has several memories, or none, as sparse tensors
        return -1


def all_of(states: Mapping[str, Any], kind: type[Any]) -> list[Any]:
    """Return the objects of a class among states, and in lists of objects."""
    values = (value if isinstance(value, list | tuple) else [value] for value in states.values())
    return [value for several in values for value in several if isinstance(value, kind)]


def _held_parts(states: Mapping[str, Any]) -> Iterator[_HeldBuffer | _Held]:
    """Yield copies of all that a forward pass or a schedule may change in modules and optimizers."""
    for part in (part for module in all_of(states, nn.Module) for part in module.modules()):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield _HeldBuffer(part._buffers, name)
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield _Held(part.get_extra_state, part.set_extra_state)
    for optimizer in all_of(states, torch.optim.Optimizer):
        yield _Held(partial(_options_of, optimizer), partial(_set_options, optimizer))


def _options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of parameter groups, such as learning rates."""
    kinds = (torch.Tensor, int, float, str, tuple, type(None))
    return [{name: one for name, one in group.items() if isinstance(one, kinds)} for group in optimizer.param_groups]


def _set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    for group, held in zip(optimizer.param_groups, options, strict=False):
        group.update(held)


def has_state(value: Any) -> bool:
    """Return whether an object can return and load its state."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _is_small(value: Any) -> bool:
    """Return whether a state holds others than modules and optimizers, whose tensors stay until an optimizer steps."""
    several = value if isinstance(value, list | tuple) and value else [value]
    return not all(isinstance(each, nn.Module | torch.optim.Optimizer) for each in several)
