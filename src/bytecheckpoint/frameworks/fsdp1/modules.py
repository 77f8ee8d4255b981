"""Save and load modules with FSDP1 units without their state_dict, which would gather every parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, ParameterName, SavedStates
from bytecheckpoint.frameworks.fsdp1.detection import is_fsdp1
from bytecheckpoint.frameworks.fsdp1.flat_parameters import (
    FlatParameter,
    OriginalParameter,
    original_buffer_dtypes,
    read_flat_parameters,
)
from bytecheckpoint.frameworks.modules import (
    ModuleScan,
    capture_modules,
    find_saved_parameter,
    load_modules,
    scan_modules,
)
from bytecheckpoint.frameworks.optimizers.master_weights import choose_saved_weight
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name
from bytecheckpoint.frameworks.tensors.flat_ranges import FlatRange, flat_range_shards
from bytecheckpoint.frameworks.wrappers import walk_modules
from bytecheckpoint.representation.shards import LiveState, TensorKey

__all__ = ["FlatModuleScan", "capture_flat_modules", "load_flat_modules", "scan_flat_modules"]


@dataclass(slots=True)
class _CastBuffer:
    """A buffer that mixed precision holds in another dtype than the model.

    Attributes:
        fqn: its name in the bare model.
        aliases: further names.
        buffer: the buffer.
        dtype: its dtype in the model.
    """

    fqn: str
    aliases: list[str]
    buffer: torch.Tensor
    dtype: torch.dtype


@dataclass(slots=True)
class FlatModuleScan:
    """All modules of one state.

    Attributes:
        rest: tensors and values that FSDP1 does not flatten: buffers, ignored parameters, extra states.
        flats: the flat parameters.
        buffers: buffers that mixed precision has cast.
        parameters: id of a parameter -> its name, the originals of flat parameters included.
    """

    rest: ModuleScan
    flats: list[FlatParameter]
    buffers: list[_CastBuffer]
    parameters: dict[int, ParameterName]

    def originals(self) -> list[OriginalParameter]:
        """Return the original parameters of all flat ones."""
        return [original for flat in self.flats for original in flat.originals]


def scan_flat_modules(state_name: str, modules: Sequence[nn.Module]) -> FlatModuleScan:
    """Find the names and tensors of `modules`, without a state_dict where there is an FSDP1 unit.

    Raises:
        UsageError: two modules use one FQN for different tensors, or a parameter has a form that is not supported.
    """
    flats: list[FlatParameter] = []
    buffers: list[_CastBuffer] = []

    def entries(module: nn.Module) -> dict[str, Any]:
        walked = list(walk_modules(module))
        if not any(is_fsdp1(owner) for _, _, owner in walked):
            return dict(module.state_dict(keep_vars=True))
        module_flats = read_flat_parameters(state_name, walked)
        flats.extend(module_flats)
        found, cast = _entries(walked, module_flats)
        buffers.extend(cast)
        return found

    rest = scan_modules(state_name, modules, entries)
    scan = FlatModuleScan(rest, flats, buffers, dict(rest.parameters))
    scan.parameters.update((id(o.parameter), o.parameter_name) for o in scan.originals() if o.parameter is not None)
    _refuse_equal_names(state_name, scan)
    return scan


def _entries(
    walked: Sequence[tuple[str, str, nn.Module]], flats: Sequence[FlatParameter]
) -> tuple[dict[str, Any], Iterable[_CastBuffer]]:
    """Return the state_dict entries of a module, without flattened parameters and cast buffers, and the cast buffers.

    Hooks on state_dict are not run, because FSDP1's own hooks, which gather, are among them.
    """
    originals = [original for flat in flats for original in flat.originals]
    flattened = {(id(original.owner), original.attribute) for original in originals}
    for flat in flats:
        info: Any = flat.tensor
        flattened.update((id(shared.module), shared.param_name) for shared in info._shared_param_infos)
    by_id = {id(original.parameter): original for original in originals if original.parameter is not None}
    dtypes = original_buffer_dtypes(owner for _, _, owner in walked if is_fsdp1(owner))
    cast: dict[int, _CastBuffer] = {}
    found: dict[str, Any] = {}
    for prefix, bare, owner in walked:
        own: dict[str, Any] = {}
        owner._save_to_state_dict(own, prefix, True)
        for key, value in own.items():
            name = key[len(prefix) :]
            if (id(owner), name) in flattened or getattr(value, "_is_flat_param", False):
                continue
            if (original := by_id.get(id(value))) is not None:
                # Tied to a parameter of a unit, from outside that unit.
                original.aliases.append(bare + name)
            elif id(value) not in dtypes:
                found[key] = value
            elif id(value) in cast:
                cast[id(value)].aliases.append(bare + name)
            else:
                cast[id(value)] = _CastBuffer(bare + name, [], value, dtypes[id(value)])
    return found, cast.values()


def _refuse_equal_names(state_name: str, scan: FlatModuleScan) -> None:
    seen: set[str] = {name for tensor in scan.rest.tensors for name in (tensor.fqn, *tensor.aliases)}
    for original in scan.originals():
        for name in (original.fqn, *original.aliases):
            if name in seen:
                raise UsageError(
                    f"{state_name}/{name} names two different tensors: modules of one list must not share names"
                )
            seen.add(name)


def capture_flat_modules(state_name: str, scan: FlatModuleScan) -> LiveState:
    """Describe the shards and values of a scanned state."""
    state = capture_modules(state_name, scan.rest)
    ranges: list[FlatRange] = []
    for flat in scan.flats:
        shard = flat.shard(state_name)
        for original in flat.originals:
            if original.owned or 0 in original.shape:
                data, offset = flat.elements(state_name, original, shard)
                ranges.append(original.flat_range(TensorKey(state_name, original.fqn), data, offset))
    parameters = flat_range_shards(ranges)
    for parameter in parameters:
        parameter.frozen = not parameter.requires_grad
    state.shards += parameters
    for cast in scan.buffers:
        # In the model's dtype, so that models without mixed precision can load it; buffers are small.
        data = cast.buffer.detach().to(cast.dtype)
        add_shards(state.shards, TensorKey(state_name, cast.fqn), data, aliases=tuple(cast.aliases))
    return state


def load_flat_modules(state_name: str, scan: FlatModuleScan, saved: SavedStates, destination: Destination) -> None:
    """Plan the load of a scanned state, in place."""
    load_modules(state_name, scan.rest, saved, destination)
    ranges: list[FlatRange] = []
    for flat in scan.flats:
        target = flat.target(state_name)
        for original in flat.originals:
            found = find_saved_parameter(state_name, original.parameter_name, saved, destination)
            if found is not None and (original.owned or 0 in original.shape):
                names = (original.fqn, *original.aliases)
                found = choose_saved_weight(saved, found, names, dtype_name(target.dtype))
                ranges.append(original.flat_range(found.key, target, original.offset))
        destination.finish.append(flat.refresh)
    destination.wanted += flat_range_shards(ranges)
    for cast in scan.buffers:
        aliases = tuple(cast.aliases)
        found = find_saved_parameter(state_name, (cast.fqn, aliases), saved, destination)
        if found is not None:
            loaded = torch.empty_like(cast.buffer, dtype=cast.dtype)
            add_shards(destination.wanted, found.key, loaded, aliases=aliases)
            destination.finish.append(partial(_copy, cast.buffer, loaded))


@torch.no_grad()
def _copy(buffer: torch.Tensor, loaded: torch.Tensor) -> None:
    buffer.copy_(loaded)
