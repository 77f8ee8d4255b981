"""Frames, the units of the protocol between two ranks."""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

__all__ = ["ANYBODY", "Frame", "FrameReader", "Kind", "Payload", "ProtocolError", "header"]

_HEADER = struct.Struct("<BIIIQ")  # kind, source, destination, length of tag, length of payload
_MOST_TAG_BYTES = 64 << 10
_HANDSHAKE_BYTES = 256  # longest payload and tag that an unauthenticated connection may send

_LARGE = 1 << 20  # payloads whose memory is not cleared beforehand

Payload = bytes | bytearray | memoryview


class ProtocolError(OSError):
    """The other side has sent what no rank of this world sends here. Its connection ends."""


class Kind(IntEnum):
    """The kind of a frame."""

    # Of any new connection (`Greeting`):
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    # Of messages. "Up" is towards rank 0:
    JOIN = 4  # up: rank `source` is connected; payload: its `Place`
    REDIRECT = 5  # down: connect to another rank instead; payload: its `Place`
    WELCOME = 6  # down: every rank is connected
    MESSAGE = 7
    PACK = 8  # several messages (`packs`)
    WATCH = 9  # up: report when rank `destination`, or any, is gone
    LOST = 10  # rank `source` is gone; payload: the reason
    WHERE = 11  # up: send the place of rank `destination`
    PLACE = 12  # down: rank `source` listens at `Place`, the payload
    CLOSING = 13  # down: send no more messages
    BYE = 14  # up: this is the last frame of rank `source`
    # Only on direct connections:
    WANT = 15  # request for the array of exchange `tag`; payload: number of the request, size expected
    DATA = 16  # next piece of an array; tag: number of the request
    FAILED = 17  # this side has given up exchange `tag`; payload: the failure
    FETCH = 18  # request for data that the other side serves under `tag`; payload: as WANT, then the request itself
    REFUSED = 19  # answer to a fetch that failed; tag: number of the request; payload: the failure


#: Any rank that answers, in place of one.
ANYBODY = 0xFFFFFFFF
_GREETINGS = (Kind.HELLO, Kind.CHALLENGE, Kind.PROOF)


def header(kind: Kind, source: int, to: int, tag: bytes, size: int) -> memoryview:
    """Encode a frame up to its payload of `size` bytes."""
    return memoryview(_HEADER.pack(kind, source, to, len(tag), size) + tag)


_KINDS = frozenset(Kind)

Frame = tuple[Kind, int, int, bytes, Payload]
"""Kind, source, destination, tag, payload."""


class FrameReader:
    """Assembles frames from the bytes of a connection, each payload in the memory that `_allocate` provides."""

    def __init__(self) -> None:
        self._header = bytearray(_HEADER.size)
        self._tag: bytearray | None = None  # None while the header is incomplete
        self._payload: Payload | None = None  # None while header or tag are incomplete
        self.target = memoryview(self._header)  # memory for the next bytes

    def advance(self, count: int, *, authenticated: bool) -> Frame | None:
        """Note that `count` bytes have come into `target`; return the frame that they complete, if they complete one.

        Raises:
            ProtocolError: the bytes are no frame, or one that an unauthenticated connection may not send.
        """
        self.target = self.target[count:]
        if self.target:
            return None
        number, source, to, tag_size, size = _HEADER.unpack(self._header)
        if self._tag is None:
            handshake = number in _GREETINGS and tag_size + size <= _HANDSHAKE_BYTES
            if number not in _KINDS or not (authenticated or handshake):
                raise ProtocolError("not a rank of this world")
            if tag_size > _MOST_TAG_BYTES:
                raise ProtocolError(f"a tag of {tag_size} bytes")
            self._tag = bytearray(tag_size)
            self.target = memoryview(self._tag)
            if tag_size:
                return None
        kind, tag = Kind(number), bytes(self._tag)
        if self._payload is None:
            self._payload = self._allocate(kind, tag, size)
            self.target = memoryview(self._payload)
            if size:
                return None
        payload = self._payload
        self._tag = self._payload = None
        self.target = memoryview(self._header)
        return kind, source, to, tag, payload

    def _allocate(self, kind: Kind, tag: bytes, size: int) -> Payload:
        """Provide memory for the next payload. A large one takes memory as its bytes come, not as its header claims."""
        return bytearray(size) if size < _LARGE else memoryview(np.empty(size, np.uint8))

    def _discard_payload(self) -> None:
        """Read the rest of the current payload into other memory; its frame has an empty payload."""
        self._payload = bytearray()
        self.target = memoryview(bytearray(len(self.target)))
