"""Check that plain tensors can be stored, and describe each as one shard."""

from __future__ import annotations

from functools import cache
from typing import TypeGuard

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.base import SupportsShards
from bytecheckpoint.frameworks.detection import loaded_class
from bytecheckpoint.frameworks.tensors.dtensors import dtensor_type, is_dtensor
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = [
    "check_storable",
    "is_lazy_view",
    "is_plain",
    "is_sharded_tensor",
    "is_storable",
    "is_tensor_like",
    "lists_own_shards",
    "origin_of",
    "plain_shard",
]

_TORCH_PROTOCOL = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
_ORIGINS = tuple((0,) * n for n in range(65))


@cache
def lists_own_shards(cls: type) -> bool:
    """Return whether objects of type `cls` list their own shards (see `tensors/declared.py`)."""
    if hasattr(cls, "__bytecheckpoint_shards__") or is_sharded_tensor(cls):
        return True
    if not all(hasattr(cls, name) for name in _TORCH_PROTOCOL):
        return False
    # DTensor has torch's protocol too, but its placements say the same, and the protocol is wrong for interleaved ones.
    dtensor = dtensor_type()
    return dtensor is None or not issubclass(cls, dtensor)


def is_sharded_tensor(cls: type) -> bool:
    """Return whether `cls` is torch's ShardedTensor, which FSDP1 puts into sharded state_dicts."""
    sharded = loaded_class("torch.distributed._shard.sharded_tensor", "ShardedTensor")
    return sharded is not None and issubclass(cls, sharded)


def is_tensor_like(value: object) -> TypeGuard[torch.Tensor | SupportsShards]:
    """Return whether `value` is stored as a tensor: a tensor of any type, or an object that lists its own shards."""
    cls: type = type(value)
    return isinstance(value, torch.Tensor) or lists_own_shards(cls)


def is_plain(value: object) -> bool:
    """Return whether `value` is a tensor that is whole on this rank: no DTensor, and no list of shards."""
    return isinstance(value, torch.Tensor) and not is_dtensor(value) and not lists_own_shards(type(value))


def plain_shard(
    key: TensorKey, tensor: torch.Tensor, aliases: tuple[str, ...] = (), by_content: bool = False
) -> LiveShard:
    """Describe a whole plain tensor as one shard.

    Raises:
        UsageError: the tensor cannot be stored; the message names the key.
    """
    check_storable(key, tensor)
    shape = tuple(tensor.shape)
    grad = tensor.requires_grad
    data = tensor.detach() if grad else tensor
    return LiveShard(key, dtype_name(tensor.dtype), shape, origin_of(shape), shape, data, aliases, grad, by_content)


def origin_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the offsets of a whole tensor of `shape`: a zero for each dimension."""
    return _ORIGINS[len(shape)]


def check_storable(key: TensorKey, tensor: torch.Tensor) -> None:
    """Check that the elements of `tensor` lie in memory, in any order.

    Raises:
        UsageError: the tensor's type or form is not supported; the message names the key.
    """
    if fault := _type_fault(type(tensor)):
        raise UsageError(f"{key} is {fault}")
    if _has_unusual_form(tensor):
        raise UsageError(f"{key} {_form_fault(tensor)}")


def is_lazy_view(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` shows the conjugates or negatives of the elements in its memory."""
    return tensor.is_neg() or tensor.is_conj()


def is_storable(tensor: torch.Tensor) -> bool:
    """Return whether `check_storable` accepts `tensor`."""
    return not (_type_fault(type(tensor)) or _has_unusual_form(tensor))


@cache
def _type_fault(cls: type) -> str:
    """Return why tensors of type `cls` cannot be stored; "" for those that can."""
    if lists_own_shards(cls):
        return "a tensor that lists its own boxes"
    if issubclass(cls, UninitializedBuffer | UninitializedParameter):
        return "an uninitialised lazy tensor: run a forward pass first"
    if getattr(cls, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
        # A subclass with its own dispatcher may have no memory, or several tensors inside.
        name = f"{cls.__module__}.{cls.__qualname__}"
        return (
            f"a tensor of type {name}, which is not supported: give the type a __bytecheckpoint_shards__ method "
            "that lists its boxes, or convert it to a plain tensor"
        )
    return ""


def _has_unusual_form(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        # A tensor that begins inside a storage has an address even if the storage was freed.
        or ((tensor.storage_offset() > 0 or not tensor.data_ptr()) and (tensor.is_meta or _is_freed(tensor)))
    )


def _is_freed(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has elements but no memory: a storage resized to zero, or zeros that torch only implies."""
    return tensor.numel() > 0 and (tensor.data_ptr() == 0 or tensor.untyped_storage().nbytes() == 0)


def _form_fault(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"is a tensor of layout {tensor.layout}, which is not supported: convert it with .to_dense()"
    if tensor.is_meta:
        return "is on the meta device and has no values: materialise the module first (to_empty)"
    if tensor.is_quantized:
        return "is a quantised tensor, which is not supported: store its int_repr() and its scales"
    if tensor.is_nested:
        return "is a nested tensor, which is not supported: store its values and offsets"
    return f"has no memory behind its {tensor.numel()} elements (freed storage): fill it first"
