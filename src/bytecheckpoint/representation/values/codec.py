"""Encode plain values as bytes and decode them, with their exact types and without pickle (docs/format-values.md).

An encoded value is two header bytes and one MessagePack object. Types that MessagePack has stay native (None, bool,
64-bit int, float, str, bytes, list, dict with str keys), so any MessagePack reader shows the usual values. Every other
type is an extension, whose payload is again one MessagePack object. A tensor is represented by a name, under which the
caller stores the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.representation.values.codes import Code
from bytecheckpoint.representation.values.encoder import Encoder, OnTensor, pack
from bytecheckpoint.representation.values.equality import equal
from bytecheckpoint.representation.values.numpy_values import array_of_tensor
from bytecheckpoint.representation.values.registry import register, registration_named, unregistered_error
from bytecheckpoint.representation.values.tree import (
    MAX_DEPTH,
    TENSOR_CLASS,
    StoredTree,
    TensorRef,
    key_of_path,
    leaves_with_paths,
    naming_file,
)
from bytecheckpoint.representation.values.types import FROM_SIMPLE, NATIVE_TYPES, STR_ONLY

__all__ = [
    "MAX_DEPTH",
    "StoredTree",
    "TensorRef",
    "decode",
    "encode",
    "equal",
    "key_of_path",
    "leaves_with_paths",
    "naming_file",
    "register",
]

VERSION = 2
# MessagePack never uses the byte 0xC1, so an encoded value and bare MessagePack cannot be confused.
_MAGIC = 0xC1


def encode(value: object, *, on_tensor: OnTensor, on_array: OnTensor | None = None) -> bytes:
    """Encode `value` as bytes; equal values of equal types give equal bytes.

    Types are matched exactly: an instance of a subclass can be stored only when its class is registered. An object
    that is reached by two paths is stored twice, and decoded as two objects.

    Args:
        value: nested containers of plain values and tensors.
        on_tensor: (path, tensor) -> the name to store in the tensor's place. It is called for every tensor, DTensors
            and parameters included, once for each path to it. A path consists of dictionary keys, list indices and
            attribute names from the root.
        on_array: callback as `on_tensor` for large numpy arrays, which it gets as tensors; None: the encoded value holds
            their elements, as it always does inside of instances of classes, and for dtypes that torch lacks.

    Raises:
        UsageError: a part of `value` cannot be stored (unregistered class, cycle, too deep); the message names its path.
    """
    encoder = Encoder(on_tensor, on_array)
    packed = pack(encoder.to_native(value, 0))
    return bytes((_MAGIC, encoder.version)) + packed


def decode(
    blob: bytes,
    *,
    on_tensor: Callable[[str], object],
    on_array: Callable[[str], object] | None = None,
    on_unregistered: Callable[[str, object], object] | None = None,
    on_attributes: Callable[[Any, bool, bool], object] | None = None,
    restore: bool = True,
) -> object:
    """Decode a value that `encode` encoded. Only the code of registered classes runs.

    Args:
        blob: result of `encode`; hostile bytes are safe. Errors name the file of a `StoredTree`.
        on_tensor: name -> the object to put in the tensor's place. Its exceptions are passed on.
        on_array: name of the tensor that holds the elements of a numpy array -> the object to put in the array's place. By
            default an array with the memory of the tensor that `on_tensor` returns; a `TensorRef` says that it is one.
        on_unregistered: (name of a class that is not registered here, saved value of the instance) -> the object to put
            in the instance's place. By default such an instance is an error.
        on_attributes: (object in a tensor's place, True for a parameter, True if it requires a gradient) -> the object to
            put there, for tensors of which one is true. By default the object stays.
        restore: make instances of registered classes. False: leave them to `on_unregistered` too, so that no code of
            theirs runs.

    Raises:
        CorruptCheckpointError: `blob` is not an encoded value.
        IncompatibleCheckpointError: a newer version encoded the value, a class is not registered here or refuses the
            saved value, or a dtype or time zone is unknown here.
    """
    with naming_file(blob):
        if len(blob) < 2 or blob[0] != _MAGIC or blob[1] == 0:
            raise CorruptCheckpointError("the bytes are not encoded plain values: wrong header")
        if blob[1] > VERSION:
            raise IncompatibleCheckpointError(
                f"plain values are in version {blob[1]} of their encoding, this package reads up to {VERSION}; upgrade it"
            )
        if on_array is None:
            on_array = lambda name: array_of_tensor(on_tensor(name))  # noqa: E731
        callbacks = (on_tensor, on_array if blob[1] > 1 else None, on_unregistered, on_attributes)
        return Decoder(*callbacks, restore=restore).decode(memoryview(blob)[2:], 0)


# One container takes up to three MessagePack levels: extension, pair, list of keys or values.
_MAX_RAW_DEPTH = 3 * MAX_DEPTH + 3

_unpack: Callable[[Any], object] = msgspec.msgpack.Decoder().decode


class Decoder:
    """The decoder of one encoded value."""

    __slots__ = ("_on_array", "_on_attributes", "_on_tensor", "_on_unregistered", "_restore")

    def __init__(
        self,
        on_tensor: Callable[[str], object],
        on_array: Callable[[str], object] | None,
        on_unregistered: Callable[[str, object], object] | None,
        on_attributes: Callable[[Any, bool, bool], object] | None,
        *,
        restore: bool,
    ) -> None:
        self._on_array = on_array
        self._on_attributes = on_attributes
        self._on_tensor = on_tensor
        self._restore = restore
        self._on_unregistered = on_unregistered

    def decode(self, data: bytes | memoryview, depth: int) -> object:
        """Return the value of one MessagePack object, which is nested in `depth` levels of others."""
        try:
            raw = _unpack(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptCheckpointError(f"plain values are damaged: {error}") from error
        return self._value(raw, depth)

    def _value(self, raw: Any, depth: int) -> object:
        kind = type(raw)
        if kind in NATIVE_TYPES:
            return raw
        if depth > _MAX_RAW_DEPTH:
            raise CorruptCheckpointError("plain values are damaged: nested too deeply")
        if kind is list:
            if NATIVE_TYPES.issuperset(map(type, raw)):
                return raw
            for i, item in enumerate(raw):
                if type(item) not in NATIVE_TYPES:
                    raw[i] = self._value(item, depth + 1)
            return raw
        if kind is dict:
            if not STR_ONLY.issuperset(map(type, raw)):
                raise CorruptCheckpointError("plain values are damaged: a map with a key that is not a string")
            if NATIVE_TYPES.issuperset(map(type, raw.values())):
                return raw
            for key, item in raw.items():
                if type(item) not in NATIVE_TYPES:
                    raw[key] = self._value(item, depth + 1)
            return raw
        if kind is Ext:
            return self._extension(raw.code, self.decode(raw.data, depth + 1))
        raise CorruptCheckpointError(f"plain values are damaged: unexpected {kind.__name__}")

    def _extension(self, code: int, simple: Any) -> object:
        if code == Code.TENSOR and type(simple) is str:
            return self._on_tensor(simple)
        if code == Code.ARRAY_TENSOR and self._on_array is not None and type(simple) is str:
            return self._on_array(simple)
        if code == Code.REGISTERED and type(simple) is list and len(simple) == 2 and type(simple[0]) is str:
            return self._registered(*simple)
        from_simple = FROM_SIMPLE.get(code)
        if from_simple is None:
            raise CorruptCheckpointError(f"plain values are damaged: extension type {code}")
        try:
            return from_simple(simple)
        except CheckpointError:
            raise
        except Exception as error:
            # Standard constructors raise many types of error for malformed arguments.
            raise CorruptCheckpointError(
                f"plain values are damaged: not a {Code(code).name.lower()} ({type(error).__name__}: {error})"
            ) from error

    def _registered(self, name: str, saved: object) -> object:
        if name == TENSOR_CLASS:
            return self._with_attributes(saved)
        registration = registration_named(name) if self._restore else None
        if registration is None and self._on_unregistered is not None:
            return self._on_unregistered(name, saved)
        if registration is None:
            raise unregistered_error(name)
        return registration.restore(saved)

    def _with_attributes(self, saved: object) -> object:
        if type(saved) is not list or len(saved) != 3 or not all(type(flag) is bool for flag in saved[1:]):
            raise CorruptCheckpointError("plain values are damaged: a tensor with attributes that it cannot have")
        tensor, parameter, requires_grad = saved
        if type(tensor) is TensorRef:
            return TensorRef(tensor.name, parameter, requires_grad)
        return tensor if self._on_attributes is None else self._on_attributes(tensor, parameter, requires_grad)
