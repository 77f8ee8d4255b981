"""Mail between processes: every rank holds one TCP connection to rank 0, which relays (a star).

Plain sockets and one I/O thread per rank, without polling: a message costs one wake-up at each hop, a connection that
breaks is noticed at once by whoever waits on it, a peer that hangs cannot hang us, and nothing here depends on torch.
`torch.distributed.TCPStore` was tried first: it refuses values over 8 MiB, its `get`, `check` and even timed `wait`
never return while its server is stopped, and each timed wait that ends logs two warnings.
"""

from __future__ import annotations

import hmac
import itertools
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from enum import IntEnum

from bytecheckpoint.collectives.base import Mailbox
from bytecheckpoint.errors import PeerLostError, UsageError

__all__ = ["Kind", "Link", "Wire"]

_HEADER = struct.Struct("<BIIIQ")  # kind, source, destination, length of tag, length of payload
_GREETING_LIMIT = 256  # bytes that a stranger may make us read
_BURST = 64  # reads from one connection before the others get their turn


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1  # rank k to 0, first frame: payload is the world's secret
    WELCOME = 2  # 0 to k: every rank is connected
    MAIL = 3
    WATCH = 4  # rank k to 0: tell me when rank `destination` is gone
    LOST = 5  # 0 to k: rank `source` is gone; payload says how
    CLOSING = 6  # 0 to k: send nothing more
    BYE = 7  # rank k to 0: this was my last frame


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
        self.rank = -1  # unknown until it has said HELLO
        self.said_bye = False
        self.hang_up = False  # shut down for writing once everything is sent
        self.dead = False
        self._out: deque[memoryview] = deque()
        self._lock = threading.Lock()
        self._header = bytearray(_HEADER.size)
        self._body: list[bytearray] = []
        self._target = memoryview(self._header)

    def post(self, kind: Kind, source: int, to: int, tag: bytes, payload: bytes | bytearray) -> bool:
        """Send as much as goes at once, keep the rest; False when something was kept. From any thread."""
        parts = [memoryview(_HEADER.pack(kind, source, to, len(tag), len(payload)) + tag)]
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
        while self._out:
            try:
                sent = self.sock.sendmsg(itertools.islice(self._out, 16))
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                # The reading side sees the broken connection too, and reports it.
                self._out.clear()
                return True
            while sent:
                head = self._out.popleft()
                if sent < len(head):
                    self._out.appendleft(head[sent:])
                    break
                sent -= len(head)
        if self.hang_up:
            self.hang_up = False
            try:
                self.sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        return True

    def frames(self) -> Iterable[tuple[Kind, int, int, bytes, bytearray]]:
        """Frames that have arrived.

        Raises:
            EOFError: the other side closed.
            OSError: the connection broke.
        """
        for _ in range(_BURST):
            try:
                count = self.sock.recv_into(self._target)
            except (BlockingIOError, InterruptedError):
                return
            if count == 0:
                raise EOFError
            self._target = self._target[count:]
            if len(self._target):
                continue
            if not self._body:
                kind, source, to, tag_size, size = _HEADER.unpack(self._header)
                if self.rank < 0 and (kind not in (Kind.HELLO, Kind.WELCOME) or tag_size + size > _GREETING_LIMIT):
                    raise OSError("not a rank of this world")
                self._body = [bytearray(tag_size), bytearray(size)]
                pending = [part for part in self._body if part]
            else:
                pending = [self._body[1]] if self._target.obj is self._body[0] and self._body[1] else []
            if pending:
                self._target = memoryview(pending[0])
                continue
            kind, source, to, _, _ = _HEADER.unpack(self._header)
            tag, payload = self._body
            self._body = []
            self._target = memoryview(self._header)
            yield Kind(kind), source, to, bytes(tag), payload

    def kill(self) -> None:
        """Drop the connection and what was to be sent."""
        with self._lock:
            self.dead = True
            self._out.clear()
            self.sock.close()


class Wire(ABC):
    """One rank's end of the star: its mailbox and the I/O thread that fills it.

    Args:
        rank: of this process.
        world_size: number of ranks.
        mailbox: where mail for this rank goes.
        secret: what only ranks of this world know.
        linger: most seconds that leaving waits for mail to be delivered.
    """

    def __init__(self, rank: int, world_size: int, mailbox: Mailbox, secret: bytes, linger: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.mailbox = mailbox
        self.linger = linger
        self.ready = threading.Event()  # every rank is connected, or that failed (then the mailbox is closed)
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        self._kept: deque[Link] = deque()  # links that have something left to send
        self._open: set[Link] = set()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._leave_asked = False
        self._deadline: float | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop, name="bytecheckpoint-mail", daemon=True)
        _wires.add(self)

    # Called from any thread.

    @abstractmethod
    def send(self, to: int, tag: str, payload: bytes) -> None:
        """Post mail."""

    @abstractmethod
    def watch(self, other: int) -> None:
        """Make sure that the mailbox learns when rank `other` is gone."""

    def leave(self) -> None:
        """Deliver what was sent, then disconnect: in the background. Takes no lock, so a finalizer may call it."""
        if os.getpid() == self._pid:
            self._leave_asked = True
            self._wake()

    def join(self, timeout: float) -> bool:
        """Wait until `leave` has finished; whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _check_sendable(self, tag: str) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"rank {self.rank}: this is a forked child: it cannot take part in its parent's collectives; "
                "call from the parent, or start the child with the 'spawn' method"
            )
        reason = self.mailbox.closed or ("this world was closed" if self._leave_asked else None)
        if reason is not None:
            raise PeerLostError(f"rank {self.rank}: cannot send {tag!r}: {reason}")

    def _post(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: bytes | bytearray) -> None:
        if not link.post(kind, source, to, tag, payload):
            self._kept.append(link)
            self._wake()

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"\0")
        except OSError:
            pass  # full: a wake-up is already pending; closed: nobody to wake

    # Below: on the I/O thread only.

    @abstractmethod
    def _on_frame(self, link: Link, kind: Kind, source: int, to: int, tag: bytes, payload: bytearray) -> None: ...

    @abstractmethod
    def _on_gone(self, link: Link) -> None: ...

    @abstractmethod
    def _on_leave(self) -> None: ...

    def _on_turn(self) -> None:
        """After each round of events."""

    def _on_stranger(self) -> None:
        """A connection is waiting to be accepted."""

    def _add(self, link: Link) -> None:
        self._open.add(link)
        self._selector.register(link.sock, selectors.EVENT_READ, link)

    def _drop(self, link: Link) -> None:
        if link in self._open:
            self._open.discard(link)
            self._selector.unregister(link.sock)
            link.kill()

    def _deposit(self, source: int, tag: bytes, payload: bytearray) -> None:
        self.mailbox.deposit(source, tag.decode(), bytes(payload))

    def _finished(self) -> bool:
        return self._deadline is not None and (not self._open or time.monotonic() > self._deadline)

    def _loop(self) -> None:
        try:
            while not self._finished():
                left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                for key, mask in self._selector.select(left):
                    if isinstance(key.data, Link):
                        self._serve(key.data, mask)
                    elif key.fileobj is self._wake_read:
                        self._drain_wakes()
                    else:
                        self._on_stranger()
                while self._kept:
                    link = self._kept.popleft()
                    if link in self._open:
                        self._selector.modify(link.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
                if self._leave_asked and self._deadline is None:
                    self._deadline = time.monotonic() + self.linger
                    self._on_leave()
                self._on_turn()
        except BaseException as error:
            self.mailbox.close(f"the mail thread failed: {type(error).__name__}: {error}")
            raise
        finally:
            self.mailbox.close("this world was closed")
            self.ready.set()
            self._release()

    def _serve(self, link: Link, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and link.flush():
            self._selector.modify(link.sock, selectors.EVENT_READ, link)
        if mask & selectors.EVENT_READ:
            try:
                for kind, source, to, tag, payload in link.frames():
                    self._on_frame(link, kind, source, to, tag, payload)
            except (EOFError, OSError):
                if link in self._open:
                    self._drop(link)
                    self._on_gone(link)

    def _drain_wakes(self) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _release(self) -> None:
        """Close every descriptor; in a forked child too, where nothing else of this object may be touched."""
        for link in list(self._open):
            link.sock.close()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _hang_up(self, link: Link) -> None:
        link.hang_up = True
        if not link.flush():
            self._kept.append(link)

    def _is_ours(self, payload: bytearray) -> bool:
        return hmac.compare_digest(bytes(payload), self._secret)


_wires: weakref.WeakSet[Wire] = weakref.WeakSet()


def leave_all() -> None:
    """At the end of the program: deliver the mail that is still under way, for at most the longest `linger`."""
    wires = [wire for wire in list(_wires) if wire._pid == os.getpid()]
    for wire in wires:
        wire.leave()
    deadline = time.monotonic() + max((wire.linger for wire in wires), default=0.0) + 0.5
    for wire in wires:
        wire.join(max(0.0, deadline - time.monotonic()))


def release_inherited() -> None:
    """In a forked child: close the parent's connections, which would otherwise seem alive after it has died."""
    for wire in list(_wires):
        wire._release()
