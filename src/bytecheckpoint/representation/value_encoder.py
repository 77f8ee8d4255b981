"""The walk that turns a value into what MessagePack can express (docs/format-values.md)."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext

from bytecheckpoint.errors import UsageError
from bytecheckpoint.representation.value_numpy import Refusal, dump_dtype, dump_scalar
from bytecheckpoint.representation.value_registry import registered_class
from bytecheckpoint.representation.value_tree import MAX_DEPTH, TensorRef, dotted
from bytecheckpoint.representation.value_types import DUMP, HINTS, NATIVE, STR, Code, factory_name

__all__ = ["Encoder", "pack"]

SIZE_LIMIT = 2**32
"""MessagePack's lengths have 32 bits."""

_INT64_MIN = -(2**63)
_UINT64_MAX = 2**64 - 1
# What msgspec raises for a native type beyond MessagePack: a large int; a lone surrogate; 4 GiB of bytes.
_UNFIT = (OverflowError, UnicodeEncodeError, msgspec.EncodeError)

_TENSOR = Code.TENSOR.value

pack: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode


class Encoder:
    """One walk over a value. `path` and `open` say where the walk stands, for messages and for `on_tensor`."""

    __slots__ = ("_keys", "_on_tensor", "_open", "_path")

    def __init__(self, on_tensor: Callable[[tuple[object, ...], torch.Tensor], str]) -> None:
        self._on_tensor = on_tensor
        self._path: list[object] = []
        self._open: list[object] = []
        self._keys = 0

    def lower(self, value: Any, depth: int) -> object:
        """`value` as what msgspec encodes natively, exactly as meant."""
        kind = type(value)
        if kind in NATIVE:
            return self._scalar(value)
        if depth >= MAX_DEPTH:
            self._refuse_depth(value)
        self._open.append(value)
        lowered = self._compound(kind, value, depth + 1)
        self._open.pop()
        return lowered

    def _scalar(self, value: Any) -> object:
        kind = type(value)
        if kind is int and not _INT64_MIN <= value <= _UINT64_MAX:
            return self._ext(Code.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        if kind is str and not value.isascii() and not _is_utf8(value):
            return self._ext(Code.SURROGATE_STR, value.encode("utf-8", "surrogatepass"))
        if kind in (str, bytes) and len(value) >= SIZE_LIMIT // 4:
            size = len(value) if kind is bytes else len(value.encode())
            if size >= SIZE_LIMIT:
                self._refuse_size(size)
        return value

    def _compound(self, kind: type, value: Any, depth: int) -> object:
        handler = _HANDLERS.get(kind)
        if handler is not None:
            return handler(self, value, depth)
        entry = registered_class(kind)
        if entry is not None:
            return self._ext(Code.REGISTERED, [self._scalar(entry.name), self.lower(entry.encode(value), depth)])
        try:
            known = DUMP.get(kind)
            if known is not None:
                code, dump = known
                return self._ext(code, self.lower(dump(value), depth))
            if isinstance(value, torch.Tensor):
                return self._tensor(value)
            if isinstance(value, np.dtype):
                return self._ext(Code.NUMPY_DTYPE, self.lower(dump_dtype(value), depth))
            if isinstance(value, np.generic):
                return self._ext(Code.NUMPY_SCALAR, self.lower(dump_scalar(value), depth))
        except Refusal as refusal:
            self._refuse(str(refusal))
        self._refuse_class(kind)

    def _items(self, items: Sequence[object], depth: int, steps: Iterable[object] | None = None) -> object:
        """A sequence; `steps` are the path elements of its items (default: indices)."""
        if NATIVE.issuperset(map(type, items)):
            try:
                return msgspec.Raw(pack(items))
            except _UNFIT:
                pass
        lowered = []
        self._path.append(None)
        for step, item in zip(steps, items, strict=True) if steps is not None else enumerate(items):
            if type(item) is TensorRef:
                lowered.append(self._tensor_ref(item, depth))
                continue
            self._path[-1] = step
            lowered.append(self.lower(item, depth))
        self._path.pop()
        return lowered

    def _list(self, value: list[object], depth: int) -> object:
        return self._items(value, depth)

    def _tuple(self, value: tuple[object, ...], depth: int) -> object:
        return self._ext(Code.TUPLE, self._items(value, depth))

    def _dict(self, value: dict[Any, object], depth: int) -> object:
        if STR.issuperset(map(type, value)):
            if NATIVE.issuperset(map(type, value.values())):
                try:
                    return msgspec.Raw(pack(value))
                except _UNFIT:
                    pass
            if _is_utf8(value):
                lowered = self._items(list(value.values()), depth, value)
                assert isinstance(lowered, list)
                return dict(zip(value, lowered, strict=True))
        return self._ext(Code.DICT, self._pairs(value, depth))

    def _pairs(self, value: dict[Any, object], depth: int) -> list[object]:
        self._keys += 1
        keys = self._items(list(value), depth, value)
        self._keys -= 1
        return [keys, self._items(list(value.values()), depth, value)]

    def _ordered_dict(self, value: dict[Any, object], depth: int) -> object:
        return self._ext(Code.ORDERED_DICT, self._pairs(value, depth))

    def _counter(self, value: dict[Any, object], depth: int) -> object:
        return self._ext(Code.COUNTER, self._pairs(value, depth))

    def _default_dict(self, value: collections.defaultdict[Any, object], depth: int) -> object:
        try:
            name = factory_name(value.default_factory)
        except Refusal as refusal:
            self._refuse(str(refusal))
        return self._ext(Code.DEFAULT_DICT, [name, *self._pairs(value, depth)])

    def _deque(self, value: collections.deque[object], depth: int) -> object:
        return self._ext(Code.DEQUE, [value.maxlen, self._items(list(value), depth)])

    def _set(self, value: set[object], depth: int) -> object:
        return self._ext(Code.SET, self._members(value, depth))

    def _frozenset(self, value: frozenset[object], depth: int) -> object:
        return self._ext(Code.FROZENSET, self._members(value, depth))

    def _members(self, members: set[object] | frozenset[object], depth: int) -> object:
        if NATIVE.issuperset(map(type, members)):
            try:
                return sorted(members, key=pack)
            except _UNFIT:
                pass
        self._keys += 1
        self._path.append(None)
        packed = []
        for member in members:
            self._path[-1] = member
            packed.append(pack(self.lower(member, depth)))
        self._path.pop()
        self._keys -= 1
        return [msgspec.Raw(item) for item in sorted(packed)]

    def _tensor_ref(self, value: TensorRef, depth: int) -> object:
        # By the ten thousand in a state_dict, hence the shortcut for ordinary names.
        if value.name.isascii() and len(value.name) < SIZE_LIMIT // 4:
            return Ext(_TENSOR, pack(value.name))
        return self._ext(Code.TENSOR, self._scalar(value.name))

    def _tensor(self, value: torch.Tensor) -> object:
        if self._keys:
            self._refuse("a tensor cannot be a dictionary key or a member of a set; use its value or its name")
        return self._ext(Code.TENSOR, self._scalar(self._on_tensor(tuple(self._path), value)))

    def _ext(self, code: Code, payload: object) -> Ext:
        data = pack(payload)
        if len(data) >= SIZE_LIMIT:
            self._refuse_size(len(data))
        return Ext(code.value, data)

    def _refuse(self, why: str) -> NoReturn:
        raise UsageError(f"{dotted(tuple(self._path)) or 'the value'}: {why}")

    def _refuse_depth(self, value: object) -> NoReturn:
        chain = [*self._open, value]
        seen: dict[int, int] = {}
        for level, container in enumerate(chain):
            if id(container) in seen:
                del self._path[level:]
                self._refuse(f"a {type(container).__name__} that contains itself cannot be stored; break the cycle")
            seen[id(container)] = level
        del self._path[8:]
        self._refuse(f"containers inside one another more than {MAX_DEPTH} levels deep (below here); flatten them")

    def _refuse_size(self, size: int) -> NoReturn:
        self._refuse(f"{size} bytes are more than one value may have (4 GiB); store a tensor")

    def _refuse_class(self, kind: type) -> NoReturn:
        name = f"{kind.__module__}.{kind.__qualname__}"
        hint = HINTS.get(name, "register its class with bytecheckpoint.register(), or store plain values instead")
        base = next((b.__name__ for b in kind.__mro__[1:] if b in NATIVE or b in _HANDLERS or b in DUMP), "")
        what = f"an instance of {name}" + (f", a subclass of {base}," if base else "")
        self._refuse(f"{what} cannot be stored; {hint}")


_HANDLERS: dict[type, Callable[[Encoder, Any, int], object]] = {
    list: Encoder._list,
    tuple: Encoder._tuple,
    dict: Encoder._dict,
    collections.OrderedDict: Encoder._ordered_dict,
    collections.defaultdict: Encoder._default_dict,
    collections.Counter: Encoder._counter,
    collections.deque: Encoder._deque,
    set: Encoder._set,
    frozenset: Encoder._frozenset,
    TensorRef: Encoder._tensor_ref,
}


def _is_utf8(texts: Iterable[str]) -> bool:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True
