"""Decoding of MessagePack into values (docs/format-values.md); hostile bytes are safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError
from bytecheckpoint.representation.values.registry import registration_named, unregistered_error
from bytecheckpoint.representation.values.tree import MAX_DEPTH
from bytecheckpoint.representation.values.types import FROM_SIMPLE, NATIVE_TYPES, STR_ONLY, Code

__all__ = ["Decoder"]

# One container takes up to three MessagePack levels: extension, pair, list of keys or values.
_MAX_RAW_DEPTH = 3 * MAX_DEPTH + 3

_unpack: Callable[[Any], object] = msgspec.msgpack.Decoder().decode


class Decoder:
    """The decoder of one encoded value."""

    __slots__ = ("_on_tensor", "_on_unregistered", "_restore")

    def __init__(
        self,
        on_tensor: Callable[[str], object],
        on_unregistered: Callable[[str, object], object] | None = None,
        *,
        restore: bool = True,
    ) -> None:
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
        registration = registration_named(name) if self._restore else None
        if registration is None and self._on_unregistered is not None:
            return self._on_unregistered(name, saved)
        if registration is None:
            raise unregistered_error(name)
        return registration.restore(saved)
