"""Modules: the FQNs of parameters and buffers in the bare model, tied weights, capture, and loading in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bytecheckpoint.errors import IncompatibleCheckpointError
from bytecheckpoint.frameworks.base import Destination, ParameterName, SavedStates, SavedTensor
from bytecheckpoint.frameworks.extra_states import plan_extra_states
from bytecheckpoint.frameworks.objects.capture import encode_value
from bytecheckpoint.frameworks.optimizers.master_weights import choose_saved_weight
from bytecheckpoint.frameworks.tensors.allocation import FilledMemory, empty_like_layout, make_writable
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtensors import local_tensor
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name
from bytecheckpoint.frameworks.tensors.plain import check_storable, is_tensor_like, lists_own_shards
from bytecheckpoint.frameworks.wrappers import bare_name, walk_modules
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey
from bytecheckpoint.representation.values.codec import equal

__all__ = [
    "ModuleScan",
    "OwnTensors",
    "ScannedModule",
    "as_modules",
    "capture_modules",
    "find_saved_parameter",
    "load_modules",
    "modules_of",
    "scan_modules",
]


@dataclass(slots=True)
class ScannedModule:
    """One module of a state and its state_dict.

    Attributes:
        module: module of the user, wrappers included.
        entries: its state_dict, with torch's keys.
        names: state_dict key -> FQN in the bare model.
        owners: state_dict prefix ("" or "a.b.") -> the module whose entries start with it.
        prefixes: prefix in the bare model by state_dict prefix.
    """

    module: nn.Module
    entries: dict[str, Any]
    names: dict[str, str]
    owners: dict[str, nn.Module]
    prefixes: dict[str, str]


@dataclass(slots=True)
class _NamedTensor:
    """One tensor of a state.

    Attributes:
        fqn: the first of its names. Several tensors of a state may have it: replicas, in several modules of a list.
        value: the tensor.
        aliases: its further names.
        hook_entry: (module, state_dict key) of a tensor that a hook made, whose memory is not the module's; else None.
    """

    fqn: str
    value: torch.Tensor
    aliases: tuple[str, ...]
    hook_entry: tuple[ScannedModule, str] | None


@dataclass(slots=True)
class ModuleScan:
    """All modules of one state as one namespace.

    Attributes:
        modules: the modules, in their order.
        tensors: each tensor once, in state_dict order.
        values: FQN -> entries that are not tensors of a module itself (extra states), one of each module that has the FQN.
        setters: FQN of such entries -> for each of them, the function that installs a loaded value.
        parameters: id of a parameter -> its name.
    """

    modules: list[ScannedModule]
    tensors: list[_NamedTensor] = field(default_factory=list)
    values: dict[str, list[Any]] = field(default_factory=dict)
    setters: dict[str, list[Callable[[Any], None]]] = field(default_factory=dict)
    parameters: dict[int, ParameterName] = field(default_factory=dict)


def modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over a module and those inside it in the order of `modules`, but quicker: each save waits for it.

    A module that has two places comes twice.
    """
    waiting = [module]
    while waiting:
        yield (one := waiting.pop())
        waiting.extend(inner for inner in reversed(one._modules.values()) if inner is not None)


def as_modules(state_name: str, value: object) -> list[nn.Module] | None:
    """Return `value` as a list of modules (pipeline stages, virtual stages), or None when it is something else.

    An empty list means a rank without a stage in the state "model", and a plain value in any other state.
    """
    if isinstance(value, nn.Module):
        return [value]
    if (
        isinstance(value, list | tuple)
        and (value or state_name == "model")
        and all(isinstance(m, nn.Module) for m in value)
    ):
        return list(value)
    return None


def scan_modules(
    state_name: str, modules: Sequence[nn.Module], entries: Callable[[nn.Module], dict[str, Any]] | None = None
) -> ModuleScan:
    """Find the names and tensors of `modules`. Tensors of several modules that share a name are replicas of one tensor.

    Args:
        state_name: name of the state.
        modules: all modules of the state.
        entries: returns the state_dict entries of a module, with keys as `walk_modules` prefixes them. None: call
            `state_dict`, which also makes FSDP2 reshard its parameters after an evaluation forward pass.
    """
    scan = ModuleScan([_scan_module(m, entries) for m in modules])
    tensors = _TensorNames()
    for scanned in scan.modules:
        own = OwnTensors(scanned)
        for key, value in scanned.entries.items():
            fqn = scanned.names[key]
            # An extra state may be a tensor, and a parameter or buffer may be called "..._extra_state".
            if is_tensor_like(value) and (value in own or not key.endswith("_extra_state")):
                assert isinstance(value, torch.Tensor)
                tensors.add(fqn, value, None if own.share_memory(value) else (scanned, key))
                continue
            scan.values.setdefault(fqn, []).append(value)
            scan.setters.setdefault(fqn, []).append(_setter(scanned, key))
    scan.tensors = tensors.named()
    scan.parameters = {id(tensor.value): (tensor.fqn, tensor.aliases) for tensor in scan.tensors}
    for scanned in scan.modules:
        _add_hidden_parameters(scan, scanned)
    return scan


class _TensorNames:
    """Collects the tensors of a state: each once, under the first of its names, with the others as aliases."""

    def __init__(self) -> None:
        self._by_id: dict[int, _NamedTensor] = {}
        self._by_fqn: dict[str, _NamedTensor] = {}
        self._replicated = False

    def add(self, fqn: str, value: torch.Tensor, hook_entry: tuple[ScannedModule, str] | None) -> None:
        """Add a state_dict entry; the arguments are those of `_NamedTensor`."""
        tensor = self._by_id.get(id(value))
        if tensor is None:
            tensor = self._by_id[id(value)] = _NamedTensor(fqn, value, (), hook_entry)
        elif fqn != tensor.fqn and fqn not in tensor.aliases:
            tensor.aliases += (fqn,)
        if self._by_fqn.setdefault(fqn, tensor) is not tensor:
            self._replicated = True

    def named(self) -> list[_NamedTensor]:
        """Return the tensors. Those that share a name are replicas, and get the first of all their names."""
        tensors = list(self._by_id.values())
        if self._replicated:
            first = _first_equivalent([(tensor.fqn, *tensor.aliases) for tensor in tensors])
            for tensor in tensors:
                names = (tensor.fqn, *tensor.aliases)
                tensor.fqn = first[tensor.fqn]
                tensor.aliases = tuple(name for name in names if name != tensor.fqn)
        return tensors


def _first_equivalent(groups: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """Map each name to the first name that is equivalent to it; names of one group are equivalent."""
    order = {name: number for number, name in enumerate(dict.fromkeys(chain.from_iterable(groups)))}
    first = {name: name for name in order}

    def find(name: str) -> str:
        while first[name] != name:
            name = first[name]
        return name

    for name, *others in groups:
        for other in others:
            low, high = sorted((find(name), find(other)), key=order.__getitem__)
            first[high] = low
    return {name: find(name) for name in first}


class OwnTensors:
    """The parameters and buffers of a module. Made after its state_dict(), which may swap parameters."""

    def __init__(self, scanned: ScannedModule) -> None:
        owners = scanned.owners.values()
        held = (t for owner in owners for t in (*owner._parameters.values(), *owner._buffers.values()))
        self._tensors = {id(t): t for t in held if t is not None}
        self._storages: set[int] | None = None  # rarely needed

    def __contains__(self, value: object) -> bool:
        return id(value) in self._tensors

    def share_memory(self, value: torch.Tensor) -> bool:
        """Return whether `value` is one of these tensors or a view of one's memory, rather than made by a hook."""
        if value in self:
            return True
        if self._storages is None:
            self._storages = set(map(_storage_address, self._tensors.values())) - {-1}
        return _storage_address(value) in self._storages


def _add_hidden_parameters(scan: ModuleScan, scanned: ScannedModule) -> None:
    """Name the parameters that a hook leaves out of state_dict (frozen ones, for example): optimizers may hold them."""
    for prefix, module in scanned.owners.items():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in scan.parameters:
                scan.parameters[id(parameter)] = (scanned.prefixes[prefix] + name, ())


def _scan_module(module: nn.Module, make_entries: Callable[[nn.Module], dict[str, Any]] | None) -> ScannedModule:
    entries = dict(module.state_dict(keep_vars=True)) if make_entries is None else make_entries(module)
    prefixes: dict[str, str] = {}
    owners: dict[str, nn.Module] = {}
    for prefix, bare, owner in walk_modules(module):
        # The innermost module of a chain of wrappers owns the entries.
        prefixes[prefix] = bare
        owners[prefix] = owner
    return ScannedModule(module, entries, {key: bare_name(key, prefixes) for key in entries}, owners, prefixes)


def _storage_address(value: torch.Tensor) -> int:
    """Return the address of the memory behind `value` on this rank; -1 for none, and for tensors that list their shards."""
    if lists_own_shards(type(value)):
        return -1
    return local_tensor(value).untyped_storage().data_ptr() or -1


def _setter(scanned: ScannedModule, key: str) -> Callable[[Any], None]:
    """Return the function that installs a non-tensor entry: the owner's set_extra_state, or load_state_dict."""
    prefix, _, last = key.rpartition(".")
    owner = scanned.owners.get(prefix + "." if prefix else "")
    if last == "_extra_state" and owner is not None:
        return owner.set_extra_state
    return lambda value: _load_entries([(scanned, key, value)])


def capture_modules(state_name: str, scan: ModuleScan) -> LiveState:
    """Describe the shards and values of a scanned state."""
    state = LiveState(state_name, merged=True, entries=True)
    shards = state.shards
    for tensor in scan.tensors:
        first = len(shards)
        add_shards(shards, TensorKey(state_name, tensor.fqn), tensor.value, aliases=tensor.aliases)
        parameter = isinstance(tensor.value, nn.Parameter)
        for shard in shards[first:]:
            shard.must_be_equal, shard.from_lowest = parameter, not parameter
            shard.frozen = parameter and not shard.requires_grad
    if scan.values:
        state.tree = encode_value(state_name, {fqn: values[0] for fqn, values in scan.values.items()}, shards)
        _check_equal_values(state_name, scan)
    return state


def _check_equal_values(state_name: str, scan: ModuleScan) -> None:
    """Refuse to save extra states that share a name and differ."""
    for fqn, (first, *others) in scan.values.items():
        if not all(equal(first, other) for other in others):
            raise IncompatibleCheckpointError(
                f"{state_name}/{fqn} is held twice by the modules of this rank, with different contents: keep replicas "
                "equal, or give different extra states different names"
            )


def find_saved_parameter(
    state_name: str, name: ParameterName, saved: SavedStates, destination: Destination
) -> SavedTensor | None:
    """Find a parameter or buffer in the checkpoint by any of its names, and recognize the keys of all of them.

    If the checkpoint lacks it, its name is added to `into.missing`.
    """
    fqn, aliases = name
    found = saved.find(state_name, (fqn, *aliases))
    if found is None:
        destination.missing.append(str(TensorKey(state_name, fqn)))
        return None
    destination.recognized.add(found.key)
    for alias in (fqn, *aliases) if aliases else ():
        # Tied here, but stored separately (two pipeline stages): the load knows both keys.
        if (other := saved.find(state_name, (alias,))) is not None and other.key not in destination.recognized:
            destination.recognized.add(other.key)
            destination.tied.append((found, other))
    return found


def load_modules(state_name: str, scan: ModuleScan, saved: SavedStates, destination: Destination) -> None:
    """Plan the load of a scanned state, in place."""
    loaded: list[tuple[ScannedModule, str, torch.Tensor]] = []
    filled = FilledMemory()
    for tensor in scan.tensors:
        found = find_saved_parameter(state_name, (tensor.fqn, tensor.aliases), saved, destination)
        if found is None:
            continue
        target = tensor.value
        if is_lazy(target):
            check_storable(found.key, target)  # which says what to do
        found = choose_saved_weight(saved, found, (tensor.fqn, *tensor.aliases), dtype_name(target.dtype))
        earlier = found if tensor.hook_entry else filled.first_in_memory_of(target, found)
        if earlier.key != found.key:
            destination.tied.append((earlier, found))
            continue
        if tensor.hook_entry is not None:
            target = empty_like_layout(tensor.value, tensor.value.dtype)
            loaded.append((*tensor.hook_entry, target))
        shards: list[LiveShard] = []
        add_shards(shards, found.key, target, aliases=tensor.aliases)
        destination.finish += [step for shard in shards if (step := make_writable(shard)) is not None]
        destination.wanted += shards
    if loaded:
        destination.finish.append(lambda: _load_entries(loaded))
    _load_values(state_name, scan, saved, destination)


def _load_entries(loaded: list[tuple[ScannedModule, str, Any]]) -> None:
    """Load entries through load_state_dict; a module's own hook may need all entries, so each module gets all."""
    for scanned in {id(s): s for s, _, _ in loaded}.values():
        entries = dict(scanned.entries)
        entries.update((key, value) for owner, key, value in loaded if owner is scanned)
        scanned.module.load_state_dict(entries, strict=False)


def _load_values(state_name: str, scan: ModuleScan, saved: SavedStates, destination: Destination) -> None:
    tensors = [name for t in scan.tensors for name in (t.fqn, *t.aliases)]
    for fqn, build in plan_extra_states(state_name, scan.values, tensors, saved, destination):
        for number, setter in enumerate(scan.setters[fqn]):
            destination.finish.append(partial(_install_value, setter, build, copies=number > 0))


def _install_value(setter: Callable[[Any], None], build: Callable[[], Any], *, copies: bool) -> None:
    built = build()
    setter(copy.deepcopy(built) if copies else built)
