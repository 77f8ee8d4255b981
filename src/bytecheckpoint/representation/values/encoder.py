"""Convert values into objects that MessagePack has natively, and extensions (docs/format-values.md)."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext

from bytecheckpoint.errors import UsageError
from bytecheckpoint.representation.values.codes import Code
from bytecheckpoint.representation.values.numpy_values import (
    TENSOR_DTYPES,
    NotStorableError,
    array_as_tensor,
    dtype_to_simple,
    scalar_to_simple,
)
from bytecheckpoint.representation.values.registry import Registration, default_registration, registration_of
from bytecheckpoint.representation.values.tree import MAX_DEPTH, TENSOR_CLASS, TensorRef, key_of_path
from bytecheckpoint.representation.values.types import (
    NATIVE_TYPES,
    STORE_INSTEAD,
    STR_ONLY,
    TO_SIMPLE,
    factory_name,
)
from bytecheckpoint.tuning import tuning

__all__ = ["Encoder", "pack"]

_INT64_MIN = -(2**63)
_UINT64_MAX = 2**64 - 1
# Errors of msgspec for a native type beyond MessagePack's limits: a large int, a lone surrogate, 4 GiB of bytes.
_LIMIT_ERRORS = (OverflowError, UnicodeEncodeError, msgspec.EncodeError)

_TENSOR = Code.TENSOR.value
_ARRAY_TENSOR = Code.ARRAY_TENSOR.value

pack: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode


OnTensor = Callable[[tuple[object, ...], torch.Tensor], str]


class Encoder:
    """The encoder of one value.

    It tracks the path to the current value, the containers that enclose it, how many of these are dictionary keys or
    members of sets, and how many are instances of classes.

    Attributes:
        version: version of the encoding that the value needs.
    """

    __slots__ = (
        "_enclosing", "_instances", "_key_depth", "_max_bytes", "_min_tensor_bytes", "_on_array", "_on_tensor", "_path",
        "version",
    )  # fmt: skip

    def __init__(self, on_tensor: OnTensor, on_array: OnTensor | None = None) -> None:
        self.version = 1
        self._on_tensor = on_tensor
        self._on_array = on_array
        self._instances = 0
        self._max_bytes = tuning().max_value_bytes
        self._min_tensor_bytes = tuning().array_tensor_bytes
        self._path: list[object] = []
        self._enclosing: list[object] = []
        self._key_depth = 0

    def to_native(self, value: Any, depth: int) -> object:
        """Return `value` as native objects and extensions, which msgspec encodes."""
        kind = type(value)
        if kind in NATIVE_TYPES:
            return self._scalar(value)
        if depth >= MAX_DEPTH:
            self._refuse_depth(value)
        self._enclosing.append(value)
        native = self._compound(kind, value, depth + 1)
        self._enclosing.pop()
        return native

    def _scalar(self, value: Any) -> object:
        kind = type(value)
        if kind is int and not _INT64_MIN <= value <= _UINT64_MAX:
            return self._ext(Code.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        if kind is str and not value.isascii() and not _is_utf8(value):
            return self._ext(Code.SURROGATE_STR, value.encode("utf-8", "surrogatepass"))
        if kind in (str, bytes) and len(value) >= self._max_bytes // 4:
            size = len(value) if kind is bytes else len(value.encode())
            if size >= self._max_bytes:
                self._refuse_size(size)
        return value

    def _compound(self, kind: type, value: Any, depth: int) -> object:
        container = _CONTAINERS.get(kind)
        if container is not None:
            code, content = container
            return content(self, value, depth) if code is None else self._ext(code, content(self, value, depth))
        registration = registration_of(kind)
        if registration is not None:
            return self._instance(registration, value, depth)
        if kind is np.ndarray and self._on_array is not None and self._fits_tensor(value):
            return self._tensor_ref(TensorRef(self._on_array(tuple(self._path), array_as_tensor(value)), array=True), 0)
        try:
            known = TO_SIMPLE.get(kind)
            if known is not None:
                code, to_simple = known
                return self._ext(code, self.to_native(to_simple(value), depth))
            if isinstance(value, torch.Tensor):
                return self._tensor(value)
            if isinstance(value, np.dtype):
                return self._ext(Code.NUMPY_DTYPE, self.to_native(dtype_to_simple(value), depth))
            if isinstance(value, np.generic):
                return self._ext(Code.NUMPY_SCALAR, self.to_native(scalar_to_simple(value), depth))
        except NotStorableError as refusal:
            self._refuse(str(refusal))
        try:
            registration = default_registration(value)
        except UsageError as reason:
            self._refuse_class(kind, str(reason))
        return self._instance(registration, value, depth)

    def _instance(self, registration: Registration, value: object, depth: int) -> object:
        self._instances += 1
        native = self.to_native(registration.encode(value), depth)
        self._instances -= 1
        return self._ext(Code.REGISTERED, [self._scalar(registration.name), native])

    def _items(self, items: Sequence[object], depth: int, steps: Iterable[object] | None = None) -> object:
        """Convert a sequence; `steps` are the path elements of its items (default: indices)."""
        if NATIVE_TYPES.issuperset(map(type, items)):
            try:
                return msgspec.Raw(pack(items))
            except _LIMIT_ERRORS:
                pass
        native = []
        self._path.append(None)
        for step, item in zip(steps, items, strict=True) if steps is not None else enumerate(items):
            if type(item) is TensorRef:
                native.append(self._tensor_ref(item, depth))
                continue
            self._path[-1] = step
            native.append(self.to_native(item, depth))
        self._path.pop()
        return native

    def _dict(self, value: dict[Any, object], depth: int) -> object:
        if STR_ONLY.issuperset(map(type, value)):
            if NATIVE_TYPES.issuperset(map(type, value.values())):
                try:
                    return msgspec.Raw(pack(value))
                except _LIMIT_ERRORS:
                    pass
            if _is_utf8(value):
                native = self._items(list(value.values()), depth, value)
                assert isinstance(native, list)
                return dict(zip(value, native, strict=True))
        return self._ext(Code.DICT, self._pairs(value, depth))

    def _pairs(self, value: dict[Any, object], depth: int) -> list[object]:
        self._key_depth += 1
        keys = self._items(list(value), depth, value)
        self._key_depth -= 1
        return [keys, self._items(list(value.values()), depth, value)]

    def _factory_and_pairs(self, value: collections.defaultdict[Any, object], depth: int) -> list[object]:
        try:
            name = factory_name(value.default_factory)
        except NotStorableError as refusal:
            self._refuse(str(refusal))
        return [name, *self._pairs(value, depth)]

    def _maxlen_and_items(self, value: collections.deque[object], depth: int) -> list[object]:
        return [value.maxlen, self._items(list(value), depth)]

    def _members(self, members: set[object] | frozenset[object], depth: int) -> object:
        if NATIVE_TYPES.issuperset(map(type, members)):
            try:
                return sorted(members, key=pack)
            except _LIMIT_ERRORS:
                pass
        self._key_depth += 1
        self._path.append(None)
        packed = []
        for member in members:
            self._path[-1] = member
            packed.append(pack(self.to_native(member, depth)))
        self._path.pop()
        self._key_depth -= 1
        return [msgspec.Raw(item) for item in sorted(packed)]

    def _tensor_ref(self, value: TensorRef, depth: int) -> object:
        code = _TENSOR
        if value.array:
            code, self.version = _ARRAY_TENSOR, 2
        # A state_dict may hold tens of thousands of references, so ordinary names take a shortcut.
        if value.name.isascii() and len(value.name) < self._max_bytes // 4:
            reference = Ext(code, pack(value.name))
        else:
            reference = self._ext(Code(code), self._scalar(value.name))
        if value.parameter or value.requires_grad:
            return self._ext(Code.REGISTERED, [TENSOR_CLASS, [reference, value.parameter, value.requires_grad]])
        return reference

    def _tensor(self, value: torch.Tensor) -> object:
        if self._key_depth:
            self._refuse("a tensor cannot be a dictionary key or a member of a set; use its value or its name")
        name = self._on_tensor(tuple(self._path), value)
        return self._tensor_ref(TensorRef(name, isinstance(value, torch.nn.Parameter), value.requires_grad), 0)

    def _fits_tensor(self, array: np.ndarray[Any, Any]) -> bool:
        # The code of a class runs when its instance is decoded, before the elements of tensors are there.
        return array.nbytes >= self._min_tensor_bytes and array.dtype in TENSOR_DTYPES and not self._instances

    def _ext(self, code: Code, native: object) -> Ext:
        data = pack(native)
        if len(data) >= self._max_bytes:
            self._refuse_size(len(data))
        return Ext(code.value, data)

    def _refuse(self, why: str) -> NoReturn:
        raise UsageError(f"{key_of_path(tuple(self._path)) or 'the value'}: {why}")

    def _refuse_depth(self, value: object) -> NoReturn:
        chain = [*self._enclosing, value]
        seen: dict[int, int] = {}
        for level, container in enumerate(chain):
            if id(container) in seen:
                del self._path[level:]
                self._refuse(f"a {type(container).__name__} that contains itself cannot be stored; break the cycle")
            seen[id(container)] = level
        del self._path[8:]
        self._refuse(f"containers are nested more than {MAX_DEPTH} levels deep below this path; flatten them")

    def _refuse_size(self, size: int) -> NoReturn:
        self._refuse(f"{size} bytes are more than one value may have (4 GiB); store a tensor")

    def _refuse_class(self, kind: type, reason: str) -> NoReturn:
        name, short = f"{kind.__module__}.{kind.__qualname__}", kind.__name__
        base = next(
            (b.__name__ for b in kind.__mro__[1:] if b in NATIVE_TYPES or b in _CONTAINERS or b in TO_SIMPLE), ""
        )
        what = f"an instance of {name}" + (f", a subclass of {base}," if base else "")
        if name in STORE_INSTEAD:
            self._refuse(f"{what} cannot be stored; {STORE_INSTEAD[name]}")
        functions = f"encode={base}, decode={short}" if base else f"encode=vars, decode=lambda saved: {short}(**saved)"
        self._refuse(
            f"{what} cannot be stored: {reason}; store plain values instead, or say how to make plain values of it, for "
            f"example by bytecheckpoint.register({short}, {functions})"
        )


#: Exact class of a container -> its extension code, None if its content is the whole encoding; and its content's encoder.
_CONTAINERS: dict[type, tuple[Code | None, Callable[[Encoder, Any, int], object]]] = {
    list: (None, Encoder._items),
    tuple: (Code.TUPLE, Encoder._items),
    dict: (None, Encoder._dict),
    collections.OrderedDict: (Code.ORDERED_DICT, Encoder._pairs),
    collections.defaultdict: (Code.DEFAULT_DICT, Encoder._factory_and_pairs),
    collections.Counter: (Code.COUNTER, Encoder._pairs),
    collections.deque: (Code.DEQUE, Encoder._maxlen_and_items),
    set: (Code.SET, Encoder._members),
    frozenset: (Code.FROZENSET, Encoder._members),
    TensorRef: (None, Encoder._tensor_ref),
}


def _is_utf8(texts: Iterable[str]) -> bool:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True
