"""Plain values as bytes and back, with their exact types and without pickle (docs/format-values.md).

An encoded value is two header bytes and one MessagePack object. Types that MessagePack has stay native (None, bool,
64-bit int, float, str, bytes, list, dict with str keys), so any MessagePack reader shows the usual values. Every other
type is an extension, whose payload is again one MessagePack object. A tensor is represented by a name, under which the
caller stores the tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.representation.values.decoder import Decoder
from bytecheckpoint.representation.values.encoder import Encoder, pack
from bytecheckpoint.representation.values.equality import equal
from bytecheckpoint.representation.values.registry import register
from bytecheckpoint.representation.values.tree import MAX_DEPTH, TensorRef, key_of_path, leaves_with_paths

__all__ = ["MAX_DEPTH", "TensorRef", "decode", "encode", "equal", "key_of_path", "leaves_with_paths", "register"]

VERSION = 1
# MessagePack never uses the byte 0xC1, so an encoded value and bare MessagePack cannot be confused.
_MAGIC = 0xC1
_HEADER = bytes((_MAGIC, VERSION))


def encode(value: object, *, on_tensor: Callable[[tuple[object, ...], torch.Tensor], str]) -> bytes:
    """Encode `value` as bytes; equal values of equal types give equal bytes.

    Types are matched exactly: an instance of a subclass can be stored only when its class is registered. An object
    that is reached by two paths is stored twice, and decoded as two objects.

    Args:
        value: nested containers of plain values and tensors.
        on_tensor: (path, tensor) -> the name to store in the tensor's place. It is called for every tensor, DTensors
            and parameters included, once for each path to it. A path consists of dictionary keys, list indices and
            attribute names from the root.

    Raises:
        UsageError: a part of `value` cannot be stored (unregistered class, cycle, too deep); the message names its path.
    """
    return _HEADER + pack(Encoder(on_tensor).to_native(value, 0))


def decode(
    blob: bytes,
    *,
    on_tensor: Callable[[str], object],
    on_unregistered: Callable[[str, object], object] | None = None,
    restore: bool = True,
) -> object:
    """Decode a value that `encode` encoded. Only the code of registered classes runs.

    Args:
        blob: result of `encode`; hostile bytes are safe.
        on_tensor: name -> the object to put in the tensor's place. Its exceptions are passed on.
        on_unregistered: (name of a class that is not registered here, saved value of the instance) -> the object to put
            in the instance's place. By default such an instance is an error.
        restore: make instances of registered classes. False: leave them to `on_unregistered` too, so that no code of
            theirs runs.

    Raises:
        CorruptCheckpointError: `blob` is not an encoded value.
        IncompatibleCheckpointError: a newer version encoded the value, a class is not registered here or refuses the
            saved value, or a dtype or time zone is unknown here.
    """
    if len(blob) < 2 or blob[0] != _MAGIC or blob[1] == 0:
        raise CorruptCheckpointError("the bytes are not encoded plain values: wrong header")
    if blob[1] > VERSION:
        raise IncompatibleCheckpointError(
            f"plain values are in version {blob[1]} of their encoding, this package reads up to {VERSION}; upgrade it"
        )
    return Decoder(on_tensor, on_unregistered, restore=restore).decode(memoryview(blob)[2:], 0)
