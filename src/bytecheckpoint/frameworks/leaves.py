"""Tensors as live shards: what may stand in a state, what may not, and memory for what is to be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.base import ShardedLeaf
from bytecheckpoint.frameworks.dtensors import dtensor_type, is_dtensor
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = [
    "add_shards",
    "declares",
    "dtype_name",
    "dtype_named",
    "empty_beside",
    "empty_like_layout",
    "is_leaf",
    "is_writable",
    "memory_of",
    "writable",
]


class _DtypeNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


_NAMES = _DtypeNames()
_ORIGIN = tuple((0,) * n for n in range(65))
# Why tensors of a type cannot be stored; "" for those that can. Filled as types are met.
_TYPE_FAULTS: dict[type, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """Name of `dtype` without its prefix, e.g. "bfloat16"."""
    return _NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        IncompatibleCheckpointError: this version of torch has none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise IncompatibleCheckpointError(f"dtype {name!r} is unknown to torch {torch.__version__}: use a newer torch")
    return dtype


def is_leaf(value: object) -> TypeGuard[torch.Tensor | ShardedLeaf]:
    """Whether `value` is stored as a tensor: a tensor of any type, or an object that lists its own boxes."""
    return isinstance(value, torch.Tensor) or declares(type(value))


class _Declaring(dict[type, bool]):
    def __missing__(self, kind: type) -> bool:
        found = hasattr(kind, "__bytecheckpoint_shards__")
        if not found and all(hasattr(kind, name) for name in _TORCH_PROTOCOL):
            # A DTensor has it too, but says no more by it than by its placements, and is wrong where these interleave.
            dtensor = dtensor_type()
            found = dtensor is None or not issubclass(kind, dtensor)
        self[kind] = found
        return found


_TORCH_PROTOCOL = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
_DECLARING = _Declaring()


def declares(kind: type) -> bool:
    """Whether objects of type `kind` list their own boxes (frameworks/declared.py)."""
    return _DECLARING[kind]


def add_shards(
    out: list[LiveShard],
    key: TensorKey,
    value: torch.Tensor | ShardedLeaf,
    *,
    aliases: tuple[str, ...] = (),
    by_content: bool = False,
    like: torch.Tensor | None = None,
) -> None:
    """Append what this rank holds of `value` to `out`.

    Args:
        out: receives no shard (outside the mesh, empty piece), one, or several (interleaved pieces).
        key: the tensor's key.
        value: a plain tensor, a DTensor, or anything that lists its own boxes.
        aliases: further names of the same tensor.
        by_content: as in `LiveShard`.
        like: for a plain tensor that is the local part of something distributed: the DTensor whose boxes it has.

    Raises:
        UsageError: the tensor has no bytes to store (meta), or a form that is not supported; names the key.
    """
    kind = type(value)
    if _TYPE_FAULTS.get(kind, "?"):
        if declares(kind) or (is_dtensor(value) and declares(type(value._local_tensor))):
            from bytecheckpoint.frameworks.declared import add_declared

            add_declared(out, key, value, aliases, by_content)
            return
        if not is_dtensor(value):
            _refuse_type(key, kind)
    if like is None and not is_dtensor(value):
        assert isinstance(value, torch.Tensor)
        if _odd(value):
            _refuse_form(key, value)
        shape = tuple(value.shape)
        origin = _ORIGIN[len(shape)]
        grad = value.requires_grad
        data = value.detach() if grad else value
        out.append(LiveShard(key, _NAMES[value.dtype], shape, origin, shape, data, aliases, grad, by_content))
        return
    assert isinstance(value, torch.Tensor)
    layout = value if like is None else like
    assert is_dtensor(layout)
    whole = tuple(layout.shape)
    local = memory_of(value)
    local_kind = type(local)
    if _TYPE_FAULTS.get(local_kind, "?"):
        _refuse_type(key, local_kind)
    _refuse_form(key, local)
    dtype = _NAMES[local.dtype]
    grad = value.requires_grad
    from bytecheckpoint.frameworks.placements import boxes_of

    boxes = boxes_of(layout, str(key))
    if not boxes and 0 in whole and layout.device_mesh.get_coordinate() is not None:
        # A tensor without elements has no piece anywhere, yet its key, shape and dtype must not be lost.
        nothing = torch.empty(whole, dtype=local.dtype, device=local.device)
        out.append(LiveShard(key, dtype, whole, _ORIGIN[len(whole)], whole, nothing, aliases, grad, by_content))
        return
    for offsets, lengths, slices in boxes:
        data = local.detach() if slices is None else local.detach()[slices]
        out.append(LiveShard(key, dtype, whole, offsets, lengths, data, aliases, grad, by_content))


def memory_of(value: torch.Tensor) -> torch.Tensor:
    """The tensor on this rank behind `value`, without copying and without autograd."""
    return value._local_tensor if is_dtensor(value) else value


def _type_fault(kind: type) -> str:
    fault = _TYPE_FAULTS.get(kind)
    if fault is None:
        if declares(kind):
            fault = "a tensor that lists its own boxes"
        elif issubclass(kind, UninitializedBuffer | UninitializedParameter):
            fault = "an uninitialised lazy tensor: run a forward pass first"
        elif getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
            # A subclass with a dispatcher of its own need not have memory, or has several tensors inside.
            name = f"{kind.__module__}.{kind.__qualname__}"
            fault = (
                f"a tensor of type {name}, which is not supported: give the type a __bytecheckpoint_shards__ method "
                "that lists its boxes, or convert it to a plain tensor"
            )
        else:
            fault = ""
        _TYPE_FAULTS[kind] = fault
    return fault


def _refuse_type(key: TensorKey, kind: type) -> None:
    fault = _type_fault(kind)
    if fault:
        raise UsageError(f"{key} is {fault}")


def _odd(value: torch.Tensor) -> bool:
    """Whether `value` is anything but elements in memory, one after the other in some order."""
    return (
        value.layout is not torch.strided
        or value.is_meta
        or value.is_quantized
        or value.is_nested
        or value.is_neg()
        or (value.dtype.is_complex and value.is_conj())
        or _is_freed(value)
    )


def _is_freed(value: torch.Tensor) -> bool:
    """Whether `value` has elements and no memory: a storage that was resized to nothing, or zeros that are only implied."""
    return value.numel() > 0 and (value.data_ptr() == 0 or value.untyped_storage().nbytes() == 0)


def _refuse_form(key: TensorKey, value: torch.Tensor) -> None:
    if value.layout is not torch.strided:
        raise UsageError(
            f"{key} is a tensor of layout {value.layout}, which is not supported: convert it with .to_dense()"
        )
    if value.is_meta:
        raise UsageError(f"{key} is on the meta device and has no values: materialise the module first (to_empty)")
    if value.is_quantized:
        raise UsageError(f"{key} is a quantised tensor, which is not supported: store its int_repr() and its scales")
    if value.is_nested:
        raise UsageError(f"{key} is a nested tensor, which is not supported: store its values and offsets")
    if value.is_conj() or value.is_neg():
        raise UsageError(f"{key} is a lazy conjugate or negative view: call resolve_conj().resolve_neg() on it first")
    if _is_freed(value):
        raise UsageError(f"{key} has no memory behind its {value.numel()} elements (freed storage): fill it first")


def is_writable(value: torch.Tensor) -> bool:
    """Whether loaded elements can be written straight into `value`."""
    local = memory_of(value)
    if declares(type(value)) or declares(type(local)):
        return True
    return not (_type_fault(type(local)) or _odd(local) or _is_expanded(local) or local.is_inference())


def _is_expanded(value: torch.Tensor) -> bool:
    strides = value.stride()
    return 0 in strides and any(s == 0 and n > 1 for s, n in zip(strides, value.shape, strict=True))


def writable(shard: LiveShard) -> Callable[[], None] | None:
    """Make `shard.data` safe to write element by element.

    An expanded tensor shows one element at several coordinates. It gets memory of its own, and the returned step
    (to run after the bytes came) writes that back. An inference tensor takes no writes outside inference mode, which
    other threads are not in; an ordinary tensor over the same memory does.

    Raises (from the step):
        IncompatibleCheckpointError: the checkpoint holds different values where the live tensor has one element.
    """
    live = shard.data
    if live.is_inference():
        alias = torch.empty(0, dtype=live.dtype, device=live.device)
        live = alias.set_(live.untyped_storage(), live.storage_offset(), live.shape, live.stride())
        shard.data = live
    if not _is_expanded(live):
        return None
    arrived = torch.empty(live.shape, dtype=live.dtype, device=live.device)
    shard.data = arrived
    first = tuple(slice(0, 1) if s == 0 else slice(None) for s in live.stride())

    def write_back() -> None:
        values = arrived[first]
        if not torch.equal(values.expand(live.shape).contiguous().view(torch.uint8), arrived.view(torch.uint8)):
            raise IncompatibleCheckpointError(
                f"{shard.key} is an expanded tensor here, but the checkpoint holds values that differ along that "
                "dimension: make it contiguous before loading"
            )
        live[first].copy_(values)

    return write_back


def empty_like_layout(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory with the shape, device and distribution of `value`, in `dtype`, without gradient.

    Raises:
        UsageError: `value` lists its own boxes, and torch.empty_like makes nothing that does.
    """
    if declares(type(value)):
        return _empty_declared(value, dtype)
    local = torch.empty_like(memory_of(value).detach(), dtype=dtype)
    if not is_dtensor(value):
        return local
    spec = value._spec
    if value.dtype != dtype:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        meta = TensorMeta(value.shape, value.stride(), dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    # DTensor.from_local would derive the same in a hundred microseconds, and there are thousands of these.
    return type(value)(local, spec, requires_grad=False)


def _empty_declared(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kind = type(value)
    listed: list[LiveShard] = []
    try:
        made = torch.empty_like(value.detach(), dtype=dtype)
        add_shards(listed, TensorKey("", kind.__name__), made)
    except Exception as error:
        # Whatever somebody else's type raises: this is what it means.
        raise UsageError(
            f"torch.empty_like makes no new {kind.__name__} that lists its boxes ({error}): let the type handle it, or run "
            "one step before loading, so that the optimizer's state is there"
        ) from error
    return made


def empty_beside(shape: tuple[int, ...], dtype: torch.dtype, near: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory of another shape, for something that belongs to `near`, without gradient.

    Over the mesh of a distributed tensor it is sharded as that is along dimensions of equal extent (a mean over rows
    keeps the sharding of the columns), else replicated; a scalar is a plain tensor.
    """
    part = memory_of(near)
    if not is_dtensor(near) or not shape:
        return torch.empty(shape, dtype=dtype, device=part.device)
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    extents = list(shape)
    placements: list[Any] = []
    for placement in near.placements:
        dim = getattr(placement, "dim", None)
        if dim is None or len(shape) != near.ndim or shape[dim] != near.shape[dim]:
            placements.append(Replicate())
        else:
            placements.append(placement)
            extents[dim] = part.shape[dim]
    strides = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(near.device_mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))
    return type(near)(torch.empty(extents, dtype=dtype, device=part.device), spec, requires_grad=False)
