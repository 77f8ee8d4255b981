"""Non-blocking connections between two ranks, which carry frames."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable

from bytecheckpoint.collectives.transport.greeting import Greeting
from bytecheckpoint.collectives.transport.tls import AGAIN_AFTER_READING, AGAIN_AFTER_WRITING, shut_down_writing
from bytecheckpoint.collectives.transport.wire import Frame, FrameReader, Kind, Payload, header
from bytecheckpoint.tuning import tuning

__all__ = ["Link"]

_READS_PER_TURN = 64  # from one connection, before the others get their turn
_REFILLS_PER_TURN = 16  # the same for writes
#: Layout of `TCP_INFO` of Linux: eight bytes, of which the fourth counts probes of a closed window that nobody has
#: answered, then words, of which the fifth counts unacknowledged packets and the thirteenth milliseconds since the last
#: acknowledgement.
_TCP_INFO = struct.Struct("=3xB20xI28xI")


class Link:
    """One non-blocking connection, with the queue of data to send and the reader of the frames that arrive.

    Args:
        sock: the connection, over TCP, TLS, or within this machine.
        reader: assembles what arrives.
        greeting: this side of it.

    Attributes:
        failure: why it broke, as far as this side knows; "" before that, and after an ordinary end.
    """

    def __init__(self, sock: socket.socket, reader: FrameReader, greeting: Greeting) -> None:
        sock.setblocking(False)
        self.local = sock.family == socket.AF_UNIX
        if not self.local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A machine that loses power closes no connection: probe after 15 s of silence, give up after another 30.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.sock = sock
        self._secured = isinstance(sock, ssl.SSLSocket)
        self.resumes = False  # more can be sent once something has come
        self.greeting = greeting
        self.rank = -1  # of the other side, once the greeting is over
        self.failure = ""
        self._unanswered_since: float | None = None
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
                sent = self._send()
            except AGAIN_AFTER_WRITING:
                return False
            except AGAIN_AFTER_READING:  # the handshake of TLS
                self.resumes = True
                return True
            except OSError as error:
                # Reading from the broken connection fails too, and reports it.
                self.failure = str(error)
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
                shut_down_writing(self.sock)
        return True

    def _send(self) -> int:
        if self._secured:
            return self.sock.send(self._queue[0])
        return self.sock.sendmsg(itertools.islice(self._queue, 16))

    def _refill(self) -> bool:
        """Add more data to the empty queue; False when there is none."""
        return False

    def frames(self) -> Iterable[Frame]:
        """Yield the frames that have arrived.

        Raises:
            EOFError: the other side closed the connection.
            OSError: the connection broke, or it carries something else than frames.
        """
        for number in itertools.count():
            # What TLS has decrypted already makes no selector report the connection.
            if number >= _READS_PER_TURN and not (self._secured and self.sock.pending()):  # type: ignore[attr-defined]
                return
            try:
                count = self._receive()
            except (*AGAIN_AFTER_WRITING, *AGAIN_AFTER_READING):
                return
            if count == 0:
                raise EOFError
            if (frame := self._reader.advance(count, authenticated=self.rank >= 0)) is not None:
                yield frame

    def _receive(self) -> int:
        if not self._secured:
            return self.sock.recv_into(self._reader.target)
        with self._lock:  # TLS takes one call at a time
            return self.sock.recv_into(self._reader.target)

    def is_cut_off(self) -> bool:
        """Return whether the other machine has not acknowledged sent bytes for too long. The caller repeats this.

        Keepalive probes nothing while data are under way, and the kernel sends those again for a quarter of an hour. Its
        time limit for that (`TCP_USER_TIMEOUT`) also cuts off a rank that lives and reads nothing for a while.
        """
        if self.local or not hasattr(socket, "TCP_INFO"):
            return False
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            probes, unacknowledged, silent = _TCP_INFO.unpack(info)
        except (OSError, struct.error):  # reading reports a broken connection; some systems say less
            return False
        now = time.monotonic()
        if not unacknowledged and probes < 2:
            self._unanswered_since = None
            return False
        since = self._unanswered_since = self._unanswered_since or now
        unanswered: float = min(now - since, silent / 1000)
        return unanswered > tuning().unanswered_timeout

    def ungreeted(self) -> str:
        """Tell that the connection ended before its greeting, and why."""
        ended = "the connection closed before the ranks had greeted each other"
        return f"{ended} ({self.failure})" if self.failure else ended

    def kill(self) -> None:
        """Close the connection and clear the queue."""
        with self._lock:
            self._dead = True
            self._queue.clear()
            self.sock.close()
