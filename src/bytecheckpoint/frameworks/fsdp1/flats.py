"""What FSDP1 says about its flat parameters: which run of which original parameter this rank holds, and where.

FSDP1 concatenates the parameters of a unit, pads, and gives each rank an equal run of the result. Each flat parameter
keeps a list of its original ones with the elements that are in the local shard, so nothing needs to be gathered to know
what a rank has. This is the only module that reads FSDP1's private attributes (torch/distributed/fsdp/_flat_param.py).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.flat_optimizers import Part
from bytecheckpoint.frameworks.irregular import WHOLE, Block
from bytecheckpoint.frameworks.leaves import memory_of

__all__ = ["Flat", "Piece", "find_fsdp1", "is_flattened", "is_fsdp1", "original_buffer_dtypes", "read_flats"]

_NO_ELEMENTS = (0, 0, 0)


@dataclass(slots=True)
class Piece(Part):
    """One original parameter of a flat one; `held` where this rank's shard covers it.

    Attributes:
        parameter: the parameter itself under use_orig_params=True, else None.
        owner: the module that has it.
        name: its name there.
    """

    parameter: torch.Tensor | None
    owner: nn.Module
    name: str


@dataclass(slots=True)
class Flat:
    """One flat parameter.

    Attributes:
        handle: FSDP1's FlatParamHandle.
        where: name of the wrapped module in the bare model, "" for the root.
        pieces: its original parameters, in their order.
        replicas: number of groups that hold equal shards (hybrid sharding).
    """

    handle: Any
    where: str
    pieces: list[Piece] = field(default_factory=list)
    replicas: int = 1

    @property
    def parameter(self) -> torch.Tensor:
        """The flat parameter itself."""
        flat: torch.Tensor = self.handle.flat_param
        return flat

    @property
    def sharded(self) -> bool:
        """False under NO_SHARD: every rank has the whole flat parameter."""
        return bool(self.handle.uses_sharded_strategy)

    @property
    def originals(self) -> bool:
        """Whether optimizers see the original parameters (use_orig_params=True)."""
        return bool(self.handle._use_orig_params)

    @property
    def shard_shape(self) -> torch.Size:
        """Shape of the local shard, padding included."""
        shape: torch.Size = self.parameter._sharded_size  # type: ignore[attr-defined]
        return shape

    def layout(self) -> str:
        """In words, for example "FULL_SHARD on (shard=4), use_orig_params=True"."""
        extents = f"replicate={self.replicas}, shard" if self.replicas > 1 else "shard"
        strategy = self.handle._sharding_strategy.name
        return f"{strategy} on ({extents}={self.handle.world_size}), use_orig_params={self.originals}"

    def shard(self, kind: str) -> torch.Tensor:
        """The local shard, padding included; writing into it changes the model.

        Also while the parameters are gathered for a forward or backward pass.

        Raises:
            UsageError: inside summon_full_params, where the program may change the gathered parameters instead.
        """
        handle, flat = self.handle, self.parameter
        state = handle._training_state.name
        if state == "SUMMON_FULL_PARAMS":
            raise UsageError(
                f"{kind}: FSDP1 module {self.where!r} is inside summon_full_params, so its shards may be out of date: "
                "save or load outside of that context"
            )
        kept: torch.Tensor | None = getattr(flat, "_local_shard", None)  # from the first forward pass on
        current = flat.detach()
        if kept is None or (state == "IDLE" and current.shape == kept.shape):
            # Also where the program has put other memory in, which FSDP1 takes over in its next forward pass.
            return current
        return kept.detach()

    def elements(self, kind: str, piece: Piece, shard: torch.Tensor) -> tuple[torch.Tensor, int]:
        """(1-D memory, place) of the elements of `piece` that a save takes.

        An original parameter may have been given other memory (`p.data = ...`), which FSDP1 copies into the shard in
        its next forward pass: that memory is the parameter.
        """
        own: torch.Tensor | None = piece.owner._parameters.get(piece.name) if self.originals else None
        # From a forward pass to its backward pass a view of the gathered parameters stands there, which is no Parameter.
        if not isinstance(own, nn.Parameter) or not piece.count or _memory(own) == _memory(shard):
            return shard, piece.first
        own = memory_of(own).detach()
        if own.numel() != piece.count or not own.is_contiguous():
            raise UsageError(
                f"{kind}/{piece.fqn}: FSDP1 holds {piece.count} elements here, but the parameter was replaced by a "
                f"tensor of shape {tuple(own.shape)}: change it in place, or inside summon_full_params"
            )
        return own.reshape(-1), 0

    def target(self, kind: str) -> torch.Tensor:
        """The memory that a load writes into; `refresh` makes the model see it."""
        current = self.shard(kind)
        kept: torch.Tensor | None = getattr(self.parameter, "_local_shard", None)
        return current if kept is None else kept.detach()

    def refresh(self) -> None:
        """After the shard has changed: drop gathered copies, and let every parameter be a view of the shard again."""
        handle, flat = self.handle, self.parameter
        if hasattr(flat, "_local_shard"):
            handle.reshard(self.sharded)
            handle.post_reshard()
            handle._prefetched = False
            for name in ("_full_param_padded", "_full_prec_full_param_padded"):
                gathered: torch.Tensor | None = getattr(flat, name, None)
                if gathered is not None:
                    gathered.untyped_storage().resize_(0)
        elif self.originals:
            handle._use_sharded_views()


def find_fsdp1(states: Mapping[str, object]) -> str:
    """Where FSDP1 stands in `states`, in words, or ""."""
    unit = _fsdp1()
    if unit is None:
        return ""
    for kind, value in states.items():
        for item in _items(value):
            if isinstance(item, nn.Module) and _contains(item, unit):
                name = next(name for name, module in item.named_modules() if isinstance(module, unit))
                return f"{kind}: module {name!r}" if name else kind
            if isinstance(item, Optimizer) and any(any(map(is_flattened, g["params"])) for g in item.param_groups):
                return f"{kind}: a parameter of {type(item).__name__}"
    return ""


def _items(value: object) -> Iterator[nn.Module | Optimizer]:
    """The modules and optimizers in nested dicts, lists and tuples."""
    pending: list[Any] = [value]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if isinstance(item, nn.Module | Optimizer):
            yield item
        elif type(item) in _CONTAINERS and id(item) not in seen:
            seen.add(id(item))
            inside = item.values() if isinstance(item, dict) else item
            pending.extend(x for x in inside if type(x) in _CONTAINERS or isinstance(x, nn.Module | Optimizer))


_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})


def _contains(root: nn.Module, unit: type) -> bool:
    # Every save of every module asks this; named_modules takes several times as long.
    pending: list[nn.Module | None] = [root]
    while pending:
        module = pending.pop()
        if isinstance(module, unit):
            return True
        if module is not None:
            pending.extend(module._modules.values())
    return False


def is_fsdp1(module: nn.Module) -> bool:
    """Whether `module` is a FullyShardedDataParallel."""
    kind = _fsdp1()
    return kind is not None and isinstance(module, kind)


def is_flattened(parameter: torch.Tensor) -> bool:
    """Whether FSDP1 has made `parameter` a flat parameter, or a part of one."""
    # Asking a tensor for an attribute that it lacks takes ten times as long.
    return "_fsdp_flattened" in vars(parameter)


def _fsdp1() -> type | None:
    # Without that module there are no instances, and importing it would cost seconds.
    kind = getattr(
        sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel"), "FullyShardedDataParallel", None
    )
    return kind if isinstance(kind, type) else None


def read_flats(kind: str, walked: Sequence[tuple[str, str, nn.Module]]) -> list[Flat]:
    """All flat parameters inside a module.

    Args:
        kind: name of the state.
        walked: what `walk` gives of the module.

    Raises:
        UsageError: a parameter was flattened in a form that is not known; names it.
    """
    places: dict[int, list[str]] = {}
    units: dict[int, tuple[Any, str]] = {}
    for _, bare, owner in walked:
        places.setdefault(id(owner), []).append(bare)
        if is_fsdp1(owner) and owner._handle is not None:
            units.setdefault(id(owner._handle), (owner, bare))
    flats = []
    for unit, bare in units.values():
        between = getattr(unit, "_inter_node_pg", None)
        replicas = between.size() if between is not None and unit._handle.uses_sharded_strategy else 1
        flat = Flat(unit._handle, bare.removesuffix("."), replicas=replicas)
        flat.pieces += _pieces(kind, flat, places)
        flats.append(flat)
    return flats


def _pieces(kind: str, flat: Flat, places: Mapping[int, list[str]]) -> Iterator[Piece]:
    info: Any = flat.parameter
    shared: dict[tuple[int, str], list[str]] = {}
    for name, module, _, first_name, first_module, _ in info._shared_param_infos:
        names = [bare + name for bare in places.get(id(module), ())]
        shared.setdefault((id(first_module), first_name), []).extend(names)
    originals = info._params or [None] * info._num_params
    layouts = zip(info._shapes, info._strides, info._contiguities, info._param_extensions, strict=True)
    members = zip(info._param_infos, info._shard_param_infos, originals, layouts, strict=True)
    for (name, owner, inside), (held, first, count, start, _), parameter, layout in members:
        named = [bare + name for bare in places.get(id(owner), ())] + shared.get((id(owner), name), [])
        # A module that was taken out of the tree after wrapping keeps the name that it had.
        fqn = named[0] if named else ".".join(filter(None, (flat.where, inside, name)))
        shape, block = _block(f"{kind}/{fqn}", *layout)
        start, first, count = (start, first, count) if held else _NO_ELEMENTS
        trained = info.requires_grad if parameter is None else parameter.requires_grad
        aliases = list(dict.fromkeys(n for n in named if n != fqn))
        yield Piece(fqn, aliases, shape, start, first, count, held, block, trained, parameter, owner, name)


def _block(
    where: str, shape: torch.Size, stride: tuple[int, ...], contiguous: bool, extension: Any
) -> tuple[tuple[int, ...], Block]:
    """(shape of the whole parameter, what of it was flattened)."""
    local = tuple(shape)
    order = None if contiguous or not prod(local) else _memory_order(local, tuple(stride))
    if extension is None:
        return local, WHOLE if order is None else Block(order=order)
    if not hasattr(extension, "placements"):
        raise UsageError(
            f"{where} was flattened through an extension of type {type(extension).__name__}, which is not supported: "
            "use DTensor for tensor parallelism"
        )
    # Tensor parallelism: the flattened tensor is this rank's part of a DTensor.
    from bytecheckpoint.frameworks.placements import local_boxes

    whole = tuple(extension.shape)
    mesh = extension.mesh
    boxes = local_boxes(tuple(mesh.shape), tuple(mesh.get_coordinate()), extension.placements, whole, local)
    if len(boxes) > 1:
        raise UsageError(f"{where}: the tensor-parallel part has several boxes, which is not supported under FSDP1")
    offsets = boxes[0].offsets if boxes else (0,) * len(whole)
    return whole, Block(offsets, local, order)


def _memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions from the outermost in memory to the innermost; FSDP1 flattens in that order."""
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim] > 1, -stride[dim]))
    expected = 1
    for dim in reversed(order):
        assert shape[dim] == 1 or stride[dim] == expected, "FSDP1 flattens dense parameters only"
        expected *= shape[dim]
    return tuple(order)


def _memory(tensor: torch.Tensor) -> int:
    return memory_of(tensor).untyped_storage().data_ptr()


def original_buffer_dtypes(units: Iterable[Any]) -> dict[int, torch.dtype]:
    """id of a buffer -> its dtype before FSDP1's mixed precision cast it, for those that were cast."""
    found: dict[int, torch.dtype] = {}
    for unit in units:
        low = unit.mixed_precision.buffer_dtype
        if low is None:
            continue
        known = {_plain(name): dtype for name, dtype in unit._buffer_name_to_orig_dtype.items()}
        ignored = set(map(_plain, unit._ignored_buffer_names))
        for name, buffer in unit.named_buffers():
            dtype = known.get(_plain(name))
            if dtype is not None and _plain(name) not in ignored and buffer.dtype == low != dtype:
                found[id(buffer)] = dtype
    return found


def _plain(name: str) -> str:
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name
