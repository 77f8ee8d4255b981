"""Describe modules and optimizers once more that an earlier save has described, in a fraction of the time.

What a capture finds out holds as long as the state consists of the same objects, and each tensor has the same memory in the
same form. To check that takes a microsecond for each tensor, and to find it out six to ten. Hooks and methods of the
program may describe a state differently each time, so a state that has some is captured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import compress
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch._C._dynamo.guards import TensorGuards  # checks type, shape, strides, dtype, device and flags of all in C++
from torch.optim import Optimizer

from bytecheckpoint.frameworks.tensors.dtensors import PLAIN_TYPES, is_dtensor, local_tensor
from bytecheckpoint.frameworks.tensors.plain import is_lazy_view
from bytecheckpoint.representation.shards import LaterShards, LiveShard, LiveState

__all__ = ["Again", "again_with_modules", "again_with_optimizers", "with_layout"]

#: Methods by which a module decides what its state_dict holds.
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")


class _Objects:
    """The objects of a state in a fixed order, and marks between them: names, types, counts.

    Attributes:
        objects: the objects.
        slots: those that are the state of a parameter in an optimizer.
        marks: the marks.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.slots: list[Any] = []
        self.marks: list[object] = []

    def add_module(self, module: nn.Module) -> bool:
        """Add a module with all below it, as state_dict goes through them; return False if it has hooks or methods."""
        own = module.__dict__
        kind: Any = type(module)
        if not _is_ordinary(kind) or own["_state_dict_hooks"] or not own.keys().isdisjoint(_METHODS):
            return False
        for hook in own["_state_dict_pre_hooks"].values():
            if not getattr(hook, "__module__", "").startswith("torch.distributed.fsdp._fully_shard."):
                return False
            hook(module, "", True)  # FSDP2 puts its sharded parameters back, as before a state_dict
        parameters, buffers = own["_parameters"], own["_buffers"]
        self.objects.append(module)
        self.objects += parameters.values()
        self.objects += buffers.values()
        self.marks += (kind, len(parameters), *parameters, *buffers, frozenset(own["_non_persistent_buffers_set"]))
        for name, inner in own["_modules"].items():
            self.marks.append(name)
            if inner is not None and not self.add_module(inner):
                return False
        self.marks.append(None)
        return True

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer with its parameters and their state."""
        self.objects.append(optimizer)
        self.marks += (type(optimizer), len(optimizer.param_groups))
        state = optimizer.state
        for group in optimizer.param_groups:
            parameters = group["params"]
            self.objects += parameters
            self.marks.append(len(parameters))
            for parameter in parameters:
                own = state.get(parameter)
                if own:
                    self.objects += own.values()
                    self.slots += own.values()
                    self.marks += own
                self.marks.append(None)


@cache
def _is_ordinary(kind: type) -> bool:
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in _METHODS)


class _SameObjects:
    """Recognizes the objects of a state, without keeping them or their memory alive.

    A new object may have the address of an old one. If it has the same place, form and memory too, then nothing is lost:
    the shards are made from the objects that are there now. Weak references would prevent `torch.utils.swap_tensors`.

    Args:
        found: objects of the state.
        tensors: tensors among them that the state's shards hold, in the order of the shards; several may hold none.
        shards: shards of each of the tensors, one or none.
    """

    def __init__(self, found: _Objects, tensors: Sequence[torch.Tensor], shards: Sequence[LiveShard | None]) -> None:
        self._marks = found.marks
        self._ids = list(map(id, found.objects))
        number_of = {one: number for number, one in enumerate(self._ids)}
        self._numbers = [number_of[id(tensor)] for tensor in tensors]
        local = list(map(local_tensor, tensors))
        self._places = _places(tensors, local)
        held = [tensor for tensor, shard in zip(local, shards, strict=True) if shard is not None]
        self._forms = [(tensor.data_ptr(), tensor.stride()) for tensor in held]
        with torch.enable_grad():  # else the guards do not look at requires_grad
            self._guards = TensorGuards(*local, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._holds = [shard is not None for shard in shards]
        self._prototypes = [replace(shard, data=_NO_DATA) for shard in shards if shard is not None]
        self._moving = [number for number, shard in enumerate(self._prototypes) if not shard.stands_still]

    def shards(self, found: _Objects) -> LaterShards | None:
        """Return shards of the same objects as they are now; None if anything is not the same."""
        if found.marks != self._marks or list(map(id, found.objects)) != self._ids:
            return None
        tensors = list(map(found.objects.__getitem__, self._numbers))
        local = [tensor if type(tensor) in PLAIN_TYPES else local_tensor(tensor) for tensor in tensors]
        with torch.enable_grad():
            if _places(tensors, local) != self._places or not self._guards.check(*local):
                return None
        return LaterShards(self._prototypes, list(compress(local, self._holds)), self._forms, self._moving)


def _places(tensors: Sequence[torch.Tensor], local: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Return what the guards of forms do not know: addresses, and how DTensors are distributed."""
    whole = [tensor for tensor, part in zip(tensors, local, strict=True) if tensor is not part]
    distributed = [(tensor._spec, tensor.requires_grad) for tensor in whole]  # type: ignore[attr-defined]
    return list(map(torch.Tensor.data_ptr, local)), distributed


_NO_DATA = torch.empty(0, device="cpu")


def _one_each(tensors: Sequence[torch.Tensor], shards: Sequence[LiveShard]) -> list[LiveShard | None] | None:
    """Return the shard of each tensor, None for a tensor without; None in all if a tensor has another kind of shards."""
    found: list[LiveShard | None] = []
    rest = iter(shards)
    shard = next(rest, None)
    for tensor in tensors:
        if not (type(tensor) in PLAIN_TYPES or (is_dtensor(tensor) and type(tensor._local_tensor) in PLAIN_TYPES)):
            return None
        local = local_tensor(tensor)
        if local.layout is not torch.strided or is_lazy_view(local) or local.dtype.is_complex:
            return None
        is_own = shard is not None and shard.fragments is None and shard.data.data_ptr() == local.data_ptr()
        if is_own and shard is not None and shard.data.shape == local.shape and shard.data.stride() == local.stride():
            found.append(shard)
            shard = next(rest, None)
        elif local.numel():
            return None
        else:
            found.append(None)
    return found if shard is None else None


#: Function that describes a state once more, by the caller's value of it; it returns None if that is not the same.
Again = Callable[[object], LiveState | None]


def again_with_modules(
    state: LiveState,
    tensors: Sequence[torch.Tensor],
    modules_of: Callable[[object], Sequence[nn.Module] | None],
    modules: Sequence[nn.Module],
) -> Again | None:
    """Return a function that describes a state of modules once more; None if it must be captured anew.

    Args:
        state: the state, as captured.
        tensors: its tensors, in the order of the shards.
        modules_of: function that returns the modules of a later value of the state.
        modules: its modules.
    """
    found = _of_modules(modules)
    shards = _one_each(tensors, state.shards)
    if state.tree is not None or found is None or shards is None:
        return None
    if not {id(tensor) for tensor in tensors} <= {id(one) for one in found.objects}:
        return None  # a hook made some
    same = _SameObjects(found, tensors, shards)
    name = state.name

    def again(value: object) -> LiveState | None:
        found = _of_modules(modules_of(value))
        known = None if found is None else same.shards(found)
        return None if known is None else LiveState(name, later=known, merged=True, entries=True)

    return again


def _of_modules(modules: Sequence[nn.Module] | None) -> _Objects | None:
    found = _Objects()
    try:
        return found if modules is not None and all(map(found.add_module, modules)) else None
    except KeyError:  # a module that keeps its parts in another way, such as a scripted one
        return None


def again_with_optimizers(
    state: LiveState,
    optimizers_of: Callable[[object], Sequence[Optimizer] | None],
    tree_of: Callable[[Sequence[Optimizer]], bytes | None],
    optimizers: Sequence[Optimizer],
) -> Again | None:
    """Return a function that describes a state of optimizers once more; None if it must be captured anew.

    Args:
        state: the state, as captured. Its shards are the tensors in the state of each parameter, in order.
        optimizers_of: function that returns the optimizers of a later value of the state.
        tree_of: function that encodes their plain values, which may differ each time; None if it cannot.
        optimizers: its optimizers.
    """
    found = _of_optimizers(optimizers)
    if found is None:
        return None
    tensors = found.slots
    if not all(isinstance(held, torch.Tensor) for held in tensors):
        return None
    shards = _one_each(tensors, state.shards)
    if shards is None:
        return None
    same = _SameObjects(found, tensors, shards)
    name = state.name

    def again(value: object) -> LiveState | None:
        optimizers = optimizers_of(value)
        found = _of_optimizers(optimizers)
        known = None if found is None else same.shards(found)
        if optimizers is None or known is None or (tree := tree_of(optimizers)) is None:
            return None
        return LiveState(name, later=known, tree=tree, merged=True)

    return again


def _of_optimizers(optimizers: Sequence[Optimizer] | None) -> _Objects | None:
    if optimizers is None or not all(isinstance(one.state, Mapping) for one in optimizers):
        return None
    found = _Objects()
    for optimizer in optimizers:
        found.add_optimizer(optimizer)
    return found


def with_layout(again: Again, layout: dict[str, Any]) -> Again:
    """Return a function that also sets the layout of the state, as data: the one of a capture keeps the tensors alive."""

    def describe(value: object) -> LiveState | None:
        state = again(value)
        if state is not None:
            state.layout = lambda: layout
        return state

    return describe
