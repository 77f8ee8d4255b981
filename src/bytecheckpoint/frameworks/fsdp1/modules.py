"""Modules that hold FSDP1 units: names and tensors without a state_dict, which would gather every parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import Destination, SavedStates, SavedTensor
from bytecheckpoint.frameworks.fsdp1.flats import (
    Flat,
    Piece,
    is_fsdp1,
    original_buffer_dtypes,
    read_flats,
)
from bytecheckpoint.frameworks.irregular import Fragment, fragment_shards
from bytecheckpoint.frameworks.leaves import add_shards, dtype_name
from bytecheckpoint.frameworks.masters import precise
from bytecheckpoint.frameworks.modules import ModuleScan, capture_modules, load_modules, scan_modules, walk
from bytecheckpoint.representation.shards import LiveState, TensorKey

__all__ = ["FlatScan", "capture_flat_modules", "load_flat_modules", "scan_flat_modules"]


@dataclass(slots=True)
class _CastBuffer:
    """A buffer that mixed precision keeps in another dtype than the model has it."""

    fqn: str
    aliases: list[str]
    buffer: torch.Tensor
    dtype: torch.dtype


@dataclass(slots=True)
class FlatScan:
    """All modules of one kind.

    Attributes:
        rest: everything that FSDP1 leaves alone: buffers, ignored parameters, extra states.
        flats: the flat parameters.
        buffers: buffers that mixed precision has cast.
        parameters: id of a parameter -> (FQN, aliases), the originals of flat parameters included.
    """

    rest: ModuleScan
    flats: list[Flat]
    buffers: list[_CastBuffer]
    parameters: dict[int, tuple[str, tuple[str, ...]]]

    def pieces(self) -> list[Piece]:
        """The original parameters of all flat ones."""
        return [piece for flat in self.flats for piece in flat.pieces]


def scan_flat_modules(kind: str, modules: Sequence[nn.Module]) -> FlatScan:
    """Names and tensors of `modules`; no state_dict is asked for where there is an FSDP1 unit.

    Raises:
        UsageError: two modules use one FQN for different tensors, or a parameter has an unknown form.
    """
    flats: list[Flat] = []
    buffers: list[_CastBuffer] = []

    def entries(module: nn.Module) -> dict[str, Any]:
        walked = list(walk(module))
        if not any(is_fsdp1(owner) for _, _, owner in walked):
            return dict(module.state_dict(keep_vars=True))
        own = read_flats(kind, walked)
        flats.extend(own)
        return _entries(walked, own, buffers)

    rest = scan_modules(kind, modules, entries)
    parameters = dict(rest.parameters)
    for flat in flats:
        parameters.update((id(p.parameter), p.named) for p in flat.pieces if p.parameter is not None)
    scan = FlatScan(rest, flats, buffers, parameters)
    _refuse_equal_names(kind, scan)
    return scan


def _entries(
    walked: Sequence[tuple[str, str, nn.Module]], flats: Sequence[Flat], buffers: list[_CastBuffer]
) -> dict[str, Any]:
    """What a state_dict of the module would hold beside the flattened parameters.

    Hooks on state_dict are not run: FSDP1's own hooks are among them, and gather.
    """
    pieces = [piece for flat in flats for piece in flat.pieces]
    inside = {(id(piece.owner), piece.name) for piece in pieces}
    for flat in flats:
        shared: Any = flat.parameter
        inside.update((id(info.module), info.param_name) for info in shared._shared_param_infos)
    originals = {id(piece.parameter): piece for piece in pieces if piece.parameter is not None}
    dtypes = original_buffer_dtypes(owner for _, _, owner in walked if is_fsdp1(owner))
    cast: dict[int, _CastBuffer] = {}
    found: dict[str, Any] = {}
    for prefix, bare, owner in walked:
        own: dict[str, Any] = {}
        owner._save_to_state_dict(own, prefix, True)
        for key, value in own.items():
            name = key[len(prefix) :]
            if (id(owner), name) in inside or getattr(value, "_is_flat_param", False):
                continue
            if (piece := originals.get(id(value))) is not None:
                # Tied to a parameter of a unit, from outside that unit.
                piece.aliases.append(bare + name)
            elif id(value) not in dtypes:
                found[key] = value
            elif id(value) in cast:
                cast[id(value)].aliases.append(bare + name)
            else:
                cast[id(value)] = _CastBuffer(bare + name, [], value, dtypes[id(value)])
    buffers.extend(cast.values())
    return found


def _refuse_equal_names(kind: str, scan: FlatScan) -> None:
    seen: set[str] = {name for tensor in scan.rest.tensors for name in (tensor.fqn, *tensor.aliases)}
    for names in (p.named for p in scan.pieces()):
        for name in (names[0], *names[1]):
            if name in seen:
                raise UsageError(f"{kind}/{name} names two different tensors: modules of one list must not share names")
            seen.add(name)


def capture_flat_modules(kind: str, scan: FlatScan) -> LiveState:
    """The shards and values of a scanned kind."""
    state = capture_modules(kind, scan.rest)
    fragments: list[Fragment] = []
    for flat in scan.flats:
        shard = flat.shard(kind)
        for piece in flat.pieces:
            if piece.held or 0 in piece.shape:
                data, first = flat.elements(kind, piece, shard)
                fragments.append(piece.fragment(TensorKey(kind, piece.fqn), data, first))
    state.shards += fragment_shards(fragments)
    for cast in scan.buffers:
        # As the model has it, so that it fits where there is no mixed precision; buffers are small.
        data = cast.buffer.detach().to(cast.dtype)
        add_shards(state.shards, TensorKey(kind, cast.fqn), data, aliases=tuple(cast.aliases))
    return state


def load_flat_modules(kind: str, scan: FlatScan, saved: SavedStates, into: Destination) -> None:
    """Plan the load of a scanned kind, in place."""
    load_modules(kind, scan.rest, saved, into)
    fragments: list[Fragment] = []
    for flat in scan.flats:
        target = flat.target(kind)
        for piece in flat.pieces:
            found = _claimed(kind, piece.named, saved, into)
            if found is not None and (piece.held or 0 in piece.shape):
                found = precise(saved, found, (piece.fqn, *piece.aliases), dtype_name(target.dtype))
                fragments.append(piece.fragment(found.key, target, piece.first))
        into.finish.append(flat.refresh)
    into.wanted += fragment_shards(fragments)
    for cast in scan.buffers:
        names = cast.fqn, tuple(cast.aliases)
        found = _claimed(kind, names, saved, into)
        if found is not None:
            arrived = torch.empty_like(cast.buffer, dtype=cast.dtype)
            add_shards(into.wanted, found.key, arrived, aliases=names[1])
            into.finish.append(partial(_copy, cast.buffer, arrived))


def _claimed(
    kind: str, names: tuple[str, tuple[str, ...]], saved: SavedStates, into: Destination
) -> SavedTensor | None:
    """What the checkpoint has under any of `names`; all of them are accounted for."""
    fqn, aliases = names
    found = saved.find(kind, (fqn, *aliases))
    if found is None:
        into.missing.append(str(TensorKey(kind, fqn)))
        return None
    into.claimed.add(found.key)
    for alias in aliases:
        # Tied here, but stored separately: both keys are accounted for.
        if (other := saved.find(kind, (alias,))) is not None:
            into.claimed.add(other.key)
    return found


@torch.no_grad()
def _copy(buffer: torch.Tensor, arrived: torch.Tensor) -> None:
    buffer.copy_(arrived)
