"""Frames, the units of the protocol between two ranks, and the non-blocking connections that carry them."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable
from enum import IntEnum

from bytecheckpoint.collectives.transport.sockets import local_end

__all__ = ["Frame", "FrameReader", "Kind", "Link", "Payload", "header"]

_HEADER = struct.Struct("<BIIIQ")  # kind, source, destination, length of tag, length of payload
_HANDSHAKE_BYTES = 256  # longest payload and tag that an unauthenticated connection may send
_READS_PER_TURN = 64  # from one connection, before the others get their turn
_REFILLS_PER_TURN = 16  # the same for writes

Payload = bytes | bytearray | memoryview


class Kind(IntEnum):
    """The kind of a frame."""

    HELLO = 1  # first frame of the side that connects: payload is the world's secret
    WELCOME = 2  # the answer, with the secret too; the star sends it when every rank is connected
    # Only in the star:
    MESSAGE = 3
    WATCH = 4  # rank k to 0: report when rank `destination` is gone
    LOST = 5  # 0 to k: rank `source` is gone; payload: the reason
    CLOSING = 6  # 0 to k: send no more messages
    BYE = 7  # rank k to 0: this is my last frame
    # Only on direct connections:
    WANT = 8  # request for the array of exchange `tag`; payload: number of the request, size expected
    DATA = 9  # next piece of an array; tag: number of the request
    FAILED = 10  # this side has given up exchange `tag`; payload: the report of an error
    FETCH = 11  # request for data that the other side serves under `tag`; payload: as WANT, then the request itself
    REFUSED = 12  # answer to a fetch that failed; tag: number of the request; payload: the report of an error


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
            OSError: the bytes are no frame, or one that an unauthenticated connection may not send.
        """
        self.target = self.target[count:]
        if self.target:
            return None
        number, source, to, tag_size, size = _HEADER.unpack(self._header)
        if self._tag is None:
            handshake = number in (Kind.HELLO, Kind.WELCOME) and tag_size + size <= _HANDSHAKE_BYTES
            if number not in _KINDS or not (authenticated or handshake):
                raise OSError("not a rank of this world")
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
        """Provide memory for the next payload."""
        return bytearray(size)

    def _discard_payload(self) -> None:
        """Read the rest of the current payload into other memory; its frame has an empty payload."""
        self._payload = bytearray()
        self.target = memoryview(bytearray(len(self.target)))


class Link:
    """One non-blocking connection, with the queue of data to send and the reader of the frames that arrive."""

    def __init__(self, sock: socket.socket, reader: FrameReader) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that loses power closes no connection: probe after 15 s of silence, give up after another 30.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.sock = sock
        self.local = local_end(sock)
        self.rank = -1  # of the other side; unauthenticated until a valid HELLO or WELCOME
        self.said_bye = False
        self.hang_up = False  # shut down for writing once the queue is empty
        self._dead = False  # nothing can be sent any more
        self._queue: deque[memoryview] = deque()
        self._lock = threading.Lock()
        self._reader = reader

    def post(self, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> bool:
        """Send as much as the socket takes and queue the rest; False when something is queued. From any thread."""
        parts = [header(kind, source, to, tag, len(payload))]
        if payload:
            parts.append(memoryview(payload).cast("B"))
        with self._lock:
            if self._dead:
                return True
            idle = not self._queue
            self._queue.extend(parts)
            return self._flush() if idle else False

    def flush(self) -> bool:
        """Send as much of the queue as the socket takes; True when the queue is empty."""
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        refills = 0
        while not self._dead and (self._queue or self._refill()):
            try:
                sent = self.sock.sendmsg(itertools.islice(self._queue, 16))
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                # Reading from the broken connection fails too, and reports it.
                self._dead = True
                self._queue.clear()
                return True
            while sent:
                head = self._queue.popleft()
                if sent < len(head):
                    self._queue.appendleft(head[sent:])
                    break
                sent -= len(head)
            refills += not self._queue
            if refills > _REFILLS_PER_TURN:
                return False
        if self.hang_up:
            self.hang_up = False
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
        return True

    def _refill(self) -> bool:
        """Add more data to the empty queue; False when there is none."""
        return False

    def frames(self) -> Iterable[Frame]:
        """Yield the frames that have arrived.

        Raises:
            EOFError: the other side closed the connection.
            OSError: the connection broke, or it carries something else than frames.
        """
        for _ in range(_READS_PER_TURN):
            try:
                count = self.sock.recv_into(self._reader.target)
            except (BlockingIOError, InterruptedError):
                return
            if count == 0:
                raise EOFError
            if (frame := self._reader.advance(count, authenticated=self.rank >= 0)) is not None:
                yield frame

    def kill(self) -> None:
        """Close the connection and clear the queue."""
        with self._lock:
            self._dead = True
            self._queue.clear()
            self.sock.close()
