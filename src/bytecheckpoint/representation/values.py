"""Plain values as bytes and back, with their exact types and without pickle (docs/format-values.md).

An encoded value is two header bytes and one MessagePack object. What MessagePack has natively stays native (None,
bool, 64-bit int, float, str, bytes, list, dict with str keys), so that any MessagePack reader shows the common case
as it is; every other type is an extension whose payload is again one encoded value. Tensors are not in here: each
leaves a name, under which the caller stores it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.representation.value_decoder import Decoder
from bytecheckpoint.representation.value_encoder import Encoder, pack
from bytecheckpoint.representation.value_equality import equal
from bytecheckpoint.representation.value_registry import register
from bytecheckpoint.representation.value_tree import MAX_DEPTH, TensorRef, dotted, leaves

__all__ = ["MAX_DEPTH", "TensorRef", "decode", "dotted", "encode", "equal", "leaves", "register"]

VERSION = 1
# 0xC1 is the one byte that MessagePack never uses: a blob cannot be taken for bare MessagePack, nor the reverse.
_MAGIC = 0xC1
_HEADER = bytes((_MAGIC, VERSION))


def encode(value: object, *, on_tensor: Callable[[tuple[object, ...], torch.Tensor], str]) -> bytes:
    """`value` as bytes; equal values of equal types give equal bytes.

    Types are matched exactly: an instance of a subclass is stored only when its class was given to `register`.
    One object that is reached twice is stored twice, and comes back as two.

    Args:
        value: nested containers of plain values and tensors.
        on_tensor: called as (path, tensor) for every tensor leaf, DTensors and parameters included, once for each
            path that reaches it. Path: dictionary keys, list indices and attribute names from the root. Returns the
            name to store in the tensor's place.

    Raises:
        UsageError: something in `value` cannot be stored (unregistered class, cycle, too deep); names it and its path.
    """
    return _HEADER + pack(Encoder(on_tensor).lower(value, 0))


def decode(
    blob: bytes,
    *,
    on_tensor: Callable[[str], object],
    on_unregistered: Callable[[str, object], object] | None = None,
) -> object:
    """The value that `encode` made into `blob`. Runs no code but that of registered classes.

    Args:
        blob: result of `encode`; hostile bytes are safe.
        on_tensor: name -> what to put in the tensor's place. Its exceptions pass through.
        on_unregistered: (name of a class that is not registered here, what was saved of its instance) -> what to put
            in the instance's place; by default that is an error.

    Raises:
        CorruptCheckpointError: `blob` is not an encoded value.
        IncompatibleCheckpointError: a newer version of the encoding, a class that is not registered here or does not
            take what was saved, a dtype or time zone that is not known here.
    """
    if len(blob) < 2 or blob[0] != _MAGIC or blob[1] == 0:
        raise CorruptCheckpointError("the bytes are not encoded plain values: wrong header")
    if blob[1] > VERSION:
        raise IncompatibleCheckpointError(
            f"plain values are in version {blob[1]} of their encoding, this package reads up to {VERSION}; upgrade it"
        )
    return Decoder(on_tensor, on_unregistered).payload(memoryview(blob)[2:], 0)
