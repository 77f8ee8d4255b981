"""The walk that turns decoded MessagePack back into values (docs/format-values.md); hostile bytes are safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.representation.value_registry import registered_name
from bytecheckpoint.representation.value_tree import MAX_DEPTH
from bytecheckpoint.representation.value_types import LOAD, NATIVE, STR, Code

__all__ = ["Decoder"]

# One container takes up to three MessagePack levels: extension, pair, list of keys or values.
_MAX_RAW_DEPTH = 3 * MAX_DEPTH + 3

_unpack: Callable[[Any], object] = msgspec.msgpack.Decoder().decode


class Decoder:
    """One walk over decoded MessagePack, which puts values in the place of extensions."""

    __slots__ = ("_on_tensor", "_on_unregistered")

    def __init__(
        self, on_tensor: Callable[[str], object], on_unregistered: Callable[[str, object], object] | None = None
    ) -> None:
        self._on_tensor = on_tensor
        self._on_unregistered = on_unregistered

    def payload(self, data: bytes | memoryview, depth: int) -> object:
        """The value in the bytes of one MessagePack object."""
        try:
            raw = _unpack(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptCheckpointError(f"plain values are damaged: {error}") from error
        return self._lift(raw, depth)

    def _lift(self, raw: Any, depth: int) -> object:
        kind = type(raw)
        if kind in NATIVE:
            return raw
        if depth > _MAX_RAW_DEPTH:
            raise CorruptCheckpointError("plain values are damaged: nested too deeply")
        if kind is list:
            if NATIVE.issuperset(map(type, raw)):
                return raw
            for i, item in enumerate(raw):
                if type(item) not in NATIVE:
                    raw[i] = self._lift(item, depth + 1)
            return raw
        if kind is dict:
            if not STR.issuperset(map(type, raw)):
                raise CorruptCheckpointError("plain values are damaged: a map with a key that is not a string")
            if NATIVE.issuperset(map(type, raw.values())):
                return raw
            for key, item in raw.items():
                if type(item) not in NATIVE:
                    raw[key] = self._lift(item, depth + 1)
            return raw
        if kind is Ext:
            return self._extension(raw.code, self.payload(raw.data, depth + 1))
        raise CorruptCheckpointError(f"plain values are damaged: unexpected {kind.__name__}")

    def _extension(self, code: int, payload: Any) -> object:
        if code == Code.TENSOR and type(payload) is str:
            return self._on_tensor(payload)
        if code == Code.REGISTERED and type(payload) is list and len(payload) == 2 and type(payload[0]) is str:
            return self._registered(*payload)
        load = LOAD.get(code)
        if load is None:
            raise CorruptCheckpointError(f"plain values are damaged: extension type {code}")
        try:
            return load(payload)
        except CheckpointError:
            raise
        except Exception as error:
            # Whatever the standard constructors raise for arguments that no encoder writes.
            raise CorruptCheckpointError(
                f"plain values are damaged: not a {Code(code).name.lower()} ({type(error).__name__}: {error})"
            ) from error

    def _registered(self, name: str, payload: object) -> object:
        entry = registered_name(name)
        if entry is None and self._on_unregistered is not None:
            return self._on_unregistered(name, payload)
        if entry is None:
            raise IncompatibleCheckpointError(
                f"the checkpoint holds an instance of {name!r}, which is not registered here; "
                "call bytecheckpoint.register() for its class before loading"
            )
        try:
            return entry.decode(payload)
        except CheckpointError:
            raise
        except Exception as error:
            raise IncompatibleCheckpointError(
                f"the registered class {name!r} does not take what was saved ({type(error).__name__}: {error})"
            ) from error
