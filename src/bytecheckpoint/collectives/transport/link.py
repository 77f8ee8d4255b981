"""Non-blocking connections between two ranks, which carry frames."""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from bytecheckpoint.collectives.transport.greeting import Greeting
from bytecheckpoint.collectives.transport.tls import AGAIN_AFTER_READING, AGAIN_AFTER_WRITING, shut_down_writing
from bytecheckpoint.collectives.transport.wire import Frame, FrameReader, Kind, Payload, header
from bytecheckpoint.settings import settings

__all__ = ["Link"]

_READS_PER_TURN = 64  # from one connection, before the others get their turn
_REFILLS_PER_TURN = 16  # to one connection, likewise
#: Layout of `TCP_INFO` of Linux: eight bytes, of which the fourth counts probes of a closed window that nobody has
#: answered, then words, of which the fifth counts unacknowledged packets and the thirteenth milliseconds since the last
#: acknowledgement.
_TCP_INFO = struct.Struct("=3xB20xI28xI")


@dataclass(slots=True)
class _Outgoing:
    """The sending side of a connection.

    Attributes:
        queue: data to send.
        dead: True if nothing can be sent any more.
        hangs_up: True to shut down for writing once the queue is empty.
        resumes: True if sending continues once bytes have come (the handshake of TLS).
    """

    queue: deque[memoryview] = field(default_factory=deque)
    dead: bool = False
    hangs_up: bool = False
    resumes: bool = False


class _Acknowledgements:
    """Watches whether the other machine acknowledges the bytes that were sent to it over TCP.

    Keepalive probes nothing while data are under way, and the kernel sends those again for a quarter of an hour. Its time
    limit for that (`TCP_USER_TIMEOUT`) also cuts off a rank that lives and reads nothing for a while.

    Args:
        sock: the connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._overdue_since: float | None = None

    def are_overdue(self) -> bool:
        """Return whether acknowledgements have been missing for too long. The caller repeats this."""
        if not hasattr(socket, "TCP_INFO"):
            return False
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            probes, unacknowledged, silent = _TCP_INFO.unpack(info)
        except (OSError, struct.error):  # reading reports a broken connection; some systems say less
            return False
        now = time.monotonic()
        if not unacknowledged and probes < 2:
            self._overdue_since = None
            return False
        since = self._overdue_since = self._overdue_since or now
        unanswered: float = min(now - since, silent / 1000)
        return unanswered > settings().transport.peer_timeout


def _keepalive(timeout: float) -> dict[str, int]:
    """Return options of TCP by which an idle connection counts as broken after about `timeout` seconds, by 20 probes."""
    idle = min(15, math.ceil(timeout / 3))
    interval = min(math.ceil(max(1.0, timeout - idle) / 20), 32767)  # the most that Linux takes
    count = min(math.ceil(max(1.0, timeout - idle) / interval), 127)
    return {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": count}


class Link:
    """One non-blocking connection, with the queue of data to send and the reader of the frames that arrive.

    Args:
        sock: the connection, over TCP, TLS, or within this machine.
        reader: assembles frames from the bytes that arrive.
        greeting: this side of the handshake.

    Attributes:
        failure: reason why the connection broke, as far as this side knows; "" before that, and after an ordinary end.
        distrusted: True if TLS refused the connection: another attempt would fail too.
    """

    def __init__(self, sock: socket.socket, reader: FrameReader, greeting: Greeting) -> None:
        sock.setblocking(False)
        self._acknowledgements = None
        if sock.family != socket.AF_UNIX:
            self._acknowledgements = _Acknowledgements(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A machine that loses power closes no connection: probe while nothing is under way.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _keepalive(settings().transport.peer_timeout).items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.sock = sock
        self.greeting = greeting
        self.rank = -1  # rank of the other side, once the greeting is over
        self.failure = ""
        self.distrusted = False
        self._outgoing = _Outgoing()
        self._lock = threading.Lock()
        self._reader = reader

    @property
    def local(self) -> bool:
        """True for a connection within this machine."""
        return self._acknowledgements is None

    @property
    def _secured(self) -> bool:
        return isinstance(self.sock, ssl.SSLSocket)

    def post(self, kind: Kind, source: int, to: int, tag: bytes, payload: Payload) -> bool:
        """Send as much as the socket takes and queue the rest; False when something is queued. From any thread."""
        parts = [header(kind, source, to, tag, len(payload))]
        if payload:
            parts.append(memoryview(payload).cast("B"))
        with self._lock:
            if self._outgoing.dead:
                return True
            idle = not self._outgoing.queue
            self._outgoing.queue.extend(parts)
            return self._flush() if idle else False

    def flush(self) -> bool:
        """Send as much of the queue as the socket takes; True when the queue is empty."""
        with self._lock:
            return self._flush()

    def resume(self) -> bool:
        """Continue to send, if sending has waited for bytes that have come now; False when something stays queued."""
        if not self._outgoing.resumes:
            return True
        self._outgoing.resumes = False
        return self.flush()

    def hang_up(self) -> bool:
        """Shut down for writing once the queue is empty; False when something stays queued."""
        self._outgoing.hangs_up = True
        return self.flush()

    def _flush(self) -> bool:
        refills = 0
        while not self._outgoing.dead and (self._outgoing.queue or self._refill()):
            try:
                sent = self._send()
            except AGAIN_AFTER_WRITING:
                return False
            except AGAIN_AFTER_READING:  # the handshake of TLS
                self._outgoing.resumes = True
                return True
            except OSError as error:
                # Reading from the broken connection fails too, and reports it.
                self.note_failure(error)
                self._outgoing.dead = True
                self._outgoing.queue.clear()
                return True
            while sent:
                head = self._outgoing.queue.popleft()
                if sent < len(head):
                    self._outgoing.queue.appendleft(head[sent:])
                    break
                sent -= len(head)
            refills += not self._outgoing.queue
            if refills > _REFILLS_PER_TURN:
                return False
        if self._outgoing.hangs_up:
            self._outgoing.hangs_up = False
            with contextlib.suppress(OSError):
                shut_down_writing(self.sock)
        return True

    def _send(self) -> int:
        if self._secured:
            return self.sock.send(self._outgoing.queue[0])
        return self.sock.sendmsg(itertools.islice(self._outgoing.queue, 16))

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
        """Return whether the other machine has not acknowledged sent bytes for too long. The caller repeats this."""
        return self._acknowledgements is not None and self._acknowledgements.are_overdue()

    @property
    def remote(self) -> str:
        """Address of the other side, for logs."""
        if self.local:
            return "this machine"
        try:
            return "{} port {}".format(*self.sock.getpeername())
        except OSError:
            return "an address that is gone"

    def note_failure(self, error: BaseException) -> None:
        """Keep the first reason why the connection broke."""
        self.failure = self.failure or str(error)
        self.distrusted |= isinstance(error, ssl.SSLError)

    def ungreeted(self) -> str:
        """Return the error text of a connection that ended before its greeting."""
        ended = "the connection closed before the ranks had greeted each other"
        return f"{ended} ({self.failure})" if self.failure else ended

    def kill(self) -> None:
        """Close the connection and clear the queue."""
        with self._lock:
            self._outgoing.dead = True
            self._outgoing.queue.clear()
            self.sock.close()
