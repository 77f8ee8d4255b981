"""What goes over a connection between two ranks: frames, and a connection that takes and gives them."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable
from enum import IntEnum

from bytecheckpoint.collectives.sockets import local_end

__all__ = ["Frame", "Kind", "Link", "Payload", "header"]

_HEADER = struct.Struct("<BIIIQ")  # kind, source, destination, length of tag, length of payload
_GREETING_LIMIT = 256  # bytes that a stranger may make us read
_BURST = 64  # reads from one connection before the others get their turn
_REFILLS = 16  # the same for writes

Payload = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1  # first frame of who has dialled: payload is the world's secret
    WELCOME = 2  # the answer, with the secret too; in the star it comes when every rank is connected
    # Of the star:
    MAIL = 3
    WATCH = 4  # rank k to 0: tell me when rank `destination` is gone
    LOST = 5  # 0 to k: rank `source` is gone; payload says how
    CLOSING = 6  # 0 to k: send nothing more
    BYE = 7  # rank k to 0: this was my last frame
    # Of direct connections:
    WANT = 8  # send me your array of exchange `tag`; payload: a number for this request, and the size expected
    DATA = 9  # next piece of an array; tag: the number of the request
    FAILED = 10  # I have given up exchange `tag`; payload: the report of an error


def header(kind: Kind, source: int, to: int, tag: bytes, size: int) -> memoryview:
    """A frame up to its payload of `size` bytes."""
    return memoryview(_HEADER.pack(kind, source, to, len(tag), size) + tag)


_KINDS = frozenset(Kind)

Frame = tuple[Kind, int, int, bytes, Payload]
"""Kind, source, destination, tag, payload."""


class Link:
    """One non-blocking connection, with what is still to be sent and the frame that is being read."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that loses power sends no FIN: probe after 15 s of silence, give up after another 30.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.sock = sock
        self.local = local_end(sock)
        self.rank = -1  # unknown until it has said HELLO
        self.said_bye = False
        self.hang_up = False  # shut down for writing once everything is sent
        self.dead = False  # nothing can be sent any more
        self._out: deque[memoryview] = deque()
        self._lock = threading.Lock()
        self._header = bytearray(_HEADER.size)
        self._tag: bytearray | None = None  # None while a header is awaited
        self._payload: Payload | None = None  # None while header or tag are awaited
        self._target = memoryview(self._header)  # what the next bytes fill

    def post(self, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> bool:
        """Send as much as goes at once, keep the rest; False when something was kept. From any thread."""
        parts = [header(kind, source, to, tag, len(payload))]
        if payload:
            parts.append(memoryview(payload).cast("B"))
        with self._lock:
            if self.dead:
                return True
            idle = not self._out
            self._out.extend(parts)
            return self._flush() if idle else False

    def flush(self) -> bool:
        """Send what was kept, as far as it goes; True when nothing is left."""
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        refills = 0
        while not self.dead and (self._out or self._refill()):
            try:
                sent = self.sock.sendmsg(itertools.islice(self._out, 16))
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                # The reading side sees the broken connection too, and reports it.
                self.dead = True
                self._out.clear()
                return True
            while sent:
                head = self._out.popleft()
                if sent < len(head):
                    self._out.appendleft(head[sent:])
                    break
                sent -= len(head)
            refills += not self._out
            if refills > _REFILLS:
                return False
        if self.hang_up:
            self.hang_up = False
            try:
                self.sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        return True

    def _refill(self) -> bool:
        """Everything was handed to the kernel: put more into `_out` if there is more."""
        return False

    def _room(self, kind: Kind, tag: bytes, size: int) -> Payload:
        """Memory for the payload that comes now."""
        return bytearray(size)

    def frames(self) -> Iterable[Frame]:
        """Frames that have arrived.

        Raises:
            EOFError: the other side closed.
            OSError: the connection broke, or something else than frames came over it.
        """
        for _ in range(_BURST):
            try:
                count = self.sock.recv_into(self._target)
            except (BlockingIOError, InterruptedError):
                return
            if count == 0:
                raise EOFError
            self._target = self._target[count:]
            if not self._target and (frame := self._advance()) is not None:
                yield frame

    def _advance(self) -> Frame | None:
        """A part of a frame is complete: the whole frame, or None and `_target` is the next part."""
        number, source, to, tag_size, size = _HEADER.unpack(self._header)
        if self._tag is None:
            strange = self.rank < 0 and (number not in (Kind.HELLO, Kind.WELCOME) or tag_size + size > _GREETING_LIMIT)
            if strange or number not in _KINDS:
                raise OSError("not a rank of this world")
            self._tag = bytearray(tag_size)
            self._target = memoryview(self._tag)
            if tag_size:
                return None
        kind, tag = Kind(number), bytes(self._tag)
        if self._payload is None:
            self._payload = self._room(kind, tag, size)
            self._target = memoryview(self._payload)
            if size:
                return None
        payload = self._payload
        self._tag = self._payload = None
        self._target = memoryview(self._header)
        return kind, source, to, tag, payload

    def kill(self) -> None:
        """Drop the connection and what was to be sent."""
        with self._lock:
            self.dead = True
            self._out.clear()
            self.sock.close()
