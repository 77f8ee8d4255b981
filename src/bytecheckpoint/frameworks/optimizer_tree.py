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

import math
from typing import Any

import torch

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.frameworks.tensors.dtensors import is_dtensor
from bytecheckpoint.frameworks.tensors.dtypes import dtype_name, dtype_named
from bytecheckpoint.representation.values.codec import encode
from bytecheckpoint.representation.values.tree import PACKED_TENSOR

__all__ = [
    "comparable_bytes",
    "is_optimizer_tree",
    "optimizer_state_dict",
    "pack_tensors",
    "unpack_tensors",
]

_KEYS = frozenset({"groups", "state", "aliases", "globals", "optimizers"})
_OPTIONAL_KEYS = frozenset({"own", "complete"})


def is_optimizer_tree(value: Any) -> bool:
    """Return whether a decoded tree is that of optimizers.

    Raises:
        CorruptCheckpointError: it has the keys of one, and another form.
    """
    if not (isinstance(value, dict) and value.keys() - _OPTIONAL_KEYS == _KEYS):
        return False
    groups, globals_, own = value["groups"], value["globals"], value.get("own", [])
    sound = (
        _are(dict, groups)
        and all(_are(str, group.get("params")) for group in groups)
        and _are(dict, globals_)
        and _are(dict, own)
        and _are(str, value["optimizers"])
        and all(isinstance(value[part], dict) and _are(str, list(value[part])) for part in ("state", "aliases"))
        and _are(dict, list(value["state"].values()))
        and all(_are(str, names) for names in value["aliases"].values())
        and isinstance(value.get("complete", False), bool)
    )
    if not sound:
        raise CorruptCheckpointError(
            "the optimizer's values do not have the form of an optimizer; use another checkpoint"
        )
    return True


def optimizer_state_dict(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of optimizers as one's state_dict has its values; those of several beside parameters are no part."""
    globals_, own = ([unpack_tensors(one) for one in tree.get(part, ())] for part in ("globals", "own"))
    groups = unpack_tensors(tree["groups"])
    state = {**(globals_[0] if len(globals_) == 1 else {}), **tree["state"]}
    return {"state": state, "param_groups": groups, **(own[0] if len(own) == 1 else {})}


def _are(kind: type, values: Any) -> bool:
    """Return whether a value is a list, or a tuple, of objects of one type."""
    return isinstance(values, list | tuple) and all(isinstance(item, kind) for item in values)


def pack_tensors(value: Any) -> Any:
    """Return `value` with its tensors as plain data, for values that the tree itself holds."""
    if isinstance(value, torch.Tensor):
        if is_dtensor(value):
            value = value.full_tensor()
        data = value.detach().cpu().contiguous()
        flat = data.reshape(-1).view(torch.uint8) if data.numel() else data.new_empty(0, dtype=torch.uint8)
        return {PACKED_TENSOR: [dtype_name(data.dtype), list(data.shape), flat.numpy().tobytes()]}
    if type(value) is dict:
        return {key: pack_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(pack_tensors, value))
    return value


def unpack_tensors(value: Any) -> Any:
    """Invert `pack_tensors`; the tensors are on the CPU."""
    if type(value) is dict:
        if value.keys() == {PACKED_TENSOR}:
            dtype, shape, data = _checked_tensor(value[PACKED_TENSOR])
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            if tensor.numel():
                tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return tensor
        return {key: unpack_tensors(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(unpack_tensors, value))
    return value


def _checked_tensor(packed: Any) -> tuple[torch.dtype, list[int], bytes]:
    """Return the parts of a tensor of `pack_tensors`, whose bytes are as many as its shape needs."""
    if _are(object, packed) and len(packed) == 3:
        name, shape, data = packed
        if isinstance(name, str) and _are(int, shape) and isinstance(data, bytes) and all(n >= 0 for n in shape):
            dtype = dtype_named(name)
            if math.prod(shape) * dtype.itemsize == len(data):
                return dtype, list(shape), data
    raise CorruptCheckpointError("the optimizer's values hold a tensor whose bytes do not fit its shape")


def comparable_bytes(value: Any) -> bytes:
    """Encode `value` for comparison: exact in type, and nan equals nan. Tensors are ignored."""
    return encode(value, on_tensor=lambda path, tensor: "")
