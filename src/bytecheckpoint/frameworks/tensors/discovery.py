"""Turn tensors of every kind into live shards: plain tensors, DTensors, and objects that list their own shards."""

from __future__ import annotations

import torch

from bytecheckpoint.frameworks.base import SupportsShards
from bytecheckpoint.frameworks.tensors.declared import add_declared_shards
from bytecheckpoint.frameworks.tensors.dtensors import PLAIN_TYPES, is_dtensor, local_tensor
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name
from bytecheckpoint.frameworks.tensors.plain import check_storable, lists_own_shards, origin_of, plain_shard
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = ["add_shards"]


def add_shards(
    out: list[LiveShard],
    key: TensorKey,
    value: torch.Tensor | SupportsShards,
    *,
    aliases: tuple[str, ...] = (),
    by_content: bool = False,
    like: torch.Tensor | None = None,
) -> None:
    """Append this rank's shards of `value` to `out`.

    Args:
        out: receives no shard (outside the mesh, empty part), one, or several (interleaved parts).
        key: the tensor's key.
        value: a plain tensor, a DTensor, or an object that lists its own shards.
        aliases: further names of the same tensor.
        by_content: value of that attribute of the `LiveShard`s.
        like: the DTensor whose boxes `value` has, where `value` is a plain tensor but the local part of a distributed one.

    Raises:
        UsageError: the tensor has no bytes to store (meta), or has a form that is not supported; names the key.
    """
    if type(value) in PLAIN_TYPES and like is None:  # nearly all tensors
        assert isinstance(value, torch.Tensor)
        out.append(plain_shard(key, value, aliases, by_content))
        return
    if lists_own_shards(type(value)) or (is_dtensor(value) and lists_own_shards(type(value._local_tensor))):
        add_declared_shards(out, key, value, aliases, by_content)
        return
    assert isinstance(value, torch.Tensor)
    if like is None and not is_dtensor(value):
        out.append(plain_shard(key, value, aliases, by_content))
        return
    layout = value if like is None else like
    assert is_dtensor(layout)
    whole = tuple(layout.shape)
    local = local_tensor(value)
    check_storable(key, local)
    dtype, grad = dtype_name(local.dtype), value.requires_grad
    from bytecheckpoint.frameworks.tensors.placements import boxes_of  # imports torch.distributed.tensor

    boxes = boxes_of(layout, str(key))
    if not boxes and 0 in whole and layout.device_mesh.get_coordinate() is not None:
        # A tensor without elements has no part anywhere, but the checkpoint must keep its key, shape and dtype.
        empty = torch.empty(whole, dtype=local.dtype, device=local.device)
        out.append(LiveShard(key, dtype, whole, origin_of(whole), whole, empty, aliases, grad, by_content))
        return
    for offsets, lengths, slices in boxes:
        data = local.detach() if slices is None else local.detach()[slices]
        out.append(LiveShard(key, dtype, whole, offsets, lengths, data, aliases, grad, by_content))
