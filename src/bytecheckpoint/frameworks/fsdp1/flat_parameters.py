"""Find the elements of original parameters that this rank holds in the flat parameters of FSDP1.

FSDP1 concatenates the parameters of a unit, pads the result, and gives each rank an equal range of it. Each flat parameter
lists its original parameters with their elements in the local shard, so a rank knows its part without gathering. Only this
module reads the private attributes of FSDP1's flat parameters (torch/distributed/fsdp/_flat_param.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.fsdp1.detection import is_fsdp1
from bytecheckpoint.frameworks.tensors.dtensors import local_tensor
from bytecheckpoint.frameworks.tensors.flat_ranges import WHOLE_TENSOR, FlattenedBox, ParameterRange
from bytecheckpoint.frameworks.wrappers import without_wrappers

__all__ = ["FlatParameter", "OriginalParameter", "original_buffer_dtypes", "read_flat_parameters"]


@dataclass(slots=True)
class OriginalParameter(ParameterRange):
    """One original parameter of a flat one; `owned` where it has elements in this rank's shard.

    Attributes:
        parameter: the parameter itself under use_orig_params=True, else None.
        owner: the module that has it.
        attribute: its name in that module.
    """

    parameter: torch.Tensor | None
    owner: nn.Module
    attribute: str


@dataclass(slots=True)
class FlatParameter:
    """One flat parameter.

    Attributes:
        handle: FSDP1's FlatParamHandle.
        module_name: name of the wrapped module in the bare model, "" for the root.
        originals: its original parameters, in their order.
        replicas: number of groups that hold equal shards (hybrid sharding).
    """

    handle: Any
    module_name: str
    originals: list[OriginalParameter] = field(default_factory=list)
    replicas: int = 1

    @property
    def tensor(self) -> torch.Tensor:
        """The flat parameter itself."""
        flat: torch.Tensor = self.handle.flat_param
        return flat

    @property
    def sharded(self) -> bool:
        """True if ranks hold different parts; False under NO_SHARD."""
        return bool(self.handle.uses_sharded_strategy)

    @property
    def use_orig_params(self) -> bool:
        """True if optimizers see the original parameters (use_orig_params=True)."""
        return bool(self.handle._use_orig_params)

    @property
    def shard_shape(self) -> torch.Size:
        """Shape of the local shard, padding included."""
        shape: torch.Size = self.tensor._sharded_size  # type: ignore[attr-defined]
        return shape

    def layout(self) -> str:
        """Describe the layout, e.g. "FULL_SHARD on (shard=4), use_orig_params=True"."""
        extents = f"replicate={self.replicas}, shard" if self.replicas > 1 else "shard"
        strategy = self.handle._sharding_strategy.name
        return f"{strategy} on ({extents}={self.handle.world_size}), use_orig_params={self.use_orig_params}"

    def shard(self, state_name: str) -> torch.Tensor:
        """Return the local shard, padding included; writing into it changes the model.

        This works between and during forward and backward passes, while the parameters are gathered.

        Raises:
            UsageError: inside summon_full_params, where the program may change the gathered parameters instead.
        """
        handle, flat = self.handle, self.tensor
        state = handle._training_state.name
        if state == "SUMMON_FULL_PARAMS":
            raise UsageError(
                f"{state_name}: FSDP1 module {self.module_name!r} is inside summon_full_params, so its shards may be "
                "out of date: save or load outside of that context"
            )
        local_shard: torch.Tensor | None = getattr(flat, "_local_shard", None)  # from the first forward pass on
        current = flat.detach()
        if local_shard is None or (state == "IDLE" and current.shape == local_shard.shape):
            # The program may have put other memory in here, which FSDP1 adopts in its next forward pass.
            return current
        return local_shard.detach()

    def elements(self, state_name: str, original: OriginalParameter, shard: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return (1-D memory, offset) of the elements of `original` that a save reads.

        A program may have given an original parameter other memory (`p.data = ...`), which FSDP1 copies into the shard in
        its next forward pass: that memory is the parameter.
        """
        own: torch.Tensor | None = original.owner._parameters.get(original.attribute) if self.use_orig_params else None
        # From a forward pass to its backward pass, the attribute is a view of the gathered parameters, not a Parameter.
        if not isinstance(own, nn.Parameter) or not original.count or _storage_address(own) == _storage_address(shard):
            return shard, original.offset
        own = local_tensor(own).detach()
        if own.numel() != original.count or not own.is_contiguous():
            raise UsageError(
                f"{state_name}/{original.fqn}: FSDP1 holds {original.count} elements here, but the parameter was "
                f"replaced by a tensor of shape {tuple(own.shape)}: change it in place, or inside summon_full_params"
            )
        return own.reshape(-1), 0

    def target(self, state_name: str) -> torch.Tensor:
        """Return the memory that a load writes into; `refresh` makes the model see the result."""
        current = self.shard(state_name)
        local_shard: torch.Tensor | None = getattr(self.tensor, "_local_shard", None)
        return current if local_shard is None else local_shard.detach()

    def refresh(self) -> None:
        """Drop gathered copies after the shard has changed, and make every parameter a view of the shard again."""
        handle, flat = self.handle, self.tensor
        if hasattr(flat, "_local_shard"):
            handle.reshard(self.sharded)
            handle.post_reshard()
            handle._prefetched = False
            for name in ("_full_param_padded", "_full_prec_full_param_padded"):
                gathered: torch.Tensor | None = getattr(flat, name, None)
                if gathered is not None:
                    gathered.untyped_storage().resize_(0)
        elif self.use_orig_params:
            handle._use_sharded_views()


def read_flat_parameters(state_name: str, walked: Sequence[tuple[str, str, nn.Module]]) -> list[FlatParameter]:
    """Return all flat parameters inside a module.

    Args:
        state_name: name of the state.
        walked: the result of `walk_modules` for the module.

    Raises:
        UsageError: a parameter was flattened in a form that is not supported; names it.
    """
    prefixes: dict[int, list[str]] = {}  # id of a module -> its prefixes in the bare model
    units: dict[int, tuple[Any, str]] = {}
    for _, bare, owner in walked:
        prefixes.setdefault(id(owner), []).append(bare)
        if is_fsdp1(owner) and owner._handle is not None:
            units.setdefault(id(owner._handle), (owner, bare))
    flats = []
    for unit, bare in units.values():
        between = getattr(unit, "_inter_node_pg", None)
        replicas = between.size() if between is not None and unit._handle.uses_sharded_strategy else 1
        flat = FlatParameter(unit._handle, bare.removesuffix("."), replicas=replicas)
        flat.originals += _read_originals(state_name, flat, prefixes)
        flats.append(flat)
    return flats


def _read_originals(
    state_name: str, flat: FlatParameter, prefixes: Mapping[int, list[str]]
) -> Iterator[OriginalParameter]:
    info: Any = flat.tensor
    shared: dict[tuple[int, str], list[str]] = {}
    for name, module, _, first_name, first_module, _ in info._shared_param_infos:
        names = [bare + name for bare in prefixes.get(id(module), ())]
        shared.setdefault((id(first_module), first_name), []).extend(names)
    parameters = info._params or [None] * info._num_params
    layouts = zip(info._shapes, info._strides, info._contiguities, info._param_extensions, strict=True)
    entries = zip(info._param_infos, info._shard_param_infos, parameters, layouts, strict=True)
    for (name, owner, inside), (in_shard, offset, count, start, _), parameter, layout in entries:
        names = [bare + name for bare in prefixes.get(id(owner), ())] + shared.get((id(owner), name), [])
        # A module that was taken out of the tree after wrapping keeps its name at that time.
        fqn = names[0] if names else ".".join(filter(None, (flat.module_name, inside, name)))
        shape, box = _flattened_box(f"{state_name}/{fqn}", *layout)
        start, offset, count = (start, offset, count) if in_shard else (0, 0, 0)
        trained = info.requires_grad if parameter is None else parameter.requires_grad
        aliases = list(dict.fromkeys(n for n in names if n != fqn))
        yield OriginalParameter(
            fqn, aliases, shape, start, offset, count, in_shard, box, trained, parameter, owner, name
        )


def _flattened_box(
    where: str, shape: torch.Size, stride: tuple[int, ...], contiguous: bool, extension: Any
) -> tuple[tuple[int, ...], FlattenedBox]:
    """Return (shape of the whole parameter, the box of it that was flattened)."""
    local = tuple(shape)
    order = None if contiguous or not prod(local) else _memory_order(local, tuple(stride))
    if extension is None:
        return local, WHOLE_TENSOR if order is None else FlattenedBox(order=order)
    if not hasattr(extension, "placements"):
        raise UsageError(
            f"{where} was flattened through an extension of type {type(extension).__name__}, which is not supported: "
            "use DTensor for tensor parallelism"
        )
    # Tensor parallelism: the flattened tensor is this rank's part of a DTensor.
    from bytecheckpoint.frameworks.tensors.placements import local_boxes

    whole = tuple(extension.shape)
    mesh = extension.mesh
    boxes = local_boxes(tuple(mesh.shape), tuple(mesh.get_coordinate()), extension.placements, whole, local)
    if len(boxes) > 1:
        raise UsageError(f"{where}: the tensor-parallel part has several boxes, which is not supported under FSDP1")
    offsets = boxes[0].offsets if boxes else (0,) * len(whole)
    return whole, FlattenedBox(offsets, local, order)


def _memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions from the outermost in memory to the innermost; FSDP1 flattens in that order."""
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim] > 1, -stride[dim]))
    expected = 1
    for dim in reversed(order):
        assert shape[dim] == 1 or stride[dim] == expected, "FSDP1 flattens dense parameters only"
        expected *= shape[dim]
    return tuple(order)


def _storage_address(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()


def original_buffer_dtypes(units: Iterable[Any]) -> dict[int, torch.dtype]:
    """Return id of a buffer -> its dtype before FSDP1's mixed precision cast it, for the buffers that it cast."""
    found: dict[int, torch.dtype] = {}
    for unit in units:
        low = unit.mixed_precision.buffer_dtype
        if low is None:
            continue
        known = {without_wrappers(name): dtype for name, dtype in unit._buffer_name_to_orig_dtype.items()}
        ignored = set(map(without_wrappers, unit._ignored_buffer_names))
        for name, buffer in unit.named_buffers():
            dtype = known.get(without_wrappers(name))
            if dtype is not None and without_wrappers(name) not in ignored and buffer.dtype == low != dtype:
                found[id(buffer)] = dtype
    return found
