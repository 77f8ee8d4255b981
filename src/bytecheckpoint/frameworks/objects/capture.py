"""Capture nested values and objects with a state_dict: one encoded tree per state, and a shard for each tensor in it.

Each tensor leaves its name in the tree. In most states a tensor is identified by its content, since ranks may hold
different values under one key (random number generators, dataloaders). In the states "model" and "optimizer" it is
identified by its name, as in a state_dict.
"""

from __future__ import annotations

import collections
import logging
import operator
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch

from bytecheckpoint.errors import UsageError
from bytecheckpoint.frameworks.tensors.discovery import add_shards
from bytecheckpoint.frameworks.tensors.dtensors import PLAIN_TYPES
from bytecheckpoint.frameworks.tensors.plain import is_plain, is_tensor_like
from bytecheckpoint.representation.names import unique_name
from bytecheckpoint.representation.shards import LiveShard, LiveState, TensorKey
from bytecheckpoint.representation.values.codec import MAX_DEPTH, TensorRef, encode, key_of_path
from bytecheckpoint.representation.values.registry import registration_of
from bytecheckpoint.representation.values.types import NATIVE_TYPES

__all__ = [
    "PROVIDER",
    "STATES_BY_NAME",
    "TensorExtractor",
    "capture_object",
    "encode_value",
    "is_stateful",
    "saved_provider",
    "tensor_name",
]

_log = logging.getLogger("bytecheckpoint")
_warned_of: set[type] = set()
#: States whose tensors are identified by name and box, not by content.
STATES_BY_NAME = frozenset({"model", "optimizer"})

#: Key that marks the plain values of a provider, so nothing takes them without the pieces. Its value is a class's name.
PROVIDER = "__bytecheckpoint_provider__"


def saved_provider(value: Any) -> str:
    """Return the name of the class of the provider whose plain values a decoded tree holds; "" for any other tree."""
    return str(value[PROVIDER]) if isinstance(value, dict) and value.keys() == {PROVIDER, "state_dict"} else ""


_DICTS = frozenset({dict, collections.OrderedDict})
_CONTAINERS = _DICTS | {list, tuple}


def is_stateful(value: object) -> bool:
    """Return whether `value` saves and restores itself through state_dict and load_state_dict."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def tensor_name(path: tuple[object, ...], taken: Container[str]) -> str:
    """Name the tensor at `path` of a nested value; "value" if the tensor is the whole value.

    Two paths may give one name: {"a": {"b": t}, "a.b": u} has two tensors called "a.b", and the second becomes "a.b#2".
    """
    name = key_of_path(path) or "value"
    return unique_name(name, taken) if name in taken else name


def encode_value(
    state_name: str,
    value: object,
    shards: list[LiveShard],
    *,
    by_content: bool = True,
    arrays: bool = True,
    prefix: tuple[str, ...] = (),
    check: Callable[[str, Any], None] = lambda name, tensor: None,
) -> bytes:
    """Encode `value` as a tree, and append the shards of its tensors to `shards`.

    Args:
        state_name: name of the state.
        value: the state, or a part of it.
        shards: list that receives the shards.
        by_content: True to identify plain tensors by their content, not by their name.
        arrays: True to store large numpy arrays as tensors, which are always identified by their content.
        prefix: path of `value` in the state.
        check: callback (name, tensor) that may refuse a tensor.

    Raises:
        UsageError: something in `value` cannot be stored; the message names its place.
    """
    taken: set[str] = set()

    def add(path: tuple[object, ...], tensor: Any, by_content: bool = by_content) -> str:
        name = tensor_name((*prefix, *(path or ("value",))), taken)
        check(name, tensor)
        taken.add(name)
        if by_content:
            _warn_of_subclass(TensorKey(state_name, name), tensor)
        add_shards(shards, TensorKey(state_name, name), tensor, by_content=by_content and is_plain(tensor))
        return name

    try:
        extracted = TensorExtractor(add, keeps_attributes=by_content).extract(value)
        return encode(extracted, on_tensor=add, on_array=partial(add, by_content=True) if arrays else None)
    except UsageError as error:
        # Messages about tensors name the state already; those about plain values start with the path inside it.
        named = str(error).startswith(f"{state_name}/")
        raise (error if named else UsageError(f"{state_name}/{'.'.join((*prefix, ''))}{error}")) from None


def _warn_of_subclass(key: TensorKey, tensor: Any) -> None:
    """Warn, once for each type, of a tensor whose type a load cannot make."""
    cls: type = type(tensor)
    if cls not in PLAIN_TYPES and is_plain(tensor) and cls not in _warned_of:
        _warned_of.add(cls)
        kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
        _log.warning(
            "%s is of type %s.%s, of which a checkpoint keeps the elements: a load makes a plain %s of it, unless the live "
            "value holds one of that type", key, cls.__module__, cls.__qualname__, kind,
        )  # fmt: skip


def capture_object(state_name: str, value: object) -> LiveState:
    """Describe the shards and the tree of a nested value, or of an object with a state_dict."""
    by_name = state_name in STATES_BY_NAME
    state = LiveState(state_name, merged=by_name)
    state.tree = encode_value(state_name, value, state.shards, by_content=not by_name)
    if state_name == "optimizer":
        for shard in state.shards:
            shard.must_be_equal = not shard.by_content  # flat state of FSDP1, say, is not equal on all ranks
    return state


class TensorExtractor:
    """One walk over a value that replaces live objects by their state_dict, and tensors by references to them.

    Args:
        add: callback (path, tensor) for every tensor; returns the name that stands for the tensor.
        keeps_attributes: True to note which tensors are parameters, and which ones require a gradient.

    Attributes:
        state_dicts: id of a live object -> its state_dict.
        needs_encoder: True if the value contains anything but dicts, lists, tuples, tensors and plain scalars; only the
            encoder finds the tensors inside.
    """

    def __init__(self, add: Callable[[tuple[object, ...], Any], str], *, keeps_attributes: bool = False) -> None:
        self._add = add
        self._keeps_attributes = keeps_attributes
        self._enclosing: set[int] = set()  # ids of the containers around the current value, to notice cycles
        self.state_dicts: dict[int, Any] = {}
        self.needs_encoder = False

    def extract(self, value: Any, path: tuple[object, ...] = ()) -> Any:
        """Return `value` with its tensors as `TensorRef`s."""
        cls = type(value)
        if cls in NATIVE_TYPES:
            return value
        if cls in _CONTAINERS and id(value) not in self._enclosing and len(self._enclosing) < MAX_DEPTH:
            return self._extract_container(cls, value, path)
        if is_tensor_like(value) and registration_of(cls) is None:
            return self._reference(path, value)
        if hasattr(cls, "__bytecheckpoint_pieces__"):
            where = key_of_path(path) or "the value"
            raise UsageError(f"{where}: a {cls.__name__} is streamed in pieces: make it a state of its own")
        if cls not in _CONTAINERS and is_stateful(value) and len(self._enclosing) < MAX_DEPTH:
            state = self.state_dicts[id(value)] = value.state_dict()
            return self.extract(state, path)
        # Also cycles and values that are nested too deeply, which the encoder refuses by name.
        self.needs_encoder = True
        return value

    def _reference(self, path: tuple[object, ...], tensor: Any) -> TensorRef:
        name = self._add(path, tensor)
        if self._keeps_attributes and isinstance(tensor, torch.Tensor):
            return TensorRef(name, isinstance(tensor, torch.nn.Parameter), tensor.requires_grad)
        return TensorRef(name)

    def _extract_container(self, cls: type, value: Any, path: tuple[object, ...]) -> Any:
        self._enclosing.add(id(value))
        is_dict = cls in _DICTS
        steps = value if is_dict else range(len(value))
        items = value.values() if is_dict else value
        # Of tens of thousands of items nearly all are plain tensors, which skip a call.
        extracted = [
            self._reference((*path, step), item) if type(item) in PLAIN_TYPES else self.extract(item, (*path, step))
            for step, item in zip(steps, items, strict=True)
        ]
        self._enclosing.discard(id(value))
        if all(map(operator.is_, extracted, items)):
            return value
        return cls(zip(steps, extracted, strict=True)) if is_dict else cls(extracted)
