"""Prepare the memory that a load writes into: allocate tensors distributed like others, make live ones safe to write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.base import SavedTensor
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor, local_tensor
from bytecheckpoint.frameworks.tensors.plain import is_lazy_view, is_storable, lists_own_shards
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = ["FilledMemory", "empty_like_layout", "empty_on_mesh_of", "is_writable", "make_writable", "memory_for"]


@contextlib.contextmanager
def memory_for(url: str) -> Iterator[None]:
    """Name the checkpoint in the error of an allocation: its catalog says how large the tensors are."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error) and "out of memory" not in str(error):
            raise
        raise IncompatibleCheckpointError(
            f"{url}: this process lacks the memory for the tensors that the checkpoint describes: {error}"
        ) from error


def is_writable(value: torch.Tensor) -> bool:
    """Return whether a load can write elements straight into `value`."""
    local = local_tensor(value)
    if lists_own_shards(type(value)) or lists_own_shards(type(local)):
        return True
    return is_storable(local) and not (_is_expanded(local) or is_lazy_view(local) or local.is_inference())


def _is_expanded(value: torch.Tensor) -> bool:
    strides = value.stride()
    return 0 in strides and any(s == 0 and n > 1 for s, n in zip(strides, value.shape, strict=True))


def make_writable(shard: LiveShard) -> Callable[[], None] | None:
    """Make `shard.data` safe to write element by element.

    An expanded tensor shows one element at several coordinates, and a lazy view shows other elements than its memory
    holds: such a shard gets memory of its own. Only threads in inference mode may write into an inference tensor: its
    shard gets an ordinary tensor over the same memory.

    Returns:
        The step that copies the loaded elements back into an expanded tensor or lazy view; None for other tensors. The step
        raises IncompatibleCheckpointError if the checkpoint holds different values where the live tensor has one element.
    """
    live = shard.data
    if live.is_inference():
        alias = torch.empty(0, dtype=live.dtype, device=live.device)
        alias.set_(live.untyped_storage(), live.storage_offset(), live.shape, live.stride())
        alias = alias.conj() if live.is_conj() else alias
        live = torch._neg_view(alias) if live.is_neg() else alias
        shard.data = live
    expanded = not live.is_contiguous() and _is_expanded(live)
    if not (expanded or is_lazy_view(live)):
        return None
    loaded = torch.empty(live.shape, dtype=live.dtype, device=live.device)
    shard.data = loaded
    first = tuple(slice(0, 1) if s == 0 else slice(None) for s in live.stride())

    def write_back() -> None:
        values = loaded[first] if expanded else loaded
        if expanded and not torch.equal(
            values.expand(live.shape).contiguous().view(torch.uint8), loaded.view(torch.uint8)
        ):
            raise IncompatibleCheckpointError(
                f"{shard.key} is an expanded tensor here, but the checkpoint holds values that differ along that "
                "dimension: make it contiguous before loading"
            )
        (live[first] if expanded else live).copy_(values)

    return write_back


def empty_like_layout(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor with the shape, device and distribution of `value`, in `dtype`, without gradient.

    Raises:
        UsageError: `value` lists its own shards, and torch.empty_like makes a tensor that does not.
    """
    if lists_own_shards(type(value)):
        return _empty_like_listing(value, dtype)
    local = torch.empty_like(local_tensor(value).detach(), dtype=dtype)
    if not is_dtensor(value):
        return local
    spec = value._spec
    if value.dtype != dtype:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(value.shape, value.stride(), dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    # Not by DTensor.from_local, which takes a hundred microseconds: a load makes thousands of these.
    return type(value)(local, spec, requires_grad=False)


def _empty_like_listing(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cls = type(value)
    listed: list[LiveShard] = []
    try:
        made = torch.empty_like(value.detach(), dtype=dtype)
        add_shards(listed, TensorKey("", cls.__name__), made)
    except Exception as error:
        # The program's own type may raise anything.
        raise UsageError(
            f"torch.empty_like makes no new {cls.__name__} that lists its boxes ({error}): let the type handle it, or run "
            "one step before loading, so that the optimizer's state is there"
        ) from error
    return made


def empty_on_mesh_of(like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor of another shape on the device, and over the mesh, of `like`, without gradient.

    The new tensor is sharded as `like` is along dimensions of equal extent (a mean over rows keeps the sharding of the
    columns), else replicated. A scalar is a plain tensor.
    """
    local = local_tensor(like)
    if not is_dtensor(like) or not shape:
        return torch.empty(shape, dtype=dtype, device=local.device)
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    extents = list(shape)
    placements: list[Any] = []
    for placement in like.placements:
        dim = getattr(placement, "dim", None)
        if dim is None or len(shape) != like.ndim or shape[dim] != like.shape[dim]:
            placements.append(Replicate())
        else:
            placements.append(placement)
            extents[dim] = local.shape[dim]
    strides = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(like.device_mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))
    return type(like)(torch.empty(extents, dtype=dtype, device=local.device), spec, requires_grad=False)


class FilledMemory:
    """The tensors that a load fills, by their memory: a state_dict shows a tied weight as two tensors."""

    def __init__(self) -> None:
        self._by_address: dict[int, tuple[Any, SavedTensor]] = {}
        self._by_memory: dict[object, SavedTensor] = {}

    def first_in_memory_of(self, tensor: Any, found: SavedTensor) -> SavedTensor:
        """Return the saved tensor that fills the memory of `tensor`: `found` of the first call for that memory."""
        cls: type = type(tensor)
        if not lists_own_shards(cls):
            # Most tensors are alone at their address, and then nothing else of their memory needs to be looked at.
            local = local_tensor(tensor)
            address = local.data_ptr() if local.layout is torch.strided else 0
            first, of_first = self._by_address.setdefault(address, (tensor, found))
            if of_first is found:
                return found
            self._by_memory.setdefault(_memory(first), of_first)
        return self._by_memory.setdefault(_memory(tensor), found)


def _memory(tensor: Any) -> object:
    """Return the place and form of a tensor's elements on this rank, which are equal if two tensors are one."""
    if not isinstance(tensor, torch.Tensor) or lists_own_shards(type(tensor)):
        return id(tensor)
    local = local_tensor(tensor)
    if not local.numel():
        return id(tensor)
    return local.device, local.data_ptr(), local.dtype, local.shape, local.stride()
