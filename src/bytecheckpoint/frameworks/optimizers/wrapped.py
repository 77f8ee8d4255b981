"""Optimizer state in tensor subclasses that wrap plain tensors: moments in eight or four bits (torchao's OptimState8bit).

Such a subclass lists its tensors by `__tensor_flatten__`, with a context from which `__tensor_unflatten__` makes it again.
Each tensor inside is stored in a slot of its own ("exp_avg.codes"), and the tree names the class and holds the context.

State of a parameter that is whole on a rank can be of any such class. Of a sharded one a rank has a range of whole blocks
of elements, so that a load may cut elsewhere if its cuts lie between blocks: that is known of torchao's classes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bytecheckpoint.errors import IncompatibleCheckpointError, UsageError
from bytecheckpoint.frameworks.base import SavedTensor
from bytecheckpoint.frameworks.tensors.dtensors import PLAIN_TYPES, dtensor_of, is_dtensor, local_tensor
from bytecheckpoint.frameworks.tensors.dtypes import dtype_named
from bytecheckpoint.frameworks.tensors.plain import lists_own_shards, plain_shard
from bytecheckpoint.representation.shards import LiveShard, TensorKey

__all__ = ["capture_wrapped", "is_wrapped", "make_wrapped", "wrapped_slots"]

_WRAPPED = "__wrapped__"
_SHAPE = "__shape__"
# Attributes of torchao's classes that follow the elements: one value for each element, for two, or for each block.
_ELEMENTWISE = frozenset({"codes", "scale"})


def is_wrapped(value: object) -> bool:
    """Return whether `value` is a wrapper of plain tensors, or a DTensor of one."""
    if type(value) in PLAIN_TYPES or not isinstance(value, torch.Tensor):
        return False
    local: Any = local_tensor(value)
    cls: type = type(local)
    return bool(is_traceable_wrapper_subclass(local)) and not is_dtensor(local) and not lists_own_shards(cls)


class _LocalRange(NamedTuple):
    """The elements of a parameter that a rank has, which are consecutive.

    Attributes:
        key: key of the state, for errors.
        shape: shape of the parameter.
        local: shape of this rank's part of the parameter.
        start: row-major number of the part's first element.
    """

    key: TensorKey
    shape: tuple[int, ...]
    local: tuple[int, ...]
    start: int

    @staticmethod
    def of(key: TensorKey, value: torch.Tensor) -> _LocalRange:
        """Find the part that `value` is.

        Raises:
            UsageError: it is sharded along another dimension than the first.
        """
        shape = tuple(value.shape)
        if not is_dtensor(value):
            return _LocalRange(key, shape, shape, 0)
        from bytecheckpoint.frameworks.tensors.placements import boxes_of  # imports torch.distributed.tensor

        boxes = boxes_of(value, str(key))
        if len(boxes) != 1 or boxes[0].lengths[1:] != shape[1:]:
            raise UsageError(
                f"{key} is quantised in blocks, and sharded otherwise than along its first dimension: that is not "
                "supported; shard it by rows, or use an optimizer without quantised state"
            )
        return _LocalRange(key, shape, boxes[0].lengths, boxes[0].offsets[0] * prod(shape[1:]))

    def place(self, name: str, whole: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (offsets, lengths) of this part of the tensor `name`, whose shape is `whole` for the whole parameter.

        Raises:
            IncompatibleCheckpointError: the part begins or ends inside of a block.
        """
        whole = tuple(whole)
        if self.local == self.shape or name not in _ELEMENTWISE:
            return (0,) * len(whole), whole
        if whole == self.shape:
            return (self.start // prod(self.shape[1:]), *(0,) * (len(whole) - 1)), self.local
        block, rest = divmod(prod(self.shape), whole[0])
        if len(whole) != 1 or rest or self.start % block or prod(self.local) % block:
            raise IncompatibleCheckpointError(
                f"{self.key} is quantised in blocks of {block} elements, and this rank's part of it, {prod(self.local)} "
                f"elements from number {self.start}, cuts one: load it at a layout whose parts are whole blocks"
            )
        return (self.start // block,), (prod(self.local) // block,)

    def whole(self, name: str, inner: torch.Tensor) -> tuple[int, ...]:
        """Return the shape that the tensor `name` has for the whole parameter."""
        own = tuple(inner.shape)
        if self.local == self.shape or name not in _ELEMENTWISE:
            return own
        if own == self.local:
            return self.shape
        return (prod(self.shape) // (prod(self.local) // own[0]),)


def capture_wrapped(key: TensorKey, value: torch.Tensor, aliases: tuple[str, ...], shards: list[LiveShard]) -> object:
    """Append the tensors inside `value` to `shards`; return its description for the tree.

    Raises:
        UsageError: a sharded tensor of a class whose blocks are not known, or sharded along another dimension.
    """
    local: Any = local_tensor(value)
    names, context = local.__tensor_flatten__()
    part = _LocalRange.of(key, value)
    if part.local != part.shape and not (hasattr(local, "block_size") and {*names} <= _ELEMENTWISE | {"qmap"}):
        raise UsageError(
            f"{key} is a part of a {_name_of(type(local))}, and how its tensors follow the elements is not known: shard "
            "nothing, or use torchao's optimizers"
        )
    for name in names:
        inner = getattr(local, name)
        shards.append(_shard(TensorKey(key.state, key.fqn, f"{key.slot}.{name}"), name, inner, part, aliases))
    # Ranks have parts of different shapes, and equal trees.
    items = [_SHAPE if tuple(local.shape) == _as_tuple(item) else item for item in context or ()]
    return {_WRAPPED: [_name_of(type(local)), items]}


def _shard(key: TensorKey, name: str, inner: torch.Tensor, part: _LocalRange, aliases: tuple[str, ...]) -> LiveShard:
    shard = plain_shard(key, inner, aliases)
    shard.global_shape = part.whole(name, inner)
    shard.offsets, lengths = part.place(name, shard.global_shape)
    assert lengths == shard.lengths, "a part has as many values as its elements need"
    return shard


def wrapped_slots(values: Mapping[Any, Any]) -> dict[str, tuple[str, list[Any]]]:
    """Return slot -> (name of the class, context) of the wrapped tensors among the values of a parameter's state."""
    return {slot: tuple(v[_WRAPPED]) for slot, v in values.items() if isinstance(v, dict) and v.keys() == {_WRAPPED}}


def make_wrapped(
    key: TensorKey,
    described: tuple[str, list[Any]],
    found: Mapping[str, SavedTensor],
    parameter: torch.Tensor,
    live: object,
    aliases: tuple[str, ...],
    wanted: list[LiveShard],
) -> torch.Tensor:
    """Make the state tensor that a checkpoint describes, and append the shards that fill it to `wanted`.

    Args:
        key: key of the state.
        described: its item of `wrapped_slots`.
        found: name of a tensor inside -> the saved tensor.
        parameter: the live parameter.
        live: the state that it has now; filled in place if it has the same form.
        aliases: further names of the parameter.
        wanted: receives the shards.

    Raises:
        IncompatibleCheckpointError: the class is not known here, or the parameter's part begins inside a block.
    """
    part, own = _LocalRange.of(key, parameter), local_tensor(parameter)
    held: Any = local_tensor(live) if isinstance(live, torch.Tensor) and is_wrapped(live) else None
    cls: Any = type(held) if _name_of(type(held)) == described[0] else _allowed_class(key, described[0])
    shapes = {name: part.place(name, saved.global_shape)[1] for name, saved in found.items()}
    inner = {
        name: torch.empty(shapes[name], dtype=dtype_named(saved.dtype), device=own.device)
        for name, saved in found.items()
    }
    context = [torch.Size(part.local) if item == _SHAPE else item for item in described[1]]
    if isinstance(held, cls) and _has_form(held, inner, context):
        assert isinstance(live, torch.Tensor)
        made, inner = live, {name: getattr(held, name) for name in inner}
    else:
        made = cls.__tensor_unflatten__(inner, context, torch.Size(part.local), own.stride())
        if is_dtensor(parameter):
            made = dtensor_of(made, parameter)
    for name, tensor in inner.items():
        wanted.append(_shard(found[name].key, name, tensor, part, aliases))
    return made


def _has_form(held: Any, inner: Mapping[str, torch.Tensor], context: Sequence[object]) -> bool:
    names, own = held.__tensor_flatten__()
    return (
        {*names} == inner.keys()
        and [_as_tuple(item) for item in own or ()] == [_as_tuple(item) for item in context]
        and all(getattr(held, n).shape == t.shape and getattr(held, n).dtype == t.dtype for n, t in inner.items())
    )


def _allowed_class(key: TensorKey, name: str) -> Any:
    """Find a class among those that torch may make when it loads weights only."""
    for allowed in torch.serialization.get_safe_globals():
        cls = allowed[0] if isinstance(allowed, tuple) else allowed
        if isinstance(cls, type) and issubclass(cls, torch.Tensor) and _name_of(cls) == name:
            return cls
    raise IncompatibleCheckpointError(
        f"{key} is a {name}, which is not known here: import its package, or pass the class to "
        "torch.serialization.add_safe_globals"
    )


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else value
