"""The tree of an optimizer's plain values: its form, references to state tensors, and tensors as plain data.

A state's tree is {"groups": [{"params": [FQN, ...], hyperparameter: value, ...}, ...], "state": {FQN: {slot: value}},
"aliases": {FQN: [further names]}, "globals": [...], "optimizers": [type names]}, "own": [further entries of
each optimizer's state_dict] where there are any, and "complete": true where this tree
holds all values of the parameters in its groups, so that a load need not look for more of them in other ranks' trees.

"state" holds only values that are not a plain tensor directly in a parameter's state: numbers, None, and nested
containers, whose tensors are references to slots. Tensors among the hyperparameters (a learning rate that a compiled step
reads) are small, and the tree holds them as plain data.
"""

from __future__ import annotations

from typing import Any

import torch

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name, dtype_named
from bytecheckpoint.representation.values.codec import encode

__all__ = [
    "comparable_bytes",
    "is_optimizer_tree",
    "pack_tensors",
    "parse_state_reference",
    "state_reference",
    "unpack_tensors",
]

_KEYS = frozenset({"groups", "state", "aliases", "globals", "optimizers"})
_OPTIONAL_KEYS = frozenset({"own", "complete"})

_TENSOR = "__tensor__"


def is_optimizer_tree(value: Any) -> bool:
    """Return whether a decoded tree is that of optimizers."""
    return isinstance(value, dict) and value.keys() - _OPTIONAL_KEYS == _KEYS


def state_reference(fqn: str, slot: str) -> str:
    """Return the name by which the tree refers to a state tensor inside a container."""
    return f"{len(fqn)}:{fqn}{slot}"


def parse_state_reference(name: str) -> tuple[str, str]:
    """Return the (FQN, slot) of a `state_reference`."""
    length, _, rest = name.partition(":")
    if not length.isdecimal():
        raise CorruptCheckpointError(f"the optimizer's values refer to a tensor by a malformed name: {name!r}")
    return rest[: int(length)], rest[int(length) :]


def pack_tensors(value: Any) -> Any:
    """Return `value` with its tensors as plain data, for values that the tree itself holds."""
    if isinstance(value, torch.Tensor):
        if is_dtensor(value):
            value = value.full_tensor()
        data = value.detach().cpu().contiguous()
        flat = data.reshape(-1).view(torch.uint8) if data.numel() else data.new_empty(0, dtype=torch.uint8)
        return {_TENSOR: [dtype_name(data.dtype), list(data.shape), flat.numpy().tobytes()]}
    if type(value) is dict:
        return {key: pack_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(pack_tensors, value))
    return value


def unpack_tensors(value: Any) -> Any:
    """Invert `pack_tensors`; the tensors are on the CPU."""
    if type(value) is dict:
        if value.keys() == {_TENSOR}:
            dtype, shape, data = value[_TENSOR]
            tensor = torch.empty(shape, dtype=dtype_named(dtype), device="cpu")
            if tensor.numel():
                tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return tensor
        return {key: unpack_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(unpack_tensors, value))
    return value


def comparable_bytes(value: Any) -> bytes:
    """Encode `value` for comparison: exact in type, and nan equals nan. Tensors are ignored."""
    return encode(value, on_tensor=lambda path, tensor: "")
