"""The payloads of frames that ranks pass on: several messages in one frame, and the place at which a rank listens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

__all__ = ["Message", "Place", "merged", "pack", "unpack"]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The ports and the address at which a rank listens.

    Attributes:
        data: port for arrays.
        messages: port for the messages of other machines, 0 if it takes none.
        host: address of the rank; "" for the address of the rank that has passed this on.
    """

    data: int
    messages: int = 0
    host: str = ""


class Message(NamedTuple):
    """One message for, or of, several ranks.

    Attributes:
        tag: tag of the message.
        payload: payload of the message.
        ranks: ranks that have sent it, on its way up; ranks that it goes to, on its way down.
    """

    tag: bytes
    payload: bytes
    ranks: list[int]


# Built at import: msgspec (0.22) crashes if two threads use a type for the first time at once.
_DECODER = msgspec.msgpack.Decoder(list[tuple[bytes, bytes, list[int]]])


def merged(tag: bytes, sent: Sequence[tuple[bytes, int]]) -> list[Message]:
    """Join equal messages under one tag, given as (payload, rank). The messages of one rank keep their order."""
    if len({rank for _, rank in sent}) < len(sent):
        return [Message(tag, payload, [rank]) for payload, rank in sent]
    found: dict[bytes, list[int]] = {}
    for payload, rank in sent:
        found.setdefault(payload, []).append(rank)
    return [Message(tag, payload, ranks) for payload, ranks in found.items()]


def pack(messages: Iterable[Message]) -> bytes:
    """Encode messages for one frame."""
    return msgspec.msgpack.encode(list(messages))


def unpack(payload: bytes) -> list[Message]:
    """Decode the messages of one frame.

    Raises:
        msgspec.ValidationError: the bytes are no such frame.
    """
    return [Message(*each) for each in _DECODER.decode(payload)]
