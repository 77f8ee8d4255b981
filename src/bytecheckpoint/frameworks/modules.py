"""Modules: the names of parameters and buffers as the bare model has them, tied weights, and loading in place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, SavedStates
from bytecheckpoint.frameworks.leaves import (
    add_shards,
    declares,
    dtype_name,
    empty_like_layout,
    is_leaf,
    memory_of,
    writable,
)
from bytecheckpoint.frameworks.masters import precise
from bytecheckpoint.frameworks.objects import Reader, encoded
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey

__all__ = ["ModuleScan", "as_modules", "capture_modules", "load_modules", "scan_modules", "walk"]


@dataclass(slots=True)
class _Chunk:
    """One module with what its state_dict says.

    Attributes:
        module: as the user passed it, wrappers included.
        entries: its state_dict, keys as torch gives them.
        names: state_dict key -> FQN of the bare model.
        owners: state_dict prefix ("" or "a.b.") -> the module whose entries start with it.
        prefixes: the same prefixes -> those of the bare model.
    """

    module: nn.Module
    entries: dict[str, Any]
    names: dict[str, str]
    owners: dict[str, nn.Module]
    prefixes: dict[str, str]


@dataclass(slots=True)
class _Tensor:
    fqn: str
    value: torch.Tensor
    aliases: tuple[str, ...]
    # Where the entry came from, when its memory is not the module's own: (chunk, state_dict key).
    copy_of: tuple[_Chunk, str] | None


@dataclass(slots=True)
class ModuleScan:
    """All chunks of one kind as one namespace.

    Attributes:
        tensors: each tensor once, in state_dict order; `fqn` is the first of its names.
        values: FQN -> entry that is not a tensor of the module itself (extra states).
        parameters: id of a parameter -> (FQN, aliases).
    """

    chunks: list[_Chunk]
    tensors: list[_Tensor] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    value_owners: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    parameters: dict[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)


def as_modules(kind: str, value: object) -> list[nn.Module] | None:
    """`value` as a list of modules (pipeline stages, virtual stages), or None when it is something else.

    An empty list is a rank without a stage in the kind "model", and a plain value in any other.
    """
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, list | tuple) and (value or kind == "model") and all(isinstance(m, nn.Module) for m in value):
        return list(value)
    return None


def scan_modules(
    kind: str, modules: Sequence[nn.Module], entries: Callable[[nn.Module], dict[str, Any]] | None = None
) -> ModuleScan:
    """Names and tensors of `modules`.

    Args:
        kind: name of the state.
        modules: all of the kind.
        entries: what a module's state_dict holds, with keys as `walk` prefixes them. None: `state_dict` is called,
            which also makes FSDP2 put its shards back after an evaluation forward.

    Raises:
        UsageError: two chunks use one FQN for different tensors.
    """
    scan = ModuleScan([_scan_chunk(m, entries) for m in modules])
    by_id: dict[int, int] = {}
    by_name: dict[str, int] = {}
    names_of: list[list[str]] = []
    for chunk in scan.chunks:
        # After state_dict(): it may have swapped parameters.
        live = {id(t) for m in chunk.owners.values() for t in (*m._parameters.values(), *m._buffers.values())}
        storages: set[int] | None = None
        for key, value in chunk.entries.items():
            fqn = chunk.names[key]
            own = id(value) in live
            if not is_leaf(value) or (not own and key.endswith("_extra_state")):
                if fqn in scan.values:
                    raise UsageError(f"{kind}/{fqn} stands in two modules of the list: chunks must not share names")
                scan.values[fqn] = value
                scan.value_owners[fqn] = _setter(chunk, key)
                continue
            assert isinstance(value, torch.Tensor)
            if not own:
                if storages is None:
                    storages = _storages(chunk)
                own = _address(value) in storages
            known = by_id.get(id(value))
            earlier = by_name.get(fqn)
            if earlier is not None and earlier != known:
                raise UsageError(f"{kind}/{fqn} names two different tensors: modules of one list must not share names")
            if known is None:
                by_id[id(value)] = by_name[fqn] = len(scan.tensors)
                scan.tensors.append(_Tensor(fqn, value, (), None if own else (chunk, key)))
                names_of.append([fqn])
            elif earlier is None:
                by_name[fqn] = known
                names_of[known].append(fqn)
    for tensor, names in zip(scan.tensors, names_of, strict=True):
        if len(names) > 1:
            tensor.aliases = tuple(names[1:])
        scan.parameters[id(tensor.value)] = (tensor.fqn, tensor.aliases)
    for chunk in scan.chunks:
        # A hook may leave parameters out of state_dict (frozen ones, say); an optimizer may hold them all the same.
        for prefix, module in chunk.owners.items():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in scan.parameters:
                    scan.parameters[id(parameter)] = (chunk.prefixes[prefix] + name, ())
    return scan


def capture_modules(kind: str, scan: ModuleScan) -> LiveState:
    """The shards and values of a scanned kind."""
    state = LiveState(kind, merged=True)
    shards = state.shards
    for tensor in scan.tensors:
        add_shards(shards, TensorKey(kind, tensor.fqn), tensor.value, aliases=tensor.aliases)
    if scan.values:
        state.tree = encoded(kind, scan.values, shards)
    return state


def load_modules(kind: str, scan: ModuleScan, saved: SavedStates, into: Destination) -> None:
    """Plan the load of a scanned kind, in place."""
    arrived: list[tuple[_Chunk, str, torch.Tensor]] = []
    for tensor in scan.tensors:
        found = saved.find(kind, (tensor.fqn, *tensor.aliases))
        if found is None:
            into.missing.append(str(TensorKey(kind, tensor.fqn)))
            continue
        into.claimed.add(found.key)
        for alias in (tensor.fqn, *tensor.aliases) if tensor.aliases else ():
            # Tied here, but stored separately (two pipeline stages): both keys are accounted for.
            if (other := saved.find(kind, (alias,))) is not None:
                into.claimed.add(other.key)
        target = tensor.value
        found = precise(saved, found, (tensor.fqn, *tensor.aliases), dtype_name(target.dtype))
        if tensor.copy_of is not None:
            target = empty_like_layout(tensor.value, tensor.value.dtype)
            arrived.append((*tensor.copy_of, target))
        shards: list[LiveShard] = []
        add_shards(shards, found.key, target, aliases=tensor.aliases)
        into.finish += [step for shard in shards if (step := writable(shard)) is not None]
        into.wanted += shards
    if arrived:
        into.finish.append(lambda: _load_copies(arrived))
    if scan.values:
        _load_values(kind, scan, saved, into)


def _load_copies(arrived: list[tuple[_Chunk, str, torch.Tensor]]) -> None:
    """Hand back entries that a custom hook had made; it may need to see all entries, so the module gets all."""
    for chunk in {id(c): c for c, _, _ in arrived}.values():
        entries = dict(chunk.entries)
        entries.update((key, value) for owner, key, value in arrived if owner is chunk)
        chunk.module.load_state_dict(entries, strict=False)


def _load_values(kind: str, scan: ModuleScan, saved: SavedStates, into: Destination) -> None:
    reader = Reader(kind, saved, into)
    found: dict[str, Any] = {}
    for blob in saved.trees_about(kind, [name for t in scan.tensors for name in (t.fqn, *t.aliases)]):
        tree = reader.read(blob)
        if isinstance(tree, dict):
            found = {**tree, **found}
        if scan.values.keys() <= found.keys():
            break
    reader.want()
    for fqn in scan.values:
        if fqn in found:
            into.finish.append(partial(_restore, scan.value_owners[fqn], reader, found[fqn]))
        else:
            into.missing.append(str(TensorKey(kind, fqn)))


def _restore(setter: Callable[[Any], None], reader: Reader, value: object) -> None:
    setter(reader.build(value, None))


def _setter(chunk: _Chunk, key: str) -> Callable[[Any], None]:
    """How a loaded non-tensor entry goes back: to the owner's set_extra_state, or through load_state_dict."""
    prefix, _, last = key.rpartition(".")
    owner = chunk.owners.get(prefix + "." if prefix else "")
    if last == "_extra_state" and owner is not None:
        return owner.set_extra_state
    return lambda value: _load_copies([(chunk, key, value)])


def _scan_chunk(module: nn.Module, made: Callable[[nn.Module], dict[str, Any]] | None) -> _Chunk:
    entries: dict[str, Any] = dict(module.state_dict(keep_vars=True)) if made is None else made(module)
    prefixes: dict[str, str] = {}
    owners: dict[str, nn.Module] = {}
    for prefix, bare, owner in walk(module):
        # The innermost module of a chain of wrappers owns the entries.
        prefixes[prefix] = bare
        owners[prefix] = owner
    return _Chunk(module, entries, {key: _bare(key, prefixes) for key in entries}, owners, prefixes)


def _bare(key: str, prefixes: dict[str, str]) -> str:
    end = key.rfind(".") + 1
    while (bare := prefixes.get(key[:end])) is None:
        # A hook invented the last part of the prefix; the module above it decides.
        end = key.rfind(".", 0, end - 1) + 1
    return bare + key[end:]


def walk(module: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Every module inside `module`: (prefix in its state_dict, prefix in the bare model, the module).

    In the order of a state_dict; a module that stands at two places comes twice.
    """
    return _walk(module, "", "", _wrappers())


def _walk(
    module: nn.Module, prefix: str, bare: str, wrappers: list[tuple[type, str, bool]]
) -> Iterator[tuple[str, str, nn.Module]]:
    yield prefix, bare, module
    for name, child in module._modules.items():
        if child is None:
            continue
        inner_prefix, inner_bare = f"{prefix}{name}.", f"{bare}{name}."
        for kind, attribute, hidden in wrappers:
            if name == attribute and isinstance(module, kind):
                inner_bare = bare
                if hidden:
                    inner_prefix = prefix
                break
        if child._modules:
            yield from _walk(child, inner_prefix, inner_bare, wrappers)
        else:
            yield inner_prefix, inner_bare, child


def _wrappers() -> list[tuple[type, str, bool]]:
    """Classes that wrap a module: (class, attribute of the inner one, whether state_dict hides the attribute already).

    Only classes whose module has been imported can have instances; importing torch._dynamo here would cost seconds.
    """
    found: list[tuple[type, str, bool]] = [
        (nn.parallel.DistributedDataParallel, "module", False),
        (nn.DataParallel, "module", False),
    ]
    for place, name, attribute, hidden in (
        ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", False),
        (
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
            "ActivationWrapper",
            "_checkpoint_wrapped_module",
            True,
        ),
        (
            "torch.distributed.fsdp.fully_sharded_data_parallel",
            "FullyShardedDataParallel",
            "_fsdp_wrapped_module",
            True,
        ),
    ):
        kind = getattr(sys.modules.get(place), name, None)
        if kind is not None:
            found.append((kind, attribute, hidden))
    return found


def _address(value: torch.Tensor) -> int:
    if declares(type(value)):
        return -1
    return memory_of(value).untyped_storage().data_ptr() or -1


def _storages(chunk: _Chunk) -> set[int]:
    live = (t for m in chunk.owners.values() for t in (*m._parameters.values(), *m._buffers.values()))
    return {_address(t) for t in live if t is not None} - {-1}
